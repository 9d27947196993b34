// The layers as a tree of rows with bars, by the ARIA pattern "tree view". A click or Enter selects, arrow keys move.
import { element } from "./dom.js";
import { Folds, afterKey, bytesOf, isHit, moreText, rowAround, visibleRows } from "./layer_rows.js";

/** @typedef {import("./types").LayerTree} LayerTree */
/** @typedef {import("./types").LayerRow} LayerRow */
/** @typedef {import("./layer_rows.js").Visible} Visible */
/**
 * @typedef {{
 *   onSelect: (layer: string | null) => void,
 *   onHighest: () => void,
 * }} Handlers
 */

const AT_CURSOR = "At the cursor";
const HIGHEST = "Each layer's maximum";
const EMPTY = /** @type {LayerTree} */ ({ total: 0, categories: [], rows: [] });

export class Layers {
  /**
   * @param {HTMLElement} panel
   * @param {Handlers} handlers
   */
  constructor(panel, handlers) {
    this.handlers = handlers;
    this.held = EMPTY;
    this.highest = EMPTY;
    this.isHighest = false; // each layer's maximum is shown
    this.folds = new Folds();
    this.search = "";
    this.current = ""; // id of the row with the only tab stop
    /** @type {string | null} */
    this.selection = null;
    this.buttons = [AT_CURSOR, HIGHEST].map((text) => {
      const button = element("button", "", text);
      button.type = "button";
      button.addEventListener("click", () => this.choose(text === HIGHEST));
      return button;
    });
    this.note = element("span", "layers-note");
    const bar = element("div", "bar");
    bar.append(...this.buttons, this.note);
    this.tree = element("div", "layers");
    this.tree.setAttribute("role", "tree");
    this.tree.setAttribute("aria-label", "Layers by bytes");
    this.tree.addEventListener("keydown", (event) => this.handleKey(event));
    this.tree.addEventListener("click", (event) => this.handleClick(event));
    this.panel = panel;
    this.more = element("p", "layers-more");
    this.more.setAttribute("aria-hidden", "true"); // the tree has all rows
    this.more.addEventListener("click", () => panel.scrollBy({ top: panel.clientHeight / 2 }));
    panel.addEventListener("scroll", () => this.drawMore(), { passive: true });
    // Called after the browser has computed the layout, also when the rows or the panel get another size.
    this.sizes = new ResizeObserver(() => this.drawMore());
    for (const part of [panel, this.tree]) this.sizes.observe(part);
    panel.append(bar, this.tree, this.more);
    this.drawBar();
  }

  get content() {
    return this.isHighest ? this.highest : this.held;
  }

  /** @param {LayerTree} held */
  drawHeld(held) {
    this.held = held;
    if (!this.isHighest) this.draw();
  }

  /** @param {LayerTree} highest */
  drawHighest(highest) {
    this.highest = highest;
    if (this.isHighest) this.draw();
  }

  /** @param {string | null} layer */
  select(layer) {
    this.selection = layer;
    this.draw();
  }

  /** @param {string} search */
  setSearch(search) {
    this.search = search.trim().toLowerCase();
    this.draw();
  }

  /** @param {boolean} isHighest */
  choose(isHighest) {
    this.isHighest = isHighest;
    this.drawBar();
    if (isHighest) this.handlers.onHighest();
    this.draw();
  }

  /** @param {boolean} isGone whether the kernel, which computes the maxima, has ended */
  setGone(isGone) {
    const button = this.buttons[1];
    button.disabled = isGone && this.highest === EMPTY;
    button.title = button.disabled ? "The kernel has ended before it computed them. Run the cell again." : "";
  }

  drawBar() {
    this.buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(this.isHighest === (index === 1))));
    this.note.textContent = this.isHighest ? "at different times: they do not sum to the peak" : "";
  }

  /** @returns {Visible[]} */
  get rows() {
    const { rows, total } = this.content;
    return visibleRows(rows, this.folds, total, this.search);
  }

  /** Say how many rows are below the visible part of the panel, and how large they are. */
  drawMore() {
    const rows = this.rows;
    const end = this.panel.getBoundingClientRect().bottom - this.more.offsetHeight;
    const lines = [...this.tree.children].slice(0, rows.length);
    const first = lines.findIndex((line) => line.getBoundingClientRect().bottom > end + 1);
    const text = this.panel.clientHeight && first >= 0 ? moreText(rows.slice(first).map(({ row }) => row)) : "";
    if (this.more.textContent !== text) this.more.textContent = text;
    this.more.classList.toggle("memexplore-unseen", !text);
  }

  /** The number of visible rows that match the search. */
  get found() {
    return this.rows.filter(({ row }) => isHit(row, this.search)).length;
  }

  draw() {
    const rows = this.rows;
    if (!rows.some(({ id }) => id === this.current)) this.current = rows[0]?.id ?? "";
    const hadFocus = this.tree.contains(document.activeElement);
    const top = this.content.rows.filter((row) => row.sizes.length).map(bytesOf);
    const widest = this.isHighest ? Math.max(...top, 1) : Math.max(this.content.total, 1);
    this.tree.replaceChildren(...rows.map((visible) => this.rowElement(visible, widest)));
    this.markAround(rows.indexOf(/** @type {Visible} */ (rowAround(rows, this.selection))));
    if (!rows.length && this.search) this.tree.append(element("p", "caption", "No layer matches."));
    if (hadFocus) this.currentElement()?.focus();
    requestAnimationFrame(() => this.drawMore());
  }

  /** @param {number} index of the row that contains the selected layer, -1 if this layer is visible */
  markAround(index) {
    const line = /** @type {HTMLElement | undefined} */ (this.tree.children[index]);
    if (!line) return;
    const text = `contains the selected layer ${this.selection}`;
    line.classList.add("memexplore-around-selection");
    line.title += ` · ${text}`;
    line.setAttribute("aria-label", `${line.getAttribute("aria-label")}, ${text}`);
  }

  /**
   * @param {Visible} visible
   * @param {number} widest bytes of a bar of full width
   */
  rowElement({ id, row, level, isOpen, canOpen, position, siblings }, widest) {
    const line = element("div", "layer");
    line.dataset.id = id;
    line.tabIndex = id === this.current ? 0 : -1;
    line.style.setProperty("--memexplore-level", String(level - 1));
    line.setAttribute("role", "treeitem");
    line.setAttribute("aria-level", String(level));
    line.setAttribute("aria-posinset", String(position));
    line.setAttribute("aria-setsize", String(siblings));
    if (canOpen) line.setAttribute("aria-expanded", String(isOpen));
    line.setAttribute("aria-selected", String(this.selection === row.name && row.label !== ITSELF));
    line.setAttribute("aria-label", spoken(row, this.content));
    line.title = `${[row.name, row.kind, row.each].filter(Boolean).join(" · ")}: ${parts(row, this.content).join(", ")}`;
    const fold = element("span", "fold", canOpen ? (isOpen ? "▾" : "▸") : "");
    fold.setAttribute("aria-hidden", "true");
    const name = element("span", "layer-name");
    name.append(fold, element("span", "layer-label", row.label));
    if (row.count > 1) name.append(this.splitButton(id, row));
    if (row.kind && row.kind !== row.label) name.append(element("span", "layer-kind", row.kind));
    line.append(name, element("span", "layer-size", row.size), bar(row, this.content, widest), element("span", "layer-end", row.each));
    return line;
  }

  /**
   * @param {string} id
   * @param {LayerRow} row
   */
  splitButton(id, row) {
    if (!row.members.length) return element("span", "layer-count", `×${row.count}`);
    const isSplit = this.folds.split.has(id);
    const button = element("button", "layer-count", `×${row.count}`);
    button.type = "button";
    button.tabIndex = id === this.current ? 0 : -1;
    button.title = isSplit ? "Show them together" : "Show them one by one";
    button.setAttribute("aria-pressed", String(isSplit));
    button.setAttribute("aria-label", `${row.count} layers one by one`);
    button.addEventListener("click", (event) => {
      event.stopPropagation();
      if (!this.folds.split.delete(id)) this.folds.split.add(id);
      this.folds.open.set(id, true);
      this.current = id;
      this.draw();
    });
    return button;
  }

  currentElement() {
    return /** @type {HTMLElement | undefined} */ (
      [...this.tree.children].find((line) => /** @type {HTMLElement} */ (line).dataset.id === this.current)
    );
  }

  /** @param {KeyboardEvent} event */
  handleKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.currentElement()) return;
    const rows = this.rows;
    const index = rows.findIndex(({ id }) => id === this.current);
    if (event.key === "Enter" || event.key === " ") {
      this.toggleSelection(rows[index].row);
    } else {
      const next = afterKey(event.key, rows, index);
      if (!next) return;
      if (next.open !== undefined) this.folds.open.set(this.current, next.open);
      if (next.index !== undefined) this.current = rows[next.index].id;
      this.draw();
      this.currentElement()?.focus();
    }
    event.preventDefault();
    event.stopPropagation();
  }

  /** @param {MouseEvent} event */
  handleClick(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    const line = /** @type {HTMLElement | null} */ (target.closest(".memexplore-layer"));
    const visible = this.rows.find(({ id }) => id === line?.dataset.id);
    if (!visible) return;
    this.current = visible.id;
    if (visible.canOpen && target.closest(".memexplore-fold")) {
      this.folds.open.set(visible.id, !visible.isOpen);
      this.draw();
      this.currentElement()?.focus();
    } else {
      this.toggleSelection(visible.row);
      this.draw();
    }
  }

  /** @param {LayerRow} row */
  toggleSelection(row) {
    this.handlers.onSelect(this.selection === row.name ? null : row.name);
  }
}

const ITSELF = "(itself)";

/**
 * Return the bytes of each category of a row as text.
 * @param {LayerRow} row
 * @param {LayerTree} tree
 */
function parts(row, tree) {
  const total = Math.max(bytesOf(row), 1);
  return tree.categories
    .map(({ name }, index) => ({ name, share: Math.round((100 * row.sizes[index]) / total) }))
    .filter(({ share }) => share > 0)
    .sort((one, other) => other.share - one.share)
    .map(({ name, share }) => `${share} % ${name}`);
}

/**
 * @param {LayerRow} row
 * @param {LayerTree} tree
 */
function spoken(row, tree) {
  const count = row.count > 1 ? `, ${row.count} layers` : "";
  return `${row.label}${count}${row.kind ? `, ${row.kind}` : ""}, ${row.size}${row.each ? `, ${row.each}` : ""}, ${parts(row, tree)[0] ?? ""}`;
}

/**
 * @param {LayerRow} row
 * @param {LayerTree} tree
 * @param {number} widest
 */
function bar(row, tree, widest) {
  const root = element("span", "layer-bar");
  root.setAttribute("aria-hidden", "true");
  tree.categories.forEach(({ colour }, index) => {
    if (!row.sizes[index]) return;
    const part = element("span");
    part.style.width = `${(100 * row.sizes[index]) / widest}%`;
    part.style.background = colour;
    root.append(part);
  });
  return root;
}
