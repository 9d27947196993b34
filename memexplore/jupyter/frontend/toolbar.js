// A row of buttons with one tab stop, by the ARIA pattern "toolbar":
// https://www.w3.org/WAI/ARIA/apg/patterns/toolbar/
import { element } from "./dom.js";

/**
 * Return the number of the button to which a key moves, undefined for other keys.
 * @param {string} key
 * @param {number} number
 * @param {number} count
 */
export function buttonAfterKey(key, number, count) {
  const last = count - 1;
  const numbers = { ArrowLeft: number ? number - 1 : last, ArrowRight: number < last ? number + 1 : 0, Home: 0, End: last };
  return key in numbers ? numbers[/** @type {keyof typeof numbers} */ (key)] : undefined;
}

/**
 * Return an element whose buttons share one tab stop: arrow keys move between them.
 * @param {string} name
 * @param {string} label
 */
export function toolbar(name, label) {
  const bar = element("div", name);
  makeToolbar(bar, label);
  return bar;
}

/**
 * Let the buttons of an element share one tab stop.
 * @param {HTMLElement} bar
 * @param {string} label
 */
export function makeToolbar(bar, label) {
  bar.setAttribute("role", "toolbar");
  bar.setAttribute("aria-label", label);
  bar.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    const buttons = usableButtons(bar);
    const number = buttonAfterKey(event.key, buttons.indexOf(/** @type {any} */ (document.activeElement)), buttons.length);
    if (number === undefined || !buttons[number]) return;
    event.preventDefault();
    event.stopPropagation();
    markStop(bar, buttons[number]);
    buttons[number].focus();
  });
  bar.addEventListener("focusin", (event) => markStop(bar, /** @type {HTMLElement} */ (event.target)));
}

/**
 * Choose the tab stop again after buttons were added, removed or disabled.
 * @param {HTMLElement} bar
 */
export function updateToolbar(bar) {
  const buttons = usableButtons(bar);
  markStop(bar, buttons.find((button) => button.tabIndex === 0) ?? buttons[0]);
}

/** @param {HTMLElement} bar */
function usableButtons(bar) {
  return [...bar.querySelectorAll("button")].filter((button) => !button.disabled && !button.hidden);
}

/**
 * @param {HTMLElement} bar
 * @param {HTMLElement | undefined} stop
 */
function markStop(bar, stop) {
  for (const button of bar.querySelectorAll("button")) button.tabIndex = button === stop ? 0 : -1;
}
