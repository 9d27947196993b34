// The cursor of the timeline: its line, and the keys that move it.

import { toX } from "./axis.js";

/** @typedef {import("./types").Figure} Figure */

/**
 * Return the figure's shapes and the line of the cursor. A cursor at the peak has no line: the peak has a marker.
 * @param {Figure} figure
 * @param {number} row
 * @param {string} colour
 */
export function shapesWithCursor(figure, row, colour) {
  const shapes = figure.layout.shapes ?? [];
  const peak = figure.data.find((trace) => trace.name === "peak");
  const x = toX(figure.axis, row);
  if (!peak?.x.length || x === peak.x[0]) return shapes;
  const line = { color: colour, width: 1, dash: "dot" };
  return [...shapes, { type: "line", name: "cursor", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line }];
}

/**
 * Return the row to which a key moves the cursor, undefined for other keys and on an empty tape.
 * @param {string} key
 * @param {number} row
 */
export function rowAfterKey(key, row) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
  return step === undefined || row < 0 ? undefined : row + step;
}
