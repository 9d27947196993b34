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

/**
 * A column: the texts of a row, one below the other, of which one can have the colour of the row's category.
 * @template {MemoryRow} Row
 * @typedef {{ title: string, texts: (row: Row) => string[], coloured?: number }} Column
 */

/** The line of code of a row, and its source. */
export const LINE = { title: "Line", texts: (/** @type {MemoryRow} */ { location, code }) => [location, code] };
export const CATEGORY = { title: "Category", texts: (/** @type {MemoryRow} */ { category }) => [category], coloured: 0 };

/**
 * @template {MemoryRow} Row
 * @param {Column<Row>} column
 * @param {Row} row
 */
function tableCell({ title, texts, coloured }, row) {
  const cell = element("td", title === LINE.title ? "line" : "");
  texts(row).forEach((text, place) => {
    if (!text) return;
    const isSource = title === LINE.title && place > 0;
    const part = isSource ? element("code", "", text) : element("div", place === coloured ? "kind" : "", text);
    if (title === LINE.title && !isSource) part.replaceChildren(...pathAndNumber(text));
    part.title = text; // of the tensors only the beginning of a long text is shown
    if (place === coloured) {
      const swatch = element("span", "swatch");
      swatch.style.background = row.colour;
      part.prepend(swatch);
    }
    cell.append(part);
  });
  return cell;
}

/**
 * Return the path and the number of a line as elements, so that a narrow column can shorten the path alone.
 * @param {string} location such as `torch/optim/adam.py, line 182`
 */
function pathAndNumber(location) {
  const [, path, number] = /^(.*?)(, line \d+)?$/s.exec(location) ?? [];
  return [element("span", "path", path), element("span", "line-number", number ?? "")];
}

/**
 * Fill a table. The rows of the line `marked` (`file:line`) are marked; empty marks none.
 * @template {MemoryRow} Row
 * @param {HTMLTableElement} table
 * @param {Column<Row>[]} columns
 * @param {Row[]} rows
 * @param {string} marked
 */
export function fillMemoryTable(table, columns, rows, marked) {
  const lines = rows.map((row) => {
    const line = element("tr");
    line.append(...columns.map((column) => tableCell(column, row)));
    if (marked && row.path === marked) markRow(line);
    return line;
  });
  table.replaceChildren(...parts(columns.map(({ title }) => title), lines));
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
