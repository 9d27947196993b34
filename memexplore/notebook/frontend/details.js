// The built-in tabs below the timeline: layers, tensors, lines, blocks and growth.
import { Blocks } from "./blocks.js";
import { element } from "./dom.js";
import { Layers } from "./layers.js";
import { fillMemoryTable } from "./tables.js";

const AT_CURSOR = ["Tensors", "Lines", "Blocks"]; // tabs about the row of the cursor

/**
 * @typedef {{
 *   onSelectLayer: (box: string) => void,
 *   onSelectBlock: (row: number) => void,
 *   enqueue: (task: () => unknown) => void,
 * }} Handlers
 */

export class Details {
  /**
   * @param {import("./chart.js").Context} context
   * @param {import("./tabs.js").Tabs} tabs
   * @param {Handlers} handlers
   */
  constructor(context, tabs, { onSelectLayer, onSelectBlock, enqueue }) {
    this.tabs = tabs;
    this.position = element("p", "position");
    this.layers = new Layers(context, tabs.add("Layers"), { onSelect: onSelectLayer, enqueue });
    this.tensors = element("table", "tensors");
    tabs.add("Tensors").append(this.tensors);
    this.lines = element("table", "lines");
    tabs.add("Lines").append(this.lines);
    this.blocks = new Blocks(context, tabs.add("Blocks"), onSelectBlock);
    this.growthText = element("p", "caption");
    this.growth = element("table", "growth");
    tabs.add("Growth").append(this.growthText, this.growth);
  }

  /** Show the position of the cursor above the tabs about it. */
  update() {
    this.position.hidden = !AT_CURSOR.some((name) => this.tabs.isOpen(name));
  }

  /** @param {import("./types").CursorContent} content */
  drawCursor({ text, tensors, lines }) {
    this.position.textContent = text;
    const tensorTitles = ["Size", "Category", "Layer", "Op", "Line"];
    fillMemoryTable(this.tensors, tensorTitles, tensors, ({ size, layer, op }) => [size, layer, op]);
    fillMemoryTable(this.lines, ["Size", "Category", "Blocks", "Line"], lines, ({ size, blocks }) => [size, blocks]);
  }

  /** @param {import("./types").DetailsContent["growth"]} growth */
  drawGrowth({ text, steps, rows }) {
    this.growthText.textContent = text;
    this.tabs.setVisible("Growth", rows.length > 0);
    const titles = ["Grew", "Category", "Layer", ...steps, "Line"];
    fillMemoryTable(this.growth, titles, rows, ({ grew, layer, sizes }) => [grew, layer, ...sizes]);
  }
}
