// Tabs and their panels, by the ARIA pattern "tabs with automatic activation":
// https://www.w3.org/WAI/ARIA/apg/patterns/tabs/
import { element, uniqueId } from "./dom.js";

/**
 * Return the tab to which a key moves from the open tab; undefined for other keys.
 * @param {string} key
 * @param {string[]} names visible tabs in order
 * @param {string} open
 * @returns {string | undefined}
 */
export function tabAfterKey(key, names, open) {
  const number = names.indexOf(open);
  const count = names.length;
  const numbers = { ArrowLeft: (number - 1 + count) % count, ArrowRight: (number + 1) % count, Home: 0, End: count - 1 };
  return key in numbers ? names[numbers[/** @type {keyof typeof numbers} */ (key)]] : undefined;
}

export class Tabs {
  /**
   * @param {string} label name of the list for screen readers
   * @param {(name: string) => void} onOpen called with the tab that becomes visible
   */
  constructor(label, onOpen) {
    this.onOpen = onOpen;
    this.current = "";
    this.isChosen = false; // whether the person has opened the current tab
    /** @type {Map<string, { button: HTMLButtonElement, panel: HTMLDivElement }>} */
    this.entries = new Map();
    this.list = element("div", "tablist");
    this.list.setAttribute("role", "tablist");
    this.list.setAttribute("aria-label", label);
    this.list.addEventListener("keydown", (event) => this.handleKey(event));
    this.panels = element("div", "panels");
  }

  /**
   * Add a tab and return its panel.
   * @param {string} name
   */
  add(name) {
    const id = uniqueId();
    const button = element("button", "", name);
    const panel = element("div", "panel");
    button.id = `${id}-tab`;
    button.type = "button";
    button.tabIndex = -1;
    button.setAttribute("role", "tab");
    button.setAttribute("aria-selected", "false");
    button.setAttribute("aria-controls", id);
    button.addEventListener("click", () => this.choose(name));
    panel.id = id;
    panel.hidden = true;
    panel.tabIndex = 0; // it scrolls, also by keyboard
    panel.setAttribute("role", "tabpanel");
    panel.setAttribute("aria-labelledby", button.id);
    this.entries.set(name, { button, panel });
    this.list.append(button);
    this.panels.append(panel);
    return panel;
  }

  /** @param {string} name */
  has(name) {
    return this.entries.has(name);
  }

  /** @param {string} name */
  isOpen(name) {
    return name === this.current;
  }

  /** @param {string} name */
  panel(name) {
    const entry = this.entries.get(name);
    if (!entry) throw new Error(`The view has no tab ${name}`);
    return entry.panel;
  }

  /**
   * Open a tab for the person, who has clicked it or moved to it.
   * @param {string} name
   */
  choose(name) {
    this.isChosen = true;
    this.open(name);
  }

  /** @param {string} name */
  open(name) {
    if (!this.has(name)) return;
    this.current = name;
    for (const [other, { button, panel }] of this.entries) {
      const isOpen = other === name;
      button.setAttribute("aria-selected", String(isOpen));
      button.tabIndex = isOpen ? 0 : -1; // the Tab key stops once in the list
      panel.hidden = !isOpen;
    }
    this.onOpen(name);
  }

  /**
   * Show or hide a tab; if it was open, the first one opens.
   * @param {string} name
   * @param {boolean} isVisible
   */
  setVisible(name, isVisible) {
    const entry = this.entries.get(name);
    if (entry) entry.button.hidden = !isVisible;
    if (!isVisible && this.isOpen(name)) this.open(this.visibleNames()[0]);
  }

  /**
   * Show a number beside the name of a tab, or none.
   * @param {string} name
   * @param {number | null} count
   */
  setCount(name, count) {
    const button = this.entries.get(name)?.button;
    if (count === null) delete button?.dataset.count;
    else if (button) button.dataset.count = String(count);
  }

  visibleNames() {
    return [...this.entries].filter(([, { button }]) => !button.hidden).map(([name]) => name);
  }

  /** @param {KeyboardEvent} event */
  handleKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    const name = tabAfterKey(event.key, this.visibleNames(), this.current);
    if (name === undefined) return;
    event.preventDefault();
    this.choose(name);
    this.entries.get(name)?.button.focus();
  }
}
