// The knobs: the rows that are always seen, and the others behind "More knobs".
import { element, uniqueId } from "./dom.js";
import { Knob } from "./knob.js";

/** @typedef {import("./types").KnobRow} KnobRow */
/** @typedef {import("./types").ExplorerState} ExplorerState */

const BESIDE_CAPACITY = "gpu"; // the knob that stands in the verdict

export class Knobs {
  /** @param {(request: import("./knob.js").KnobRequest) => void} onRequest */
  constructor(onRequest) {
    this.onRequest = (/** @type {import("./knob.js").KnobRequest} */ request) => {
      for (const [field, knob] of this.knobs) if (field !== request.field) knob.dismiss();
      onRequest(request);
    };
    /** @type {Map<string, Knob>} */
    this.knobs = new Map();
    this.structure = "";
    this.root = element("section", "knobs");
    this.root.setAttribute("aria-label", "Knobs");
    this.primary = element("div", "primary");
    this.toggle = element("button", "more");
    this.toggle.type = "button";
    this.more = element("div", "others");
    this.more.id = uniqueId();
    this.more.hidden = true;
    this.toggle.setAttribute("aria-controls", this.more.id);
    this.toggle.addEventListener("click", () => this.open(this.more.hidden === true));
    this.gpu = element("div", "gpu");
    this.hidden = element("p", "hidden-knobs");
    this.changedOthers = 0;
    this.root.append(this.primary, this.more);
  }

  /** @param {boolean} isOpen */
  open(isOpen) {
    this.more.hidden = !isOpen;
    this.drawToggle();
  }

  drawToggle() {
    const isOpen = !this.more.hidden;
    this.toggle.setAttribute("aria-expanded", String(isOpen));
    this.toggle.textContent = `${isOpen ? "Fewer" : "More"} knobs ${isOpen ? "▾" : "▸"}`;
    if (this.changedOthers) this.toggle.textContent += ` (${this.changedOthers}\u00a0changed)`;
  }

  /**
   * @param {ExplorerState} state
   * @param {(knob: KnobRow) => KnobRow} withRequested adds what the user has set meanwhile
   */
  draw({ knobs, hidden }, withRequested) {
    const structure = JSON.stringify(knobs.map(({ field, kind, group, primary }) => [field, kind, group, primary]));
    if (structure !== this.structure) this.build(knobs);
    this.structure = structure;
    for (const knob of knobs) this.knobs.get(knob.field)?.draw(withRequested(knob));
    this.hidden.textContent = hiddenText(hidden);
    this.changedOthers = knobs.filter(({ primary, changed, field }) => !primary && changed && field !== BESIDE_CAPACITY).length;
    this.drawToggle();
  }

  /** @param {KnobRow[]} rows */
  build(rows) {
    this.knobs = new Map(rows.map((row) => [row.field, new Knob(row, this.onRequest)]));
    const root = (/** @type {KnobRow} */ { field }) => /** @type {Knob} */ (this.knobs.get(field)).root;
    const [gpu, others] = [rows.filter(isGpu), rows.filter((row) => !isGpu(row))];
    this.gpu.replaceChildren(...gpu.map(root));
    this.primary.replaceChildren(...others.filter(({ primary }) => primary).map(root), this.toggle);
    /** @type {Map<string, HTMLFieldSetElement>} */
    const groups = new Map();
    for (const row of others.filter(({ primary }) => !primary)) {
      const group = groups.get(row.group) ?? element("fieldset", "group");
      if (!groups.has(row.group)) group.append(element("legend", "", row.group));
      groups.set(row.group, group);
      group.append(root(row));
    }
    this.more.replaceChildren(...groups.values(), this.hidden);
    this.toggle.hidden = !groups.size;
    if (!groups.size) this.root.append(this.hidden);
  }
}

/** @param {KnobRow} row */
function isGpu({ field }) {
  return field === BESIDE_CAPACITY;
}

/**
 * Return the knobs that are not shown, with their reasons.
 * @param {ExplorerState["hidden"]} hidden
 */
export function hiddenText(hidden) {
  const parts = hidden.map(({ label, reason }) => `${label} (${reason})`);
  return parts.length ? `Not shown: ${parts.join("; ")}.` : "";
}
