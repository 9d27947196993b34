// Zoom, cursor, hover and legend of the timeline.
import assert from "node:assert/strict";
import { test } from "node:test";

import { isBesidePeak, peakRow, rowAfterKey, shapesWithCursor } from "../../../memexplore/jupyter/frontend/cursor.js";
import { hoverChange } from "../../../memexplore/jupyter/frontend/hover.js";
import { listedTraces } from "../../../memexplore/jupyter/frontend/legend.js";
import { savedLayout } from "../../../memexplore/jupyter/frontend/saved_picture.js";
import { isSameWindow, windowOf, Zoom } from "../../../memexplore/jupyter/frontend/zoom.js";

test("plotly reports a zoom in two ways, and other changes are not a zoom", () => {
  assert.deepEqual(windowOf({ "xaxis.range[0]": 3, "xaxis.range[1]": 9 }), [3, 9]);
  assert.deepEqual(windowOf({ "xaxis.range": [3, 9] }), [3, 9]);
  assert.equal(windowOf({ width: 900 }), undefined);
});

test("windows are compared by their rows", () => {
  assert.ok(isSameWindow([1, 2], [1, 2]) && isSameWindow(null, null));
  assert.ok(!isSameWindow([1, 2], [1, 3]) && !isSameWindow([1, 2], null));
});

test("a zoom is requested once, when it has settled", (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  const requested = [];
  const zoom = new Zoom(() => requested.push(zoom.window), () => {});
  zoom.show([0, 5]);
  context.mock.timers.tick(149);
  zoom.show([0, 4]);
  context.mock.timers.tick(149);
  assert.deepEqual([requested, zoom.isSettling], [[], true]);
  context.mock.timers.tick(1);
  assert.deepEqual([requested, zoom.isSettling], [[[0, 4]], false]);
});

const FIGURE = { data: [{ name: "peak", x: [4], y: [750] }], layout: { shapes: [{ name: "phase" }] } };

test("the cursor has a line, except at the peak", () => {
  const names = (row) => shapesWithCursor(FIGURE, row, "black").map(({ name }) => name);
  assert.deepEqual(names(4), ["phase"]);
  assert.deepEqual(names(3), ["phase", "cursor"]);
  assert.equal(shapesWithCursor(FIGURE, 3, "black")[1].x0, 3);
});

test("the cursor at the peak has no line where its place is rounded", () => {
  const axis = { rows: [0, 10107], xs: [0, 10107] };
  const figure = { ...FIGURE, axis, data: [{ name: "peak", x: [6544], y: [750], customdata: [6544] }] };
  assert.deepEqual(shapesWithCursor(figure, 6544, "black").map(({ name }) => name), ["phase"]);
  assert.equal(shapesWithCursor(figure, 6543, "black").length, 2);
});

test("P moves the cursor to the row of the peak", () => {
  const figure = { data: [{ name: "peak", x: [4], y: [750], customdata: [9] }], layout: {} };
  assert.equal(rowAfterKey("p", 7, [0, 100], undefined, peakRow(figure)), 9);
  assert.equal(peakRow({ data: [], layout: {} }), undefined);
});

test("a click at most ten pixels from the marker of the peak is beside it", () => {
  // row 4 of 8 is at 50 + 400 / 2 = 250 pixels, 750 of 1000 bytes at 20 + 200 / 4 = 70
  const axes = { xaxis: { _offset: 50, _length: 400, range: [0, 8] }, yaxis: { _offset: 20, _length: 200, range: [0, 1000] } };
  assert.ok(isBesidePeak(FIGURE, axes, { x: 256, y: 78 })); // 6² + 8² = 10²
  assert.ok(!isBesidePeak(FIGURE, axes, { x: 257, y: 78 }));
  assert.ok(!isBesidePeak({ data: [], layout: {} }, axes, { x: 250, y: 70 }));
});

test("an empty tape has no cursor", () => {
  assert.deepEqual(shapesWithCursor({ data: [], layout: {} }, -1, "black"), []);
  assert.equal(rowAfterKey("ArrowRight", -1, [0, 0]), undefined);
});

test("arrows move the cursor by a row", () => {
  const after = (key) => rowAfterKey(key, 7, [0, 100]);
  assert.deepEqual([after("ArrowLeft"), after("ArrowRight"), after("x")], [6, 8, undefined]);
});

test("other keys move the cursor by a twentieth of the rows shown, and to their ends", () => {
  const after = (key, row) => rowAfterKey(key, row, [100, 200]);
  assert.deepEqual([after("PageUp", 150), after("PageDown", 150)], [145, 155]); // 100 rows / 20
  assert.deepEqual([after("PageUp", 102), after("PageDown", 199)], [100, 200]);
  assert.deepEqual([after("Home", 150), after("End", 150)], [100, 200]);
  assert.equal(rowAfterKey("PageDown", 3, [0, 7]), 4); // at least one row
});

test("arrows pass folded steps at once, in both directions", () => {
  // steps of 4 rows from row 2 on: those of rows 6 to 13 have the place of row 5
  const axis = { rows: [0, 5, 13, 20], xs: [0, 5, 5, 12], chosen: "event", choices: [], is_folded: true, can_fold: true };
  const right = [4, 5, 9, 13].map((row) => rowAfterKey("ArrowRight", row, [0, 20], axis));
  assert.deepEqual(right, [5, 14, 14, 14]);
  const left = [15, 14, 9, 5, 1, 0].map((row) => rowAfterKey("ArrowLeft", row, [0, 20], axis));
  assert.deepEqual(left, [14, 5, 4, 4, 0, 0]);
  assert.equal(rowAfterKey("ArrowRight", 9, [0, 20], { ...axis, is_folded: false }), 10);
});

test("hover texts of another window are dropped", () => {
  const hover = { window: [1, 3], text: ["a", "b"], hoverinfo: "text" };
  assert.deepEqual(hoverChange(hover, [1, 3], 2), { text: [["a", "b"]], hoverinfo: "text" });
  assert.equal(hoverChange(hover, null, 2), null);
  assert.equal(hoverChange(hover, [1, 3], 5), null);
});

test("the legend lists traces by rank, and not those that hide", () => {
  const traces = [
    { name: "reserved", legendrank: 1002 },
    { name: "layer", showlegend: false },
    { name: "gradient" },
    { name: "parameter", legendrank: 1 },
  ];
  assert.deepEqual(listedTraces(traces).map(({ name }) => name), ["parameter", "gradient", "reserved"]);
});

test("a saved picture has the verdict and the day above its axes, and a legend below them", () => {
  const layout = { height: 300, margin: { t: 60, b: 50, l: 70 }, showlegend: false };
  const saved = savedLayout(layout, "Needs 3 < 4", 44, new Date(2026, 10, 25));
  assert.equal(saved.title.text, "<b>Needs 3 &lt; 4</b> · 2026-11-25");
  assert.deepEqual(saved.margin, { t: 90, b: 94, l: 70 }); // 60 + 30 of the title, 50 + 44 of the legend
  assert.deepEqual([saved.height, saved.showlegend], [374, true]); // the axes keep 190 pixels
});
