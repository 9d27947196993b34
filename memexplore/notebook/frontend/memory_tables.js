// Tables of tensors and lines at the cursor: sorted by a click on a heading, and searched.
import { element } from "./dom.js";
import { fillMemoryTable } from "./tables.js";

/** @typedef {import("./types").MemoryRow & { bytes: number }} SizedRow */

/**
 * Return the rows that contain a search, sorted by a column: sizes largest first, texts alphabetically.
 * @template {SizedRow} Row
 * @param {Row[]} rows
 * @param {(row: Row) => string[]} cells the texts of a row, the size first
 * @param {string} search in lower case
 * @param {number} column
 * @param {boolean} isReversed
 */
export function arranged(rows, cells, search, column, isReversed) {
  const found = rows.filter((row) => !search || cells(row).some((cell) => cell.toLowerCase().includes(search)));
  const compared = (/** @type {Row} */ one, /** @type {Row} */ other) =>
    column === 0
      ? other.bytes - one.bytes
      : cells(one)[column].localeCompare(cells(other)[column], undefined, { numeric: true });
  found.sort((one, other) => (isReversed ? -1 : 1) * compared(one, other));
  return found;
}

/** @template {SizedRow} Row */
export class MemoryTable {
  /**
   * @param {HTMLElement} panel
   * @param {string} name
   * @param {string[]} titles size, category, others, line
   * @param {(row: Row) => string[]} cells the cells of size, then those after the category
   */
  constructor(panel, name, titles, cells) {
    this.titles = titles;
    this.cells = cells;
    /** @type {Row[]} */
    this.rows = [];
    this.search = "";
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
    const texts = (/** @type {Row} */ row) => {
      const [size, ...others] = this.cells(row);
      return [size, row.category, ...others, `${row.location} ${row.code}`];
    };
    const rows = arranged(this.rows, texts, this.search, this.column, this.isReversed);
    this.empty.hidden = rows.length > 0 || !this.search;
    const focused = this.headings().indexOf(/** @type {HTMLElement} */ (document.activeElement));
    const cells = (/** @type {Row} */ row) => /** @type {[string, ...string[]]} */ (this.cells(row));
    fillMemoryTable(this.table, this.titles, rows, cells, this.marked);
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
