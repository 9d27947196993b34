// Lines of code, as they are or as a diff.
import { element } from "./dom.js";
import { copyButton } from "./settings_table.js";

const KINDS = { "+": "added", "-": "removed", "@": "place" };

/**
 * Return the class of a line of a diff.
 * @param {string} line
 */
export function lineKind(line) {
  return KINDS[/** @type {keyof typeof KINDS} */ (line[0])] ?? "";
}

/**
 * Return lines of code and a button that copies them.
 * @param {Extract<import("./types").AddedTab, { kind: "code" }>} content
 */
export function codeElements({ text, diff }) {
  const code = element("pre", "code");
  code.tabIndex = 0;
  if (diff) code.append(...diff.split("\n").map((line) => element("span", ["line", lineKind(line)].filter(Boolean).join("-"), line)));
  else code.textContent = text;
  return [copyButton("Copy", text, diff ? undefined : code), code];
}
