// Tables of tensors, lines and growth.
import { element } from "./dom.js";

/** @typedef {import("./types").MemoryRow} MemoryRow */

/**
 * @param {string[]} titles
 * @param {HTMLTableRowElement[]} rows
 */
function parts(titles, rows) {
  const head = element("thead");
  const line = element("tr");
  line.append(
    ...titles.map((title) => {
      const cell = element("th", "", title);
      cell.scope = "col";
      return cell;
    }),
  );
  head.append(line);
  const body = element("tbody");
  body.append(...rows);
  return [head, body];
}

/** @param {MemoryRow} row */
function categoryCell(row) {
  const cell = element("td", "kind");
  const swatch = element("span", "swatch");
  swatch.style.background = row.colour;
  cell.append(swatch, row.category);
  return cell;
}

/** @param {MemoryRow} row */
function lineCell(row) {
  const cell = element("td");
  cell.append(element("span", "location", row.location));
  if (row.code) cell.append(element("code", "", row.code));
  return cell;
}

/**
 * Fill a table: the cells of a row, among them its category, then its line of code. The rows of the line `marked`
 * (`file:line`) are marked; empty marks none.
 * @template {MemoryRow} Row
 * @param {HTMLTableElement} table
 * @param {string[]} titles
 * @param {Row[]} rows
 * @param {(row: Row) => [string, ...string[]]} cells size, then the cells after the category
 * @param {string} marked
 */
export function fillMemoryTable(table, titles, rows, cells, marked) {
  const lines = rows.map((row) => {
    const line = element("tr");
    const [size, ...others] = cells(row).map((cell) => element("td", "", cell));
    line.append(size, categoryCell(row), ...others, lineCell(row));
    if (marked && row.path === marked) markRow(line);
    return line;
  });
  table.replaceChildren(...parts(titles, lines));
}

/** @param {HTMLTableRowElement} row */
function markRow(row) {
  row.classList.add("memexplore-marked");
  row.setAttribute("aria-current", "true");
  row.tabIndex = -1; // `showMarked` moves the focus to it
}

/**
 * Scroll to the first marked row of a table, and move the focus to it.
 * @param {HTMLTableElement} table
 */
export function showMarked(table) {
  const row = /** @type {HTMLElement | null} */ (table.querySelector(".memexplore-marked"));
  row?.scrollIntoView({ block: "nearest" });
  row?.focus({ preventScroll: true });
}
