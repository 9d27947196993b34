// Tables of tensors and lines at the cursor: sorted by a click on a heading, and searched.
import { element } from "./dom.js";
import { fillMemoryTable } from "./tables.js";

/** @typedef {import("./types").MemoryRow & { bytes: number }} SizedRow */

/**
 * Return the rows that contain a search, sorted by a column: sizes largest first, texts alphabetically.
 * @template {SizedRow} Row
 * @param {Row[]} rows
 * @param {import("./tables.js").Column<Row>[]} columns the sizes first
 * @param {string} search in lower case
 * @param {number} column
 * @param {boolean} isReversed
 */
export function arranged(rows, columns, search, column, isReversed) {
  const text = (/** @type {Row} */ row, number = column) => columns[number].texts(row).join(" ");
  const found = rows.filter((row) => !search || columns.some((_, number) => text(row, number).toLowerCase().includes(search)));
  const compared = (/** @type {Row} */ one, /** @type {Row} */ other) =>
    column === 0 ? other.bytes - one.bytes : text(one).localeCompare(text(other), undefined, { numeric: true });
  found.sort((one, other) => (isReversed ? -1 : 1) * compared(one, other));
  return found;
}

/** @template {SizedRow} Row */
export class MemoryTable {
  /**
   * @param {HTMLElement} panel
   * @param {string} name
   * @param {import("./tables.js").Column<Row>[]} columns the sizes first
   */
  constructor(panel, name, columns) {
    this.columns = columns;
    /** @type {Row[]} */
    this.rows = [];
    this.search = "";
    this.found = 0; // rows that match the search
    this.marked = ""; // `file:line`
    this.column = 0;
    this.isReversed = false;
    this.table = element("table", name);
    this.empty = element("p", "caption", "Nothing matches.");
    panel.append(this.table, this.empty);
  }

  /** @param {Row[]} rows */
  setRows(rows) {
    this.rows = rows;
    this.draw();
  }

  /** @param {string} search */
  setSearch(search) {
    this.search = search.trim().toLowerCase();
    this.draw();
  }

  /** @param {string} line `file:line` */
  mark(line) {
    this.marked = line;
    this.draw();
  }

  draw() {
    const rows = arranged(this.rows, this.columns, this.search, this.column, this.isReversed);
    this.found = rows.length;
    this.empty.hidden = rows.length > 0 || !this.search;
    const focused = this.headings().indexOf(/** @type {HTMLElement} */ (document.activeElement));
    fillMemoryTable(this.table, this.columns, rows, this.marked);
    [...this.table.querySelectorAll("th")].forEach((head, column) => {
      const button = element("button", "sort", head.textContent ?? "");
      button.type = "button";
      button.addEventListener("click", () => this.sort(column));
      head.replaceChildren(button);
      if (column !== this.column) return;
      const isDescending = (column === 0) !== this.isReversed;
      head.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
    });
    this.headings()[focused]?.focus();
  }

  headings() {
    return /** @type {HTMLElement[]} */ ([...this.table.querySelectorAll("th button")]);
  }

  /** @param {number} column */
  sort(column) {
    this.isReversed = column === this.column && !this.isReversed;
    this.column = column;
    this.draw();
  }
}
