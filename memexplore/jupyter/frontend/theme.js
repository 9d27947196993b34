// The page's colour theme: how it is recognised, watched, and applied to plotly figures.

/**
 * What decides the theme: attributes of `html` and `body`, and colours.
 * @typedef {{
 *   elements: { attributes: Record<string, string | null>, classes: string[] }[],
 *   background: string | null,
 *   prefersDark: boolean,
 * }} Page
 */

const ATTRIBUTES = ["data-jp-theme-light", "data-vscode-theme-kind", "data-theme", "theme"];
// Attributes whose change may change colours; plugins of JupyterLab may change only the name of the theme.
const WATCHED = [...ATTRIBUTES, "data-jp-theme-name", "class", "style"];
const DARK = /(^|[-_ ])dark([-_ ]|$)/;
const LIGHT = /(^|[-_ ])light([-_ ]|$)/;

/**
 * Return whether the page is dark. JupyterLab's and VS Code's marks come first, then other marks of a theme, then the
 * background behind the widget, then the preference of the operating system.
 * @param {Page} page
 */
export function isDark({ elements, background, prefersDark }) {
  for (const { attributes, classes } of elements) {
    const jupyter = attributes["data-jp-theme-light"];
    if (jupyter) return jupyter === "false";
    const vscode = attributes["data-vscode-theme-kind"] ?? classes.find((name) => name.startsWith("vscode-"));
    if (vscode) return !LIGHT.test(vscode);
  }
  for (const { attributes, classes } of elements) {
    for (const mark of [attributes["data-theme"], attributes.theme, ...classes]) {
      if (mark && DARK.test(mark)) return true;
      if (mark && LIGHT.test(mark)) return false;
    }
  }
  const luminance = background === null ? null : relativeLuminance(background);
  return luminance === null ? prefersDark : luminance < 0.5;
}

/**
 * Return the luminance (0 to 1) of a colour as browsers compute it, null if it is transparent.
 * @param {string} colour such as `rgb(17, 17, 17)` or `rgba(0, 0, 0, 0)`
 */
export function relativeLuminance(colour) {
  const [red, green, blue, alpha = 1] = (colour.match(/[\d.]+/g) ?? []).map(Number);
  if (blue === undefined || alpha < 0.5) return null;
  return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255; // weights of ITU-R BT.709
}

/**
 * Set the attribute `data-memexplore-theme` of an element, which chooses the colours of view.css on pages that define
 * none of their own.
 * @param {HTMLElement} root
 */
export function markTheme(root) {
  /** @type {string | null} */
  let background = null;
  for (let parent = root.parentElement; parent && background === null; parent = parent.parentElement) {
    const colour = getComputedStyle(parent).backgroundColor;
    if (relativeLuminance(colour) !== null) background = colour;
  }
  const elements = [document.body, document.documentElement].map((part) => ({
    attributes: Object.fromEntries(ATTRIBUTES.map((name) => [name, part.getAttribute(name)])),
    classes: [...part.classList],
  }));
  const { matches } = matchMedia("(prefers-color-scheme: dark)");
  root.dataset.memexploreTheme = isDark({ elements, background, prefersDark: matches }) ? "dark" : "light";
}

/**
 * Call a function when the theme of the page may have changed. Returns a function that stops it.
 * @param {() => void} onChange
 */
export function watchTheme(onChange) {
  const observer = new MutationObserver(onChange);
  for (const part of [document.documentElement, document.body]) {
    observer.observe(part, { attributes: true, attributeFilter: WATCHED });
  }
  const preference = matchMedia("(prefers-color-scheme: dark)");
  preference.addEventListener("change", onChange);
  return () => {
    observer.disconnect();
    preference.removeEventListener("change", onChange);
  };
}

/**
 * Return a layout with text and buttons in the page's text colour. Figures have no background: the page's is visible.
 * @param {import("./types").Layout} layout
 * @param {string} colour
 * @returns {import("./types").Layout}
 */
export function themedLayout(layout, colour) {
  const modebar = { bgcolor: "rgba(0,0,0,0)", color: "#888888", activecolor: colour };
  return { ...layout, font: { ...layout.font, color: colour }, modebar };
}

/**
 * Return the colours of text and background of a view. They are read once for each theme: the page computes all its styles
 * again when they are read.
 * @param {import("./chart.js").Context} context
 */
export function coloursOf(context) {
  if (context.colours) return context.colours;
  const style = getComputedStyle(context.root);
  const colours = { text: style.color, paper: style.getPropertyValue("--memexplore-paper").trim() };
  if (colours.text) context.colours = colours; // an element that is not on the page has none
  return colours;
}
