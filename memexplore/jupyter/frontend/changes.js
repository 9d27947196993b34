// The row of changes: what differs from the step as written, against what it is compared, and undo and redo.
import { element, replaceKeepingFocus } from "./dom.js";
import { toolbar, updateToolbar } from "./toolbar.js";

/** @typedef {import("./types").ExplorerState} ExplorerState */

export class Changes {
  /** @param {(request: { type: string, field?: string }) => void} onRequest */
  constructor(onRequest) {
    this.onRequest = onRequest;
    this.root = toolbar("changes", "Changes");
    this.list = element("span", "changed");
    this.against = element("span", "against");
    this.resetAll = this.button("Reset all", "reset all", "Return to the step as written");
    this.pin = this.button("Pin", "pin", "Compare later settings with this one");
    this.undo = this.button("⟲", "undo", "Undo");
    this.redo = this.button("⟳", "redo", "Redo");
    const compare = element("span", "compare");
    compare.append(this.against, this.pin, this.undo, this.redo);
    this.root.append(this.list, this.resetAll, compare);
    this.drawn = "";
  }

  /**
   * @param {string} text
   * @param {string} type
   * @param {string} title
   */
  button(text, type, title) {
    const button = element("button", "action", text);
    button.type = "button";
    button.title = title;
    if (text.length === 1) button.setAttribute("aria-label", title);
    button.addEventListener("click", () => this.onRequest({ type: button.dataset.request ?? type }));
    return button;
  }

  /** @param {ExplorerState} state */
  draw({ changes, against, is_pinned, can_undo, can_redo }) {
    const drawn = JSON.stringify(changes);
    if (drawn !== this.drawn) {
      this.drawn = drawn;
      const chips = changes.map(({ field, label, text }) => {
        const chip = element("button", "change");
        chip.append(...changeParts(label, text).map((part, index) => element("span", CHANGE_PARTS[index], part)), element("span", "", "↺"));
        chip.type = "button";
        chip.title = `Undo this change: ${text}`;
        chip.setAttribute("aria-label", `Reset ${text}`);
        chip.addEventListener("click", () => this.onRequest({ type: "reset", field }));
        return chip;
      });
      const lead = element("span", "lead", chips.length ? "Changed:" : "Nothing is changed: the step as written.");
      replaceKeepingFocus(this.list, [lead, ...chips]);
    }
    const parts = comparison(against).map((text) => element("span", "", text));
    this.against.replaceChildren(...parts.flatMap((part, index) => (index ? [" · ", part] : [part])));
    this.resetAll.hidden = changes.length < 2;
    this.pin.textContent = is_pinned ? "Unpin" : "Pin";
    this.pin.dataset.request = is_pinned ? "unpin" : "pin";
    this.pin.title = is_pinned ? "Compare with the step as written only" : "Compare later settings with this one";
    this.undo.disabled = !can_undo;
    this.redo.disabled = !can_redo;
    updateToolbar(this.root);
  }
}

const CHANGE_PARTS = ["change-knob", "change-before", "change-value"];

/**
 * Return the parts of a change: the knob, the value before, which a narrow page may cut, and the new one.
 * @param {string} label of the knob, empty for a knob without a control
 * @param {string} text such as `Batch 16 → 8`
 */
export function changeParts(label, text) {
  const rest = label && text.startsWith(`${label} `) ? text.slice(label.length + 1) : text;
  const at = rest.lastIndexOf("→ ");
  return rest === text ? [text, "", ""] : [`${label} `, rest.slice(0, Math.max(at, 0)), rest.slice(Math.max(at, 0))];
}

/**
 * Return the changes of the peak allocated against the step as written and the pinned setting. The headline names
 * what the step needs, which is more.
 * @param {ExplorerState["against"]} against
 */
export function comparison({ written, pinned }) {
  return [written && `peak vs written ${written}`, pinned && `vs pinned ${pinned}`].filter(Boolean);
}
