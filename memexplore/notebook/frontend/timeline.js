// The timeline: plotly has axes, texts and the mouse; canvas and legend show the traces.
import { drawAreas } from "./areas.js";
import { Chart } from "./chart.js";
import { rowAfterKey, shapesWithCursor } from "./cursor.js";
import { element, graphElement } from "./dom.js";
import { hoverChange } from "./hover.js";
import { Legend } from "./legend.js";
import { themedLayout } from "./theme.js";
import { windowOf } from "./zoom.js";

/** @typedef {import("./types").Figure} Figure */
/** @typedef {{ onZoom: (window: import("./types").Window) => void, onCursor: (row: number) => void }} Handlers */

const LABEL = "Timeline of allocated memory; left and right arrow move the cursor";

export class Timeline extends Chart {
  /**
   * @param {import("./chart.js").Context} context
   * @param {number} height pixels
   * @param {Handlers} handlers
   */
  constructor(context, height, handlers) {
    super(context, graphElement("timeline"), () => height);
    this.handlers = handlers;
    this.row = -1; // of the cursor
    /** @type {Figure} */
    this.figure = { data: [], layout: {} };
    this.canvas = element("canvas", "areas");
    this.legend = new Legend(() => this.drawTraces());
    this.stage = element("div", "stage");
    this.stage.append(this.canvas, this.graph, this.legend.root);
    this.graph.style.height = `${height}px`;
    this.graph.tabIndex = 0;
    this.graph.setAttribute("role", "group");
    this.graph.setAttribute("aria-label", LABEL);
    this.graph.addEventListener("keydown", (event) => {
      const row = rowAfterKey(event.key, this.row);
      if (row === undefined) return;
      event.preventDefault();
      event.stopPropagation();
      handlers.onCursor(row);
    });
  }

  size() {
    return { ...super.size(), height: this.availableHeight() };
  }

  /** @param {Figure} figure */
  async drawFigure(figure) {
    const isFirst = !this.isDrawn;
    this.figure = figure;
    const layout = { ...figure.layout, uirevision: "kept", shapes: this.shapes(), showlegend: false };
    const { Icons } = this.plotly;
    const all = { name: "all", title: "Show all", icon: Icons.home, click: () => this.handlers.onZoom(null) };
    const save = { name: "save", title: "Download plot as a PNG", icon: Icons.camera, click: () => this.download() };
    const modeBarButtons = [[save], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", all]];
    // One invisible trace gives plotly the positions of the events.
    const allocated = figure.data.find(({ name }) => name === "allocated");
    await this.draw(allocated ? [{ ...allocated, mode: "none" }] : [], layout, { modeBarButtons });
    this.legend.draw(figure.data);
    this.drawTraces();
    this.graph.figure = figure;
    if (isFirst) this.listen();
  }

  drawTraces() {
    drawAreas(this.canvas, this.graph, this.legend.visible(this.figure.data));
    const { xaxis } = this.graph._fullLayout;
    Object.assign(this.legend.root.style, { left: `${xaxis._offset}px`, width: `${xaxis._length}px` });
  }

  listen() {
    const { onZoom, onCursor } = this.handlers;
    this.graph.on("plotly_relayout", (change) => {
      const window = windowOf(change);
      if (window) onZoom(window);
    });
    this.graph.on("plotly_relayout", () => this.drawTraces());
    this.graph.on("plotly_relayouting", () => this.drawTraces());
    this.graph.on("plotly_doubleclick", () => onZoom(null));
    this.graph.on("plotly_click", ({ points }) => onCursor(points[0].x));
  }

  /** @param {number} row */
  async moveCursor(row) {
    this.row = row;
    if (this.isDrawn) await this.plotly.relayout(this.graph, { shapes: this.shapes() });
  }

  /**
   * Add the hover texts, unless a zoom has changed the window meanwhile.
   * @param {import("./types").Hover} hover
   * @param {import("./types").Window} window
   */
  async addHover(hover, window) {
    const change = hoverChange(hover, window, this.graph.data?.[0]?.x.length ?? 0);
    if (change) await this.plotly.restyle(this.graph, change, [0]);
  }

  async recolour() {
    const { font, modebar } = themedLayout({ font: this.graph.layout.font }, this.colour);
    await this.plotly.relayout(this.graph, { font, modebar, shapes: this.shapes() });
  }

  shapes() {
    return shapesWithCursor(this.figure, this.row, this.colour);
  }

  /** Save the visible traces as plotly draws all of them. */
  download() {
    const layout = themedLayout({ ...this.figure.layout, ...this.size() }, this.colour);
    layout.xaxis = { ...layout.xaxis, range: this.graph.layout.xaxis?.range };
    layout.paper_bgcolor = getComputedStyle(this.context.root).getPropertyValue("--memexplore-paper").trim();
    const figure = { data: this.legend.visible(this.figure.data), layout };
    return this.plotly.downloadImage(figure, { format: "png", filename: "memexplore" });
  }
}
