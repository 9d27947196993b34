// One knob: label, native control, value, mark and reset. All texts come from the kernel.
import { element, uniqueId } from "./dom.js";

/** @typedef {import("./types").KnobRow} KnobRow */
/** @typedef {{ type: string, field: string, index?: number, label?: string, value?: string, drag?: string }} KnobRequest */
/** @typedef {HTMLInputElement | HTMLSelectElement} Control */

/**
 * Return the value of a knob as a screen reader says it: "64 samples", not "6".
 * @param {Pick<KnobRow, "options" | "unit" | "unit_of_one">} knob
 * @param {number} index
 */
export function valueText({ options, ...units }, index) {
  return withUnit(options[index] ?? "", units);
}

/**
 * @param {string} text
 * @param {Pick<KnobRow, "unit" | "unit_of_one">} units
 */
function withUnit(text, { unit, unit_of_one }) {
  return [text, text === "1" ? unit_of_one : unit].filter(Boolean).join(" ");
}

export class Knob {
  /**
   * @param {KnobRow} row
   * @param {(request: KnobRequest) => void} onRequest
   */
  constructor(row, onRequest) {
    this.row = row;
    this.onRequest = onRequest;
    this.drag = "";
    this.drawnRow = "";
    this.dismissed = ""; // a problem that was read
    this.drawnOptions = "";
    const id = uniqueId();
    this.root = element("div", "knob");
    this.root.dataset.field = row.field;
    this.root.dataset.kind = row.kind;
    this.label = element("label", "knob-label", row.label);
    this.label.htmlFor = id;
    this.value = element("output", "knob-value");
    this.value.setAttribute("aria-live", "off"); // the control itself says its value
    this.reset = element("button", "reset", "↺");
    this.reset.type = "button";
    this.reset.tabIndex = -1; // by keyboard: Delete on the control, or the row of changes
    this.reset.addEventListener("click", () => this.onRequest({ type: "reset", field: row.field }));
    this.note = element("span", "note");
    this.note.id = `${id}-note`;
    this.problem = element("span", "knob-problem");
    this.problem.setAttribute("role", "alert");
    this.problem.title = "Click or press Escape to hide";
    this.problem.addEventListener("click", () => this.dismiss());
    this.control = this.createControl(row.kind);
    this.control.id = id;
    this.control.setAttribute("aria-describedby", this.note.id);
    const head = element("span", "knob-head");
    head.append(this.label, this.value, this.reset);
    if (row.kind === "switch") this.label.prepend(this.control);
    this.root.append(head, ...(row.kind === "switch" ? [] : [this.control]), this.note, this.problem);
  }

  /**
   * @param {KnobRow["kind"]} kind
   * @returns {Control}
   */
  createControl(kind) {
    const control = kind === "choice" ? element("select", "control") : element("input", "control");
    const startDrag = () => (this.drag = uniqueId());
    control.addEventListener("pointerdown", startDrag);
    control.addEventListener("keydown", (event) => {
      const { key, repeat } = /** @type {KeyboardEvent} */ (event);
      if (!repeat) startDrag();
      if (key === "Delete" && kind !== "text" && this.row.changed) this.reset.click();
      if (key === "Escape" && this.problem.textContent) {
        this.dismiss();
        event.stopPropagation(); // JupyterLab would leave the cell
      }
    });
    if (control instanceof HTMLInputElement) {
      control.type = { slider: "range", switch: "checkbox", text: "text" }[/** @type {string} */ (kind)] ?? "text";
      control.step = "1";
      control.autocomplete = "off";
      control.spellcheck = false;
      if (kind === "text") control.placeholder = "names of layers";
    }
    // A text that was not applied stays while it is corrected.
    if (kind === "text") control.addEventListener("blur", () => (control.value = this.row.value));
    if (kind === "slider") control.addEventListener("input", () => this.request({ index: Number(control.value) }));
    else control.addEventListener("change", () => this.request(this.chosen()));
    return control;
  }

  chosen() {
    const { control } = this;
    if (control instanceof HTMLSelectElement) return { index: control.selectedIndex };
    return control.type === "checkbox" ? { index: Number(control.checked) } : { value: control.value };
  }

  /** @param {{ index?: number, value?: string }} change */
  request(change) {
    this.drag ||= uniqueId();
    this.draw({ ...this.row, ...change, problem: "" });
    const label = change.index === undefined ? {} : { label: this.row.options[change.index] };
    this.onRequest({ type: "knob", field: this.row.field, drag: this.drag, ...change, ...label });
  }

  /** @param {KnobRow} row */
  draw(row) {
    const drawn = JSON.stringify(row);
    if (drawn === this.drawnRow) return; // most knobs stay as they are while one turns
    this.drawnRow = drawn;
    this.row = row;
    const { control } = this;
    if (control instanceof HTMLSelectElement) {
      this.drawOptions(control, row);
      if (control.selectedIndex !== row.index) control.selectedIndex = row.index;
    } else if (row.kind === "slider") {
      control.min = "0";
      control.max = String(Math.max(row.options.length - 1, 0));
      if (control.value !== String(row.index)) control.value = String(row.index);
      control.setAttribute("aria-valuetext", valueText(row, row.index));
      this.value.textContent = row.options[row.index] ?? "";
      this.value.title = row.unit;
    } else if (row.kind === "switch") {
      control.checked = row.index === 1;
    } else if (document.activeElement !== control || !row.problem) {
      if (control.value !== row.value) control.value = row.value;
    }
    control.disabled = row.disabled !== "";
    const written = row.written && `As written: ${withUnit(row.written, row)}`;
    this.root.title = row.disabled || written;
    this.root.classList.toggle("memexplore-is-changed", row.changed);
    this.note.textContent = [row.changed && "Changed.", row.disabled, written].filter(Boolean).join(" ");
    this.reset.title = row.written ? `Back to ${row.written}, as written` : "Back to the step as written";
    this.reset.setAttribute("aria-label", `Reset ${row.label}`);
    this.reset.classList.toggle("memexplore-unseen", !row.changed);
    this.reset.disabled = !row.changed;
    control.toggleAttribute("aria-invalid", row.problem !== "");
    if (!row.problem) this.dismissed = "";
    const problem = row.problem === this.dismissed ? "" : row.problem;
    if (this.problem.textContent !== problem) this.showProblem(problem);
  }

  /**
   * Show why the last request was not applied, to the left where there is no room on the right.
   * @param {string} problem
   */
  showProblem(problem) {
    this.problem.textContent = problem;
    this.problem.classList.remove("memexplore-to-left");
    const page = this.root.closest(".memexplore");
    const isCut = problem && page && this.problem.getBoundingClientRect().right > page.getBoundingClientRect().right;
    this.problem.classList.toggle("memexplore-to-left", Boolean(isCut));
  }

  /** Hide the reason why the last request was not applied: it covers what is below. */
  dismiss() {
    this.dismissed = this.row.problem;
    this.problem.textContent = "";
  }

  /**
   * @param {HTMLSelectElement} select
   * @param {KnobRow} row
   */
  drawOptions(select, { options, groups, impossible }) {
    const drawn = JSON.stringify([options, groups, impossible]);
    if (drawn === this.drawnOptions) return;
    this.drawnOptions = drawn;
    const entries = options.map((text, number) => {
      const option = element("option", "", text);
      option.title = impossible[number] ?? "";
      option.disabled = option.title !== "";
      return option;
    });
    const starts = groups.map(({ first }) => first);
    const before = entries.slice(0, starts[0] ?? entries.length);
    const grouped = groups.map(({ first, title }, number) => {
      const group = element("optgroup");
      group.label = title;
      group.append(...entries.slice(first, starts[number + 1] ?? entries.length));
      return group;
    });
    select.replaceChildren(...before, ...grouped);
  }
}
