// HTML elements with the widget's CSS classes.

/**
 * Return a new element with the class `memexplore-NAME` and some text.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {string} [name]
 * @param {string} [text]
 */
export function element(tag, name = "", text = "") {
  const created = document.createElement(tag);
  if (name) created.className = `memexplore-${name}`;
  created.textContent = text;
  return created;
}

/**
 * Return an empty element for plotly to draw into.
 * @param {string} name
 */
export function graphElement(name) {
  return /** @type {import("./types").Graph} */ (/** @type {unknown} */ (element("div", name)));
}

/** Return an id that no other element or view has. Works on pages without https, where `randomUUID` is missing. */
export function uniqueId() {
  return `memexplore-${[...crypto.getRandomValues(new Uint32Array(3))].map((part) => part.toString(36)).join("")}`;
}

/**
 * Replace the children of an element. The keyboard focus stays on the button with the same number.
 * @param {HTMLElement} parent
 * @param {HTMLElement[]} children
 */
export function replaceKeepingFocus(parent, children) {
  const buttons = () => /** @type {HTMLElement[]} */ ([...parent.querySelectorAll("button")]);
  const focused = buttons().indexOf(/** @type {HTMLElement} */ (document.activeElement));
  parent.replaceChildren(...children);
  buttons()[focused]?.focus();
}
