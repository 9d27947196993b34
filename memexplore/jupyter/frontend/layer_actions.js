// The selected layer, with buttons that apply knobs to it.
import { element } from "./dom.js";
import { toolbar, updateToolbar } from "./toolbar.js";

/** @typedef {import("./types").LayerAction} LayerAction */

export class LayerActions {
  /**
   * @param {{ onClear: () => void, onAction: (field: string, layer: string) => void }} handlers
   */
  constructor({ onClear, onAction }) {
    this.onAction = onAction;
    this.root = toolbar("selected", "Selected layer");
    this.root.hidden = true;
    this.chip = element("button", "chip");
    this.chip.type = "button";
    this.chip.addEventListener("click", onClear);
    this.buttons = element("span", "layer-actions");
    this.root.append(this.chip, this.buttons);
    /** @type {string | null} */
    this.layer = null;
    this.drawn = "";
  }

  /** @param {string | null} layer */
  drawLayer(layer) {
    this.layer = layer;
    this.root.hidden = layer === null;
    this.chip.textContent = `${layer} ✕`;
    this.chip.title = `${layer} is highlighted in the timeline and the blocks. Click to show all layers.`;
    this.chip.setAttribute("aria-label", `${layer} is highlighted: show all layers`);
    this.buttons.hidden = true; // until the kernel has the actions of this layer
    updateToolbar(this.root);
  }

  /** @param {{ name: string | null, actions: LayerAction[] }} selected */
  drawActions({ name, actions }) {
    this.buttons.hidden = name === null || name !== this.layer;
    const drawn = JSON.stringify([name, actions]);
    if (drawn === this.drawn || name === null) return;
    this.drawn = drawn;
    const old = [...this.buttons.querySelectorAll("button")];
    const isSame = old.length === actions.length;
    actions.forEach((action, number) => this.drawAction(isSame ? old[number] : this.createButton(), action, name));
    if (!isSame) old.forEach((button) => button.remove());
    updateToolbar(this.root);
  }

  createButton() {
    const button = element("button", "action");
    button.type = "button";
    this.buttons.append(button);
    return button;
  }

  /**
   * @param {HTMLButtonElement} button
   * @param {LayerAction} action
   * @param {string} layer
   */
  drawAction(button, { field, label, is_on, disabled }, layer) {
    button.textContent = label;
    button.setAttribute("aria-pressed", String(is_on));
    button.disabled = disabled !== "";
    button.title = disabled || `${label}: ${is_on ? "remove" : "add"} ${layer}`;
    button.onclick = () => this.onAction(field, layer);
  }
}
