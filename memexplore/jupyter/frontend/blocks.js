// The map of blocks in their segments at the cursor.
import { Chart } from "./chart.js";
import { element, graphElement } from "./dom.js";

const GAP = 6; // pixels between text and map
const GONE = "The kernel has ended before it computed the map of blocks. Run the cell again.";
const BUTTONS = [["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]];

export class Blocks extends Chart {
  /**
   * @param {import("./chart.js").Context} context
   * @param {HTMLElement} panel
   * @param {(row: number) => void} onSelect receives the row of the tape that allocated the clicked block
   */
  constructor(context, panel, onSelect) {
    const text = element("p", "fragmentation");
    super(context, graphElement("blocks"), () => panel.clientHeight - text.offsetHeight - GAP);
    this.text = text;
    this.onSelect = onSelect;
    panel.append(text, this.graph);
  }

  /** @param {boolean} isGone whether the kernel, which computes the map, has ended */
  setGone(isGone) {
    if (!this.isDrawn) this.text.textContent = isGone ? GONE : "";
  }

  /** @param {import("./types").BlocksContent} content */
  async drawBlocks({ blocks, text }) {
    const isFirst = !this.isDrawn;
    this.text.textContent = text;
    await this.draw(blocks.data, blocks.layout, { doubleClick: "reset", modeBarButtons: [[this.saveButton], ...BUTTONS] });
    if (!isFirst) return;
    this.graph.on("plotly_click", ({ points }) => {
      const row = points.map((point) => Number(point.customdata)).find((number) => number >= 0);
      if (row !== undefined) this.onSelect(row);
    });
  }
}
