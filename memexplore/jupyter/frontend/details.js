// The tabs at the cursor: layers, tensors, lines, blocks; and growth from step to step.
import { Blocks } from "./blocks.js";
import { element } from "./dom.js";
import { Layers } from "./layers.js";
import { MemoryTable } from "./memory_tables.js";
import { CATEGORY, LINE, fillMemoryTable, showMarked } from "./tables.js";

const AT_CURSOR = ["Layers", "Tensors", "Lines", "Blocks"]; // tabs about the row of the cursor
const SEARCHED = ["Layers", "Tensors", "Lines"];
const SEARCH = "Search layers, tensors, lines";
/** @type {import("./tables.js").Column<import("./types").TensorRow>[]} */
const TENSOR_COLUMNS = [
  { title: "Size", texts: ({ size, each }) => [size, each] },
  { title: "Tensor", texts: ({ tensor, category }) => [tensor, category], coloured: 1 },
  { title: "Layer, op", texts: ({ layer, op, stream }) => [layer, op, stream] },
  LINE,
];
/** @type {import("./tables.js").Column<import("./types").LineRow>[]} */
const LINE_COLUMNS = [
  { title: "Size", texts: ({ size, blocks }) => [size, blocks === "1" ? "1 block" : `${blocks} blocks`] },
  { ...CATEGORY, title: "Main category" }, // with most bytes of the line
  LINE,
];

/** @typedef {import("./layers.js").Handlers & { onSelectBlock: (row: number) => void }} Handlers */

/** @typedef {import("./types").DetailsContent["growth"]} Growth */

/**
 * Return the tab that shows a line: the growth from step to step if it has the line, else the lines at the cursor.
 * @param {string} line `file:line`
 * @param {Pick<import("./types").GrowthRow, "path">[]} growing
 */
export function tabOfLine(line, growing) {
  return growing.some(({ path }) => path === line) ? "Growth" : "Lines";
}

export class Details {
  /**
   * @param {import("./chart.js").Context} context
   * @param {import("./tabs.js").Tabs} tabs
   * @param {Handlers} handlers
   */
  constructor(context, tabs, handlers) {
    this.tabs = tabs;
    this.position = element("p", "position");
    this.layers = new Layers(tabs.add("Layers"), handlers);
    this.tensors = new MemoryTable(tabs.add("Tensors"), "tensors", TENSOR_COLUMNS);
    this.lines = new MemoryTable(tabs.add("Lines"), "lines", LINE_COLUMNS);
    this.blocks = new Blocks(context, tabs.add("Blocks"), handlers.onSelectBlock);
    this.growthText = element("p", "caption");
    this.growth = element("table", "growth");
    /** @type {Growth} */
    this.grown = { text: "", steps: [], rows: [] };
    this.marked = ""; // `file:line` of the growth that the verdict names
    tabs.add("Growth").append(this.growthText, this.growth);
    this.search = element("input", "search");
    this.search.type = "search";
    this.search.placeholder = "Search";
    this.search.title = SEARCH;
    this.search.setAttribute("aria-label", SEARCH);
    this.search.addEventListener("input", () => this.applySearch());
    // JupyterLab has shortcuts for single letters.
    this.search.addEventListener("keydown", (event) => event.stopPropagation());
  }

  /** Show the position of the cursor and the search above the tabs that they are about. */
  update() {
    this.position.hidden = !AT_CURSOR.some((name) => this.tabs.isOpen(name));
    this.search.hidden = !SEARCHED.some((name) => this.tabs.isOpen(name));
  }

  /** @param {import("./types").CursorContent} content */
  drawCursor({ text, layers, tensors, lines }) {
    this.position.textContent = this.position.title = text;
    this.layers.drawHeld(layers);
    this.tensors.setRows(tensors);
    this.lines.setRows(lines);
    this.drawFound();
  }

  /**
   * Say what cannot be shown while the kernel is gone, which would compute it.
   * @param {boolean} isGone
   */
  setGone(isGone) {
    this.layers.setGone(isGone);
    this.blocks.setGone(isGone);
  }

  applySearch() {
    for (const part of [this.layers, this.tensors, this.lines]) part.setSearch(this.search.value);
    this.drawFound();
  }

  /** Show beside the name of each searched tab how many of its rows match. */
  drawFound() {
    const parts = [this.layers, this.tensors, this.lines];
    SEARCHED.forEach((name, index) => this.tabs.setCount(name, this.search.value.trim() ? parts[index].found : null));
  }

  /**
   * Open the tab that shows a line, with its rows marked.
   * @param {string} line `file:line`
   */
  showLine(line) {
    const name = tabOfLine(line, this.grown.rows);
    this.marked = line;
    this.lines.mark(line);
    this.drawGrowth(this.grown);
    if (this.search.value) {
      this.search.value = ""; // it could hide the line
      this.applySearch();
    }
    this.tabs.open(name);
    showMarked(name === "Growth" ? this.growth : this.lines.table);
  }

  /** @param {Growth} growth */
  drawGrowth(growth) {
    const { text, steps, rows } = growth;
    this.grown = growth;
    this.growthText.textContent = text;
    this.growthText.hidden = !text; // an empty line would be a gap
    this.tabs.setVisible("Growth", rows.length > 0);
    /** @type {import("./tables.js").Column<import("./types").GrowthRow>[]} */
    const columns = [
      { title: "Grew", texts: ({ grew }) => [grew] },
      CATEGORY,
      { title: "Layer", texts: ({ layer }) => [layer] },
      ...steps.map((title, place) => ({ title, texts: (/** @type {import("./types").GrowthRow} */ { sizes }) => [sizes[place]] })),
      LINE,
    ];
    fillMemoryTable(this.growth, columns, rows, this.marked);
  }
}
