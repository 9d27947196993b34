// The parts of a view on the page, the keys that they keep from JupyterLab, and the static image.
import { element } from "./dom.js";
import { markTheme } from "./theme.js";

/**
 * Put the parts of a view into its element, from top to bottom: verdict, changes, knobs, timeline, and below it the tabs
 * about the cursor beside those about settings.
 * @param {HTMLElement} root
 * @param {import("./view.js").View} view
 */
export function buildPage(root, { verdict, explorer, run, timeline, tabs, side, details, layerActions, live }) {
  root.classList.add("memexplore");
  markTheme(root);
  verdict.meter.append(explorer.knobs.gpu);
  verdict.side.append(explorer.search.root);
  timeline.stage.append(explorer.running);
  const main = element("div", "main");
  const place = element("div", "place");
  place.append(details.position, element("span", "stale-note", "of the picture before"), layerActions.root);
  main.append(bar(tabs.list, details.search), place, tabs.panels);
  const beside = element("div", "side");
  beside.append(bar(side.list), side.panels);
  const lower = element("div", "lower");
  lower.append(main, beside);
  root.append(run.root, ...verdict.elements, explorer.root, run.place, timeline.stage, run.history.root, lower, live.root);
}

/** @param {HTMLElement[]} parts */
function bar(...parts) {
  const created = element("div", "tabs");
  created.append(...parts);
  return created;
}

const NO_SHORTCUTS = "data-lm-suppress-shortcuts"; // of Lumino, which has the shortcuts of JupyterLab and Notebook 7

/**
 * Keep key presses in an element from JupyterLab, which would take arrows, Enter and letters for commands to the
 * notebook. Returns a function that stops it.
 * @param {HTMLElement} root
 */
export function keepKeys(root) {
  const keep = (/** @type {KeyboardEvent} */ event) => isKept(event) && event.stopPropagation();
  // Notebook 7 takes a key before the element with the focus gets it, except where this element has the attribute.
  const mark = (/** @type {KeyboardEvent} */ event) => {
    if (event.target instanceof HTMLElement && root.contains(event.target)) event.target.toggleAttribute(NO_SHORTCUTS, isKept(event));
  };
  root.addEventListener("keydown", keep);
  window.addEventListener("keydown", mark, true);
  return () => {
    root.removeEventListener("keydown", keep);
    window.removeEventListener("keydown", mark, true);
  };
}

/**
 * Return whether a key is for the element that has the focus: shortcuts, Escape and Shift+Enter are for the notebook.
 * @param {Pick<KeyboardEvent, "ctrlKey" | "metaKey" | "altKey" | "shiftKey" | "key">} event
 */
export function isKept({ ctrlKey, metaKey, altKey, shiftKey, key }) {
  return !ctrlKey && !metaKey && !altKey && key !== "Escape" && !(shiftKey && key === "Enter");
}

/**
 * Hide the static image, which is for notebooks without a kernel. Returns a function that shows it again.
 * @param {string} className
 */
export function hideStaticImage(className) {
  const style = document.createElement("style");
  style.textContent = `.${className}, .jp-OutputArea-child:has(.${className}) { display: none !important }`;
  document.head.append(style);
  return () => style.remove();
}
