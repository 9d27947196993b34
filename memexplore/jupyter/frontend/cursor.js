// The cursor of the timeline: its line, and the keys that move it.

import { toX } from "./axis.js";

/** @typedef {import("./types").Axis} Axis */
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
  // Of the row of the peak: its place, which the kernel computed, may differ in the last digit.
  if (!peak?.x.length || x === toX(figure.axis, peakRow(figure) ?? peak.x[0])) return shapes;
  const line = { color: colour, width: 1, dash: "dot" };
  return [...shapes, { type: "line", name: "cursor", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line }];
}

/**
 * Return the row of the peak, undefined on an empty tape.
 * @param {Figure} figure
 * @returns {number | undefined}
 */
export function peakRow({ data }) {
  return data.find(({ name }) => name === "peak")?.customdata?.[0];
}

const NEAR = 10; // pixels

/**
 * Return whether a place on the graph is beside the marker of the peak.
 * @param {Figure} figure
 * @param {{ xaxis: import("./types").PlotlyAxis, yaxis: import("./types").PlotlyAxis }} axes
 * @param {{ x: number, y: number }} place pixels from the corner of the graph
 */
export function isBesidePeak({ data }, { xaxis, yaxis }, { x, y }) {
  const peak = data.find(({ name }) => name === "peak");
  if (!peak?.x.length) return false;
  const share = (/** @type {number} */ value, /** @type {ArrayLike<number>} */ range) => (value - range[0]) / (range[1] - range[0]);
  const peakX = xaxis._offset + share(peak.x[0], xaxis.range) * xaxis._length;
  const peakY = yaxis._offset + (1 - share(peak.y[0], yaxis.range)) * yaxis._length;
  return Math.hypot(x - peakX, y - peakY) <= NEAR;
}

const PAGES = 20; // of the rows shown, which Page Up and Page Down go through

/**
 * Return the row to which a key moves the cursor, the peak by P, undefined for other keys and on an empty tape. Folded steps, whose rows
 * share one place, are passed at once.
 * @param {string} key
 * @param {number} row
 * @param {[number, number]} shown the first and the last row shown
 * @param {Figure["axis"]} [axis]
 * @param {number} [peak]
 */
export function rowAfterKey(key, row, shown, axis, peak) {
  if (row < 0) return undefined;
  if (key === "p" || key === "P") return peak;
  const [first, last] = shown;
  const page = Math.max(1, Math.round((last - first) / PAGES));
  const far = { Home: first, End: last, PageUp: Math.max(row - page, first), PageDown: Math.min(row + page, last) }[key];
  if (far !== undefined) return far;
  const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
  if (step === undefined) return undefined;
  if (!axis?.is_folded) return row + step;
  return step > 0 ? lastAtPlace(axis, row) + 1 : firstAtPlace(axis, Math.max(firstAtPlace(axis, row) - 1, 0));
}

/**
 * Return the first of the rows that share the place of a row.
 * @param {Axis} axis
 * @param {number} row
 */
function firstAtPlace(axis, row) {
  const knot = Array.prototype.indexOf.call(axis.xs, toX(axis, row));
  return knot < 0 ? row : Math.min(axis.rows[knot], row);
}

/**
 * @param {Axis} axis
 * @param {number} row
 */
function lastAtPlace(axis, row) {
  const knot = Array.prototype.lastIndexOf.call(axis.xs, toX(axis, row));
  return knot < 0 ? row : Math.max(axis.rows[knot], row);
}
