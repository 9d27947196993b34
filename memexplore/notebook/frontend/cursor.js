// The cursor of the timeline: its line, and the keys that move it.

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
  if (row === (peak?.x[0] ?? -1)) return shapes;
  const line = { color: colour, width: 1, dash: "dot" };
  return [...shapes, { type: "line", name: "cursor", x0: row, x1: row, y0: 0, y1: 1, yref: "paper", line }];
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
