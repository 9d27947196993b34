import assert from "node:assert/strict";
import { test } from "node:test";
import { bytesAxis, highestOf, toRow, toX } from "../../../memexplore/jupyter/frontend/axis.js";

// Set-up of 10 rows in one unit, 10 rows of a step, and 30 rows of steps like it.
const AXIS = { rows: [0, 10, 20, 50, 60], xs: [0, 1, 11, 11, 21], chosen: "event", choices: [], is_folded: true, can_fold: true };

test("rows have places, and places have rows", () => {
  assert.deepEqual([0, 5, 10, 15, 55, 60].map((row) => toX(AXIS, row)), [0, 0.5, 1, 6, 16, 21]);
  assert.deepEqual([0, 0.5, 1, 6, 16, 21, 99].map((x) => toRow(AXIS, x)), [0, 5, 10, 15, 55, 60, 60]);
});

test("hidden rows are at the place where the next step begins", () => {
  assert.deepEqual([20, 35, 50].map((row) => toX(AXIS, row)), [11, 11, 11]);
  assert.equal(toRow(AXIS, 11), 50);
});

test("without an axis rows are places", () => {
  assert.deepEqual([toX(undefined, 7), toRow(undefined, 7)], [7, 7]);
});

test("the highest value is that of a stack, or of a line", () => {
  const area = (y) => ({ name: "", x: [], y, stackgroup: "allocated", mode: "lines" });
  assert.equal(highestOf([area([1, 5]), area([2, 1])]), 6);
  assert.equal(highestOf([area([1, 5]), { name: "reserved", x: [], y: [9, 1], mode: "lines" }]), 9);
  assert.equal(highestOf([{ name: "peak", x: [0], y: [99], mode: "markers" }]), 0);
});

test("ticks of bytes are at a distance of a power of two", () => {
  const { range, tickvals, ticktext } = bytesAxis(3 * 2 ** 30);
  assert.deepEqual(ticktext, ["0", "512 MiB", "1 GiB", "1.5 GiB", "2 GiB", "2.5 GiB", "3 GiB"]);
  assert.equal(tickvals.length, 7);
  assert.ok(range[0] === 0 && range[1] > 3 * 2 ** 30);
});
