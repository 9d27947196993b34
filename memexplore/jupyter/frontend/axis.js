// The axes of the timeline: places of rows on the horizontal one, and the range of the vertical one.

/** @typedef {import("./types").Axis} Axis */
/** @typedef {import("./types").Trace} Trace */

const HEADROOM = 1.2; // top of the axis relative to the highest value, as timeline_layout.py has it
const TICKS = 6;
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/**
 * Interpolate between knots, constant beyond them; of equal knots the last one counts.
 * @param {ArrayLike<number>} from ascending
 * @param {ArrayLike<number>} to
 * @param {number} value
 */
function interpolated(from, to, value) {
  if (!from.length || value <= from[0]) return to[0] ?? value;
  let [low, high] = [0, from.length - 1];
  if (value >= from[high]) return to[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (from[middle] <= value) low = middle;
    else high = middle;
  }
  return to[low] + ((value - from[low]) / (from[high] - from[low])) * (to[high] - to[low]);
}

/**
 * Return the place of a row.
 * @param {Axis | undefined} axis
 * @param {number} row
 */
export function toX(axis, row) {
  return axis ? interpolated(axis.rows, axis.xs, row) : row;
}

/**
 * Return the row at a place, with a fraction.
 * @param {Axis | undefined} axis
 * @param {number} x
 */
export function toRow(axis, x) {
  return axis ? interpolated(axis.xs, axis.rows, x) : x;
}

/**
 * Return the highest value of some traces, those of a stack added up.
 * @param {Trace[]} traces
 */
export function highestOf(traces) {
  /** @type {Map<string, Float64Array>} */
  const sums = new Map();
  let highest = 0;
  for (const { y, stackgroup = "", mode } of traces) {
    if (!stackgroup && mode !== "lines") continue;
    const sum = (stackgroup && sums.get(stackgroup)) || new Float64Array(y.length);
    if (stackgroup) sums.set(stackgroup, sum);
    for (let row = 0; row < y.length; row += 1) {
      sum[row] += y[row];
      if (sum[row] > highest) highest = sum[row];
    }
  }
  return highest;
}

/**
 * Return a vertical axis for a highest value: its range, and ticks at a distance of a power of two.
 * @param {number} highest bytes
 */
export function bytesAxis(highest) {
  const step = 2 ** Math.max(Math.ceil(Math.log2(Math.max(highest, 1) / TICKS)), 0);
  const tickvals = Array.from({ length: Math.floor(highest / step) + 1 }, (_, number) => number * step);
  return { range: [0, Math.max(highest, 1) * HEADROOM], tickvals, ticktext: tickvals.map(bytesText) };
}

/** @param {number} size */
function bytesText(size) {
  if (!size) return "0";
  const power = Math.min(Math.floor(Math.log2(size) / 10), UNITS.length - 1);
  return `${Number((size / 2 ** (10 * power)).toPrecision(3))} ${UNITS[power]}`;
}
