// The history of a watched run: every step, thinned, with the marked steps. A click shows a step, a drag compares two.
import { bytesAxis } from "./axis.js";
import { Chart } from "./chart.js";
import { element, graphElement } from "./dom.js";
import { filled, highestOfColumns } from "./live_data.js";

/** @typedef {import("./types").LiveState} LiveState */

const HEIGHT = 176; // as figures/history.py has it
const FAR = 2.5; // a capacity above this multiple of the highest value is not drawn
const FEW = 12; // up to so many steps each has its number, and plotly writes none twice
const CAPACITY = "#D55E00";
// Titles of the traces of figures/history.py.
const KINDS = {
  "peak rose": "rise",
  validation: "evaluation",
  "step skipped": "skipped",
  failed: "failed",
  "setting changed": "knobs",
};
const TITLE = "Every step: peak, reserved, and what remains after it. Click a step to show it, drag to compare two.";

export class History extends Chart {
  /**
   * @param {import("./chart.js").Context} context
   * @param {{ onStep: (step: number) => void, onCompare: (first: number, last: number) => void }} handlers
   */
  constructor(context, handlers) {
    super(context, graphElement("history"), () => HEIGHT);
    this.handlers = handlers;
    this.graph.style.height = `${HEIGHT}px`;
    this.graph.setAttribute("role", "group");
    this.graph.setAttribute("aria-label", TITLE);
    this.root = element("div", "every-step");
    this.legend = element("div", "history-legend");
    this.legend.setAttribute("aria-hidden", "true"); // the figure's texts name the curves
    this.root.append(element("p", "caption", TITLE), this.graph, this.legend);
    this.root.hidden = true;
    /** @type {import("./types").Figure | null} */
    this.template = null;
  }

  /**
   * @param {LiveState} state
   * @param {import("./live_data.js").LiveSteps} steps
   */
  async drawSteps(state, steps) {
    if (state.template) this.template = state.template;
    if (!this.template) return;
    const isFirst = !this.isDrawn;
    const columns = steps.drawn();
    const data = filled(this.template.data, columns, steps.marks.values(), KINDS);
    const highest = highestOfColumns(columns);
    const capacity = state.capacity !== null && state.capacity <= FAR * highest ? state.capacity : null;
    const layout = {
      ...this.template.layout,
      yaxis: { .../** @type {object} */ (this.template.layout.yaxis), ...bytesAxis(Math.max(highest, capacity ?? 0)) },
      xaxis: { ...this.template.layout.xaxis, ...stepsAxis(steps.last) },
      shapes: shapesOf(state, capacity),
      showlegend: false,
      uirevision: "kept",
    };
    await this.draw(data, layout, { modeBarButtons: [[this.saveButton]] });
    this.graph.figure = { data, layout };
    this.drawLegend(data);
    if (isFirst) this.listen();
  }

  /** @param {import("./types").Trace[]} data */
  drawLegend(data) {
    const entries = data.filter(({ showlegend, mode }) => showlegend !== false && mode !== undefined);
    const names = entries.map(({ name }) => name).join();
    if (names === this.legend.dataset.names) return;
    this.legend.dataset.names = names;
    this.legend.replaceChildren(
      ...entries.map(({ name, mode, line, marker }) => {
        const entry = element("span", "", name);
        entry.dataset.mark = mode === "markers" ? String(marker?.symbol) : line?.dash === "dot" ? "dots" : "line";
        entry.style.setProperty("--colour", String(marker?.color ?? line?.color));
        return entry;
      }),
    );
  }

  listen() {
    this.graph.on("plotly_click", ({ points }) => this.handlers.onStep(points[0].x));
    this.graph.on("plotly_selected", (selected) => {
      const range = selected?.range?.x;
      if (range) this.handlers.onCompare(Math.min(...range), Math.max(...range));
      this.plotly.relayout(this.graph, { selections: [] });
    });
  }
}

/**
 * Return the range and the distance of the numbers of the axis of steps.
 * @param {number} last
 * @returns {{ range: import("./types").Range, dtick?: number }}
 */
export function stepsAxis(last) {
  const end = Math.max(last, 2);
  return end <= FEW ? { range: [1, end], dtick: 1 } : { range: [1, end] };
}

/**
 * Return the lines of the capacity, of the step shown and of the step drawn as an outline.
 * @param {Pick<LiveState, "shown" | "before">} state
 * @param {number | null} capacity
 */
export function shapesOf({ shown, before }, capacity) {
  const upright = (/** @type {number} */ step, /** @type {string} */ dash) => ({
    type: "line", x0: step, x1: step, y0: 0, y1: 1, yref: "paper", line: { color: "#808080", width: 1.5, dash },
  });
  const shapes = [];
  if (capacity !== null) {
    const line = { color: CAPACITY, width: 2 };
    shapes.push({ type: "line", x0: 0, x1: 1, xref: "paper", y0: capacity, y1: capacity, line });
  }
  if (before !== null) shapes.push(upright(before, "dot"));
  if (shown !== null) shapes.push(upright(shown, "solid"));
  return shapes;
}
