// One graph that plotly draws: its size, its colours, and its buttons.
import { coloursOf, themedLayout } from "./theme.js";
import { makeToolbar, updateToolbar } from "./toolbar.js";

/** @typedef {import("./types").Trace} Trace */
/** @typedef {import("./types").Layout} Layout */

// Every button is listed by name: among plotly's default buttons is one that uploads the chart.
// Two clicks within 600 ms are a double click: plotly's own 500 ms are too short on a busy machine.
// plotly's tips would cover the page's toolbar.
const CONFIG = { displaylogo: false, responsive: false, doubleClick: false, doubleClickDelay: 600, showTips: false };
const MIN_HEIGHT = 200; // pixels

/** What all charts of a view share; `plotly` is null until plotly.js has loaded, `colours` until a chart is drawn. */
/**
 * @typedef {{
 *   root: HTMLElement,
 *   plotly: import("./types").Plotly | null,
 *   colours: { text: string, paper: string } | null,
 * }} Context
 */

export class Chart {
  /**
   * @param {Context} context
   * @param {import("./types").Graph} graph
   * @param {() => number} availableHeight pixels
   */
  constructor(context, graph, availableHeight) {
    this.context = context;
    this.graph = graph;
    this.availableHeight = availableHeight;
  }

  get plotly() {
    if (!this.context.plotly) throw new Error("plotly.js has not loaded");
    return this.context.plotly;
  }

  get isDrawn() {
    return Boolean(this.graph.data);
  }

  get colour() {
    return coloursOf(this.context).text;
  }

  /** Return width and height in pixels; undefined, which plotly replaces by its own, while the graph is hidden. */
  size() {
    const width = Math.round(this.graph.parentElement?.getBoundingClientRect().width ?? 0) || undefined;
    return { width, height: width && Math.max(this.availableHeight(), MIN_HEIGHT) };
  }

  /** The size to draw in. */
  drawnSize() {
    return this.size();
  }

  /**
   * Draw or redraw.
   * @param {Trace[]} data
   * @param {Layout} layout
   * @param {import("./types").Config} config
   */
  async draw(data, layout, config) {
    const sized = themedLayout({ ...layout, ...this.drawnSize() }, this.colour);
    const isFirst = !this.isDrawn;
    // plotly keeps the buttons of the first drawing: to compare them with those given again takes 6 ms.
    await this.plotly.react(this.graph, data, sized, isFirst ? { ...CONFIG, ...config } : undefined);
    if (isFirst) this.graph.on("plotly_afterplot", () => this.giveButtonsOneStop());
    this.giveButtonsOneStop();
  }

  /** Let the Tab key stop once at plotly's buttons, which plotly may make again. */
  giveButtonsOneStop() {
    for (const bar of /** @type {NodeListOf<HTMLElement>} */ (this.graph.querySelectorAll(".modebar"))) {
      if (!bar.hasAttribute("aria-label")) makeToolbar(bar, "Chart");
      updateToolbar(bar);
    }
  }

  /** A button that saves the graph; plotly's own announces itself over the page's toolbar. */
  get saveButton() {
    const { Icons } = this.plotly;
    return { name: "save", title: "Download plot as a PNG", icon: Icons.camera, click: () => this.download() };
  }

  /** @returns {unknown} */
  download() {
    const layout = { ...this.graph.layout, ...this.size(), paper_bgcolor: coloursOf(this.context).paper };
    const figure = { data: this.graph.data ?? [], layout };
    return this.plotly.downloadImage(figure, { format: "png", filename: "memexplore" });
  }

  /** Use the page's present text colour. */
  async recolour() {
    const { font, modebar } = themedLayout({ font: this.graph.layout.font }, this.colour);
    await this.plotly.relayout(this.graph, { font, modebar });
  }

  /** Fit the size to the space available. */
  async resize() {
    const { width, height } = this.size();
    const { layout } = this.graph;
    if (width && (width !== layout.width || height !== layout.height)) {
      await this.plotly.relayout(this.graph, { width, height });
    }
  }
}
