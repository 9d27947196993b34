// Tabs that Python adds with `View.put_tabs`: a table of settings, lines of code, or a figure.
import { Chart } from "./chart.js";
import { codeElements } from "./code.js";
import { element, graphElement, replaceKeepingFocus } from "./dom.js";
import { settingsTable } from "./settings_table.js";
import { toolbar, updateToolbar } from "./toolbar.js";

/** @typedef {import("./types").AddedTab} AddedTab */
/** @typedef {Extract<AddedTab, { kind: "figure" }>} FigureTab */
/** `view` is the label of the chosen figure. */
/** @typedef {{ content: AddedTab, isStale: boolean, chart: Chart | null, bar: HTMLElement, view: string }} Entry */

const BUTTONS = ["zoom2d", "pan2d", "resetScale2d"];
const GAP = 8; // pixels

export class AddedTabs {
  /**
   * @param {import("./chart.js").Context} context
   * @param {import("./tabs.js").Tabs} tabs
   * @param {{ onClick: (tab: string, row: number, label?: string) => void, enqueue: (task: () => unknown) => void }} handlers `onClick`
   *   receives the clicked row of a table or point of a figure
   */
  constructor(context, tabs, { onClick, enqueue }) {
    this.enqueue = enqueue;
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
      const kept = this.entries.get(name) ?? { chart: null, bar: toolbar("bar", "View"), view: "" };
      this.entries.set(name, { ...kept, content, isStale: true });
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
      const table = content.rows.length ? [settingsTable(content, (row, label) => this.onClick(name, row, label))] : [];
      replaceKeepingFocus(panel, [...text, ...table]);
    }
  }

  /**
   * @param {HTMLElement} panel
   * @param {Entry} entry
   * @param {FigureTab} content
   */
  async drawFigure(panel, entry, { name, figure: first, views = [] }) {
    const { bar } = entry;
    const height = () => panel.clientHeight - bar.offsetHeight - GAP;
    const chart = (entry.chart ??= new Chart(this.context, graphElement("figure"), height));
    const isFirst = !chart.isDrawn;
    if (isFirst) panel.replaceChildren(bar, chart.graph);
    const { label: chosen, figure } = views.find(({ label }) => label === entry.view) ?? views[0] ?? { figure: first };
    this.drawViews(bar, name, views, chosen);
    await chart.draw(figure.data, figure.layout, { doubleClick: "reset", modeBarButtons: [[chart.saveButton], BUTTONS] });
    if (!isFirst) return;
    chart.graph.on("plotly_click", ({ points }) => {
      const { customdata, id } = points[0];
      const number = [customdata].flat()[0];
      // During a search the points get other numbers.
      if (Number.isInteger(number)) this.onClick(name, number, id);
    });
  }

  /**
   * @param {HTMLElement} bar
   * @param {string} name
   * @param {NonNullable<FigureTab["views"]>} views
   * @param {string | undefined} chosen
   */
  drawViews(bar, name, views, chosen) {
    const buttons = views.map(({ label }) => {
      const button = element("button", "", label);
      button.type = "button";
      button.setAttribute("aria-pressed", String(label === chosen));
      button.addEventListener("click", () => {
        const entry = this.entries.get(name);
        if (!entry) return;
        Object.assign(entry, { view: label, isStale: true });
        this.enqueue(() => this.draw(name));
      });
      return button;
    });
    bar.hidden = !buttons.length;
    replaceKeepingFocus(bar, buttons);
    updateToolbar(bar);
  }
}
