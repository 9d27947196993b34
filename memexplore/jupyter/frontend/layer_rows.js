// Rows of the tree of layers: which of them are visible, where a key moves, and what a search leaves.

/** @typedef {import("./types").LayerRow} LayerRow */

/**
 * A visible row. `id` is unique among the rows and the same for the next tape.
 * @typedef {{ id: string, row: LayerRow, level: number, isOpen: boolean, canOpen: boolean, position: number, siblings: number }} Visible
 */

/** Rows that are open, and rows of several layers that show them one by one; by id. */
export class Folds {
  constructor() {
    /** @type {Map<string, boolean>} */
    this.open = new Map();
    /** @type {Set<string>} */
    this.split = new Set();
  }

  /**
   * Return whether a row is open: as chosen, at first if it is the root or holds much of the total.
   * @param {string} id
   * @param {LayerRow} row
   * @param {number} level
   * @param {number} total
   */
  isOpen(id, row, level, total) {
    const chosen = this.open.get(id);
    if (chosen !== undefined) return chosen;
    const isOpen = level === 1 || (level <= OPEN_LEVELS && bytesOf(row) >= OPEN_SHARE * total);
    this.open.set(id, isOpen);
    return isOpen;
  }
}

const OPEN_LEVELS = 3;
const OPEN_SHARE = 0.4;

/** @param {LayerRow} row */
export function bytesOf(row) {
  return row.sizes.reduce((sum, size) => sum + size, 0);
}

/**
 * Return whether a row itself matches a search.
 * @param {LayerRow} row
 * @param {string} search in lower case
 */
export function isHit(row, search) {
  return [row.name, row.label, row.kind].some((text) => text.toLowerCase().includes(search));
}

/**
 * Return what the rows below the visible part are, empty for none.
 * @param {LayerRow[]} rows
 */
export function moreText(rows) {
  if (!rows.length) return "";
  const largest = rows.reduce((one, other) => (bytesOf(other) > bytesOf(one) ? other : one));
  return `▾ ${rows.length} more row${rows.length === 1 ? "" : "s"} below: ${rows.length === 1 ? "" : "up to "}${largest.size}`;
}

/**
 * Return whether a row or one below it matches a search.
 * @param {LayerRow} row
 * @param {string} search in lower case
 * @returns {boolean}
 */
export function matches(row, search) {
  return isHit(row, search) || [...row.children, ...row.members].some((inner) => matches(inner, search));
}

/**
 * Return the visible rows in order. A search opens what contains a match and hides the rest.
 * @param {LayerRow[]} rows
 * @param {Folds} folds
 * @param {number} total
 * @param {string} search in lower case
 * @returns {Visible[]}
 */
export function visibleRows(rows, folds, total, search = "") {
  /** @type {Visible[]} */
  const found = [];
  /** @type {(rows: LayerRow[], level: number, path: string) => void} */
  const visit = (siblings, level, path) => {
    const kept = search ? siblings.filter((row) => matches(row, search)) : siblings;
    kept.forEach((row, index) => {
      const id = `${path}/${row.label} ${row.name}`;
      const isSplit = folds.split.has(id);
      const inner = isSplit ? row.members : row.children;
      const isForced = search !== "" && inner.some((each) => matches(each, search));
      const isOpen = inner.length > 0 && (isForced || folds.isOpen(id, row, level, total));
      found.push({ id, row, level, isOpen, canOpen: inner.length > 0, position: index + 1, siblings: kept.length });
      if (isOpen) visit(inner, level + 1, id + (isSplit ? "|" : ""));
    });
  };
  visit(rows, 1, "");
  return found;
}

/**
 * Return the innermost visible row that contains a layer which is not visible itself, undefined if there is none.
 * @param {Visible[]} rows
 * @param {string | null} layer
 */
export function rowAround(rows, layer) {
  if (layer === null || rows.some(({ row }) => row.name === layer)) return undefined;
  /** @type {(row: LayerRow) => boolean} */
  const contains = ({ children, members }) => [...children, ...members].some((inner) => inner.name === layer || contains(inner));
  return rows.filter(({ row }) => contains(row)).sort((one, other) => other.level - one.level)[0];
}

/**
 * Return what a key does in a tree: the row it moves to, or whether it opens or closes the row.
 * https://www.w3.org/WAI/ARIA/apg/patterns/treeview/
 * @param {string} key
 * @param {Visible[]} rows
 * @param {number} current index of the row with the focus
 * @returns {{ index?: number, open?: boolean } | undefined}
 */
export function afterKey(key, rows, current) {
  const row = rows[current];
  if (!row) return undefined;
  const clipped = (/** @type {number} */ index) => ({ index: Math.min(Math.max(index, 0), rows.length - 1) });
  if (key === "ArrowDown") return clipped(current + 1);
  if (key === "ArrowUp") return clipped(current - 1);
  if (key === "Home") return clipped(0);
  if (key === "End") return clipped(rows.length - 1);
  if (key === "ArrowRight") return row.canOpen && !row.isOpen ? { open: true } : row.isOpen ? clipped(current + 1) : {};
  if (key === "ArrowLeft") {
    if (row.isOpen) return { open: false };
    let above = current - 1;
    while (above >= 0 && rows[above].level >= row.level) above -= 1;
    return above < 0 ? {} : clipped(above);
  }
  return undefined;
}
