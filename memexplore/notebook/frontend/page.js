// The page around a view: keyboard shortcuts of JupyterLab, labels of ipywidgets, and the static image.

/**
 * Keep a key press from JupyterLab, which would take arrows, Enter and letters for commands to the notebook.
 * @param {Event} event
 */
function keepKey(event) {
  const { ctrlKey, metaKey, altKey, shiftKey, key } = /** @type {KeyboardEvent} */ (event);
  if (!ctrlKey && !metaKey && !altKey && key !== "Escape" && !(shiftKey && key === "Enter")) event.stopPropagation();
}

/**
 * Return the explorer that a view is part of, null for a view on its own.
 * @param {HTMLElement} root
 */
export function explorerOf(root) {
  return root.closest(".memexplore-explorer");
}

/**
 * Prepare keyboard and screen readers for a view and the controls of its explorer.
 * @param {HTMLElement} root
 */
export function prepareSurroundings(root) {
  const explorer = explorerOf(root);
  const knobs = explorer?.querySelector(".memexplore-knobs");
  for (const part of knobs ? [root, knobs] : [root]) part.addEventListener("keydown", keepKey);
  // ipywidgets does not connect a slider with its label.
  for (const handle of knobs?.querySelectorAll(".noUi-handle") ?? []) {
    const label = handle.closest(".widget-slider")?.querySelector("label");
    handle.setAttribute("aria-label", label?.textContent ?? "");
  }
  for (const name of ["headline", "hints"]) {
    explorer?.querySelector(`.memexplore-${name}`)?.setAttribute("role", "status");
  }
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
