// Tabs that Python adds with `View.put_tabs`: a table of settings, lines of code, or a figure.
import { Chart } from "./chart.js";
import { codeElements } from "./code.js";
import { element, graphElement, replaceKeepingFocus } from "./dom.js";
import { settingsTable } from "./settings_table.js";

/** @typedef {import("./types").AddedTab} AddedTab */
/** @typedef {{ content: AddedTab, isStale: boolean, chart: Chart | null }} Entry */

const BUTTONS = [["toImage"], ["zoom2d", "pan2d", "resetScale2d"]];
const GAP = 8; // pixels

export class AddedTabs {
  /**
   * @param {import("./chart.js").Context} context
   * @param {import("./tabs.js").Tabs} tabs
   * @param {(tab: string, row: number) => void} onClick receives the clicked row of a table or point of a figure
   */
  constructor(context, tabs, onClick) {
    this.context = context;
    this.tabs = tabs;
    this.onClick = onClick;
    /** @type {Map<string, Entry>} */
    this.entries = new Map();
  }

  get charts() {
    return [...this.entries.values()].flatMap(({ chart }) => (chart ? [chart] : []));
  }

  /**
   * Add tabs, or replace their content; only an open tab is drawn at once.
   * @param {AddedTab[]} contents
   */
  async put(contents) {
    for (const content of contents) {
      const { name } = content;
      if (!this.tabs.has(name)) this.tabs.add(name);
      this.entries.set(name, { content, isStale: true, chart: this.entries.get(name)?.chart ?? null });
      if (!this.tabs.current) this.tabs.open(name);
      if (this.tabs.isOpen(name)) await this.draw(name);
    }
  }

  /**
   * Draw the newest content of a tab.
   * @param {string} name
   */
  async draw(name) {
    const entry = this.entries.get(name);
    if (!entry?.isStale) return;
    entry.isStale = false;
    const panel = this.tabs.panel(name);
    const { content } = entry;
    if (content.kind === "figure") {
      await this.drawFigure(panel, entry, content);
    } else if (content.kind === "code") {
      replaceKeepingFocus(panel, codeElements(content));
    } else {
      const text = content.text ? [element("p", "caption", content.text)] : [];
      const table = content.rows.length ? [settingsTable(content, (row) => this.onClick(name, row))] : [];
      replaceKeepingFocus(panel, [...text, ...table]);
    }
  }

  /**
   * @param {HTMLElement} panel
   * @param {Entry} entry
   * @param {Extract<AddedTab, { kind: "figure" }>} content
   */
  async drawFigure(panel, entry, { name, figure }) {
    const chart = (entry.chart ??= new Chart(this.context, graphElement("figure"), () => panel.clientHeight - GAP));
    const isFirst = !chart.isDrawn;
    if (isFirst) panel.replaceChildren(chart.graph);
    await chart.draw(figure.data, figure.layout, { doubleClick: "reset", modeBarButtons: BUTTONS });
    if (!isFirst) return;
    chart.graph.on("plotly_click", ({ points }) => {
      const number = [points[0].customdata].flat()[0];
      if (Number.isInteger(number)) this.onClick(name, number);
    });
  }
}
