// The timeline: plotly has axes, texts and the mouse; canvas and legend show the traces.
import { drawAreas } from "./areas.js";
import { bytesAxis, highestOf, toRow } from "./axis.js";
import { Chart } from "./chart.js";
import { reportClicks } from "./clicks.js";
import { isBesidePeak, peakRow, rowAfterKey, shapesWithCursor } from "./cursor.js";
import { element, graphElement } from "./dom.js";
import { hoverChange } from "./hover.js";
import { Legend } from "./legend.js";
import { savedLayout } from "./saved_picture.js";
import { coloursOf, themedLayout } from "./theme.js";
import { TimelineControls } from "./timeline_controls.js";
import { windowOf } from "./zoom.js";

/** @typedef {import("./types").Figure} Figure */
/**
 * @typedef {import("./timeline_controls.js").Handlers & {
 *   onZoom: (window: import("./types").Window) => void,
 *   onCursor: (row: number) => void,
 * }} Handlers
 */

const BELOW_AXIS = 22; // pixels from the axis to the controls, for the labels of its ticks
const CAPACITY_TEXT = { light: "#ad4c00", dark: "#ff8a3d" }; // the lines are #D55E00, too pale for text on white
const LABEL = "Timeline of allocated memory; arrows, Page Up, Page Down, Home and End move the cursor, P to the peak";

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
    this.caption = ""; // of the saved picture
    this.rowBefore = -1; // of the cursor when the mouse was pressed
    /** @type {Figure} */
    this.figure = { data: [], layout: {} };
    this.canvas = element("canvas", "areas");
    this.legend = new Legend(() => this.fitHeight());
    this.controls = new TimelineControls({ ...handlers, onPeak: () => this.toPeak() });
    this.stage = element("div", "stage");
    this.stage.append(this.canvas, this.graph, this.controls.root, this.legend.root);
    this.graph.style.height = `${height}px`;
    this.graph.tabIndex = 0;
    this.graph.setAttribute("role", "group");
    this.graph.setAttribute("aria-label", LABEL);
    this.graph.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const row = rowAfterKey(event.key, this.row, this.shownRows(), this.figure.axis, peakRow(this.figure));
      if (row === undefined) return;
      event.preventDefault();
      event.stopPropagation();
      handlers.onCursor(row);
    });
  }

  toPeak() {
    const row = peakRow(this.figure);
    if (row !== undefined) this.handlers.onCursor(row);
  }

  /**
   * The first and the last row shown.
   * @returns {[number, number]}
   */
  shownRows() {
    const [start, end] = this.graph._fullLayout.xaxis.range;
    const { axis } = this.figure;
    return [Math.max(Math.ceil(toRow(axis, start)), 0), Math.floor(toRow(axis, end))];
  }

  size() {
    return { ...super.size(), height: this.availableHeight() };
  }

  /** The size that it has: `resize` follows the page, and to measure takes the time of a layout of the whole page. */
  drawnSize() {
    const { width, height } = this.graph.layout ?? {};
    return width && height ? { width, height } : this.size();
  }

  /** @param {Figure} figure */
  async drawFigure(figure) {
    const isFirst = !this.isDrawn;
    this.figure = figure;
    if (figure.axis) this.controls.drawAxis(figure.axis);
    const own = { ...figure.layout, ...this.verticalAxis(), annotations: this.annotations() };
    own.xaxis = { ...own.xaxis, title: { text: "" } }; // the controls name it
    const layout = { ...own, uirevision: "kept", shapes: this.shapes(), showlegend: false };
    const { Icons } = this.plotly;
    const all = { name: "all", title: "Show all", icon: Icons.home, click: () => this.handlers.onZoom(null) };
    const modeBarButtons = [[this.saveButton], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", all]];
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
    const { xaxis, yaxis } = this.graph._fullLayout;
    const place = { left: `${xaxis._offset}px`, width: `${xaxis._length}px` };
    Object.assign(this.legend.root.style, place);
    Object.assign(this.controls.root.style, { ...place, top: `${yaxis._offset + yaxis._length + BELOW_AXIS}px` });
  }

  listen() {
    const { onZoom, onCursor } = this.handlers;
    this.graph.on("plotly_relayout", (change) => {
      const window = windowOf(change);
      const { axis } = this.figure;
      if (window) onZoom([toRow(axis, window[0]), toRow(axis, window[1])]);
    });
    this.graph.on("plotly_relayout", () => this.drawTraces());
    this.graph.on("plotly_relayouting", () => this.drawTraces());
    reportClicks(this.graph, {
      onPress: () => void (this.rowBefore = this.row),
      onClick: ([{ customdata }], event) => {
        const { left, top } = this.graph.getBoundingClientRect();
        const place = { x: (event?.clientX ?? Infinity) - left, y: (event?.clientY ?? Infinity) - top };
        if (isBesidePeak(this.figure, this.graph._fullLayout, place)) this.toPeak();
        else onCursor(Number([customdata].flat()[0]));
      },
      // Its first click has moved the cursor, which returns to where it was.
      onDoubleClick: () => {
        onZoom(null);
        if (this.rowBefore >= 0) onCursor(this.rowBefore);
      },
    });
  }

  /** The vertical axis follows what the legend shows; the kernel chose it for all traces. */
  verticalAxis() {
    const visible = this.legend.visible(this.figure.data);
    if (visible.length === this.figure.data.length) return { yaxis: this.figure.layout.yaxis };
    return { yaxis: { .../** @type {object} */ (this.figure.layout.yaxis), ...bytesAxis(highestOf(visible)) } };
  }

  async fitHeight() {
    const { range, tickvals, ticktext } = /** @type {any} */ (this.verticalAxis().yaxis);
    await this.plotly.relayout(this.graph, { "yaxis.range": range, "yaxis.tickvals": tickvals, "yaxis.ticktext": ticktext });
    this.drawTraces();
  }

  /** Labels in colours that are legible in the theme; those inside the axes stand before lines. */
  annotations() {
    const { root } = this.context;
    const { paper } = coloursOf(this.context);
    const capacity = CAPACITY_TEXT[root.dataset.memexploreTheme === "dark" ? "dark" : "light"];
    return (this.figure.layout.annotations ?? []).map((note) => {
      const font = /** @type {Record<string, unknown>} */ (note.font ?? {});
      if (note.name === "peak") return { ...note, bgcolor: paper };
      return font.color === undefined ? note : { ...note, bgcolor: paper, font: { ...font, color: capacity } };
    });
  }

  /** @param {number} row */
  async moveCursor(row) {
    this.row = row;
    this.graph.dataset.row = String(row);
    this.controls.drawPeak(row === peakRow(this.figure));
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
    const annotations = this.annotations();
    await this.plotly.relayout(this.graph, { font, modebar, annotations, shapes: this.shapes() });
  }

  shapes() {
    return shapesWithCursor(this.figure, this.row, this.colour);
  }

  /** Save the visible traces as plotly draws all of them. */
  download() {
    const themed = themedLayout({ ...this.figure.layout, ...this.size() }, this.colour);
    const layout = savedLayout(themed, this.caption, this.legend.root.offsetHeight);
    layout.xaxis = { ...layout.xaxis, range: this.graph.layout.xaxis?.range };
    layout.paper_bgcolor = coloursOf(this.context).paper;
    const figure = { data: this.legend.visible(this.figure.data), layout };
    return this.plotly.downloadImage(figure, { format: "png", filename: "memexplore" });
  }
}
