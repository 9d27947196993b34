// The chart of layers, with a bar of buttons that choose its values.
import { Chart } from "./chart.js";
import { element, graphElement, replaceKeepingFocus } from "./dom.js";

const TITLE_HEIGHT = 24; // pixels
const GAP = 10; // pixels between buttons and chart

export class Layers extends Chart {
  /**
   * @param {import("./chart.js").Context} context
   * @param {HTMLElement} panel
   * @param {{ onSelect: (box: string) => void, enqueue: (task: () => unknown) => void }} handlers
   */
  constructor(context, panel, { onSelect, enqueue }) {
    const bar = element("div", "bar");
    super(context, graphElement("layers"), () => panel.clientHeight - bar.offsetHeight - GAP);
    this.bar = bar;
    this.onSelect = onSelect;
    this.enqueue = enqueue;
    this.choice = ""; // label of the button that was pressed
    panel.append(bar, this.graph);
  }

  /** @param {import("./types").Figure} figure */
  async drawFigure(figure) {
    const isFirst = !this.isDrawn;
    // plotly would draw its own buttons in colours that are illegible on dark themes, and unreachable by keyboard.
    const { updatemenus = [], ...layout } = figure.layout;
    const choices = updatemenus[0]?.buttons ?? [];
    const chosen = choices.find(({ label }) => label === this.choice) ?? choices[0];
    this.drawButtons(choices, chosen?.label);
    // Stay at the layer that fills the chart, if the new tape has it.
    const trace = { ...figure.data[0] };
    const level = this.graph.data?.[0]?.level;
    if (level !== undefined && trace.ids?.includes(level)) trace.level = level;
    const margin = { ...layout.margin, l: 0, r: 0, t: TITLE_HEIGHT };
    await this.draw([trace], { ...layout, margin }, { modeBarButtons: [["toImage"]] });
    if (chosen && chosen !== choices[0]) await this.plotly.restyle(this.graph, ...chosen.args);
    if (isFirst) this.graph.on("plotly_icicleclick", ({ points }) => this.onSelect(points[0].id));
  }

  /**
   * @param {import("./types").UpdateMenu["buttons"]} choices
   * @param {string | undefined} chosen
   */
  drawButtons(choices, chosen) {
    const buttons = choices.map(({ label, args }) => {
      const button = element("button", "", label);
      button.setAttribute("aria-pressed", String(label === chosen));
      button.addEventListener("click", () => {
        this.choice = label;
        for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
        this.enqueue(() => this.plotly.restyle(this.graph, ...args));
      });
      return button;
    });
    replaceKeepingFocus(this.bar, buttons);
  }
}
