// Tables of settings: a button per row, sizes as bars against the capacity, and marks.
import { element } from "./dom.js";

/** @typedef {import("./types").SettingsTable} SettingsTable */
/** @typedef {import("./types").SettingsRow} SettingsRow */
/** @typedef {import("./types").Cell} Cell */

const COPIED_MS = 1500;

/**
 * Return a table whose first cells are buttons, for the keyboard.
 * @param {SettingsTable} content
 * @param {(row: number, label: string) => void} onClick with the number and the text of a row
 */
export function settingsTable({ titles, align = [], rows }, onClick) {
  const isRight = (/** @type {number} */ column) => align[column] === "right";
  const head = element("thead");
  const line = element("tr");
  titles.forEach((title, column) => {
    const cell = element("th", isRight(column) ? "number" : "", title);
    cell.scope = "col";
    line.append(cell);
  });
  head.append(line);
  const body = element("tbody");
  body.append(...rows.map((row, number) => settingsRow(row, isRight, (label) => onClick(number, label))));
  const table = element("table", "settings");
  table.append(head, body);
  return table;
}

/**
 * @param {SettingsRow} row
 * @param {(column: number) => boolean} isRight
 * @param {(label: string) => void} onClick
 */
function settingsRow({ cells: [setting, ...others], current, hint, mark, copy }, isRight, onClick) {
  const line = element("tr", "row");
  if (current) line.setAttribute("aria-current", "true");
  if (hint) line.title = hint;
  const button = element("button", "pick");
  button.append(...breakable(typeof setting === "string" ? setting : setting.text));
  button.type = "button";
  button.addEventListener("click", () => onClick(button.textContent ?? ""));
  const first = element("td", "setting");
  first.append(button);
  if (current) first.append(element("span", "badge", "in force"));
  if (mark) first.append(element("span", "badge", mark));
  if (copy) first.append(copyButton("copy", copy));
  line.append(first, ...others.map((cell, column) => valueCell(cell, isRight(column + 1))));
  return line;
}

/**
 * Return a text whose long names, such as `expandable_segments:True`, may go on in the next line, in a narrow table.
 * @param {string} text
 */
function breakable(text) {
  return text.split(/(?<=[_:.])/).flatMap((part, number) => (number ? [element("wbr"), part] : [part]));
}

/**
 * @param {Cell} cell
 * @param {boolean} isRight
 */
function valueCell(cell, isRight) {
  const created = element("td", isRight ? "number" : "");
  if (typeof cell === "string") {
    created.textContent = cell;
    return created;
  }
  const { text, share, tone } = cell;
  if (tone) created.dataset.tone = tone;
  created.append(element("span", "cell-text", text));
  if (tone) created.append(element("span", "tone", tone));
  if (share !== undefined) {
    const bar = element("span", "share");
    const filled = element("span", "filled");
    filled.style.width = `${Math.min(100 * share, 100).toFixed(1)}%`;
    bar.append(filled);
    created.append(bar);
  }
  return created;
}

/**
 * Return a button that copies a text.
 * @param {string} label
 * @param {string} text
 * @param {HTMLElement} [shown] element with this text, selected for the keyboard where the page has no clipboard
 */
export function copyButton(label, text, shown) {
  const button = element("button", "copy", label);
  button.type = "button";
  button.title = "Copy the lines of PyTorch";
  button.addEventListener("click", async () => {
    // Without https, or in a frame, there may be no clipboard.
    if (shown) getSelection()?.selectAllChildren(shown);
    await navigator.clipboard?.writeText(text).then(
      () => (button.textContent = "Copied"),
      () => {},
    );
    setTimeout(() => (button.textContent = label), COPIED_MS);
  });
  return button;
}
