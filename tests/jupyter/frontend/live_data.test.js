import assert from "node:assert/strict";
import { test } from "node:test";

import { LiveSteps, filled, highestOfColumns, thinned } from "../../../memexplore/jupyter/frontend/live_data.js";

/** Columns of steps in which every curve is 10 times the number of the step. */
function columns(...steps) {
  const tens = steps.map((step) => 10 * step);
  const curves = ["peak", "peak_reserved", "after"].flatMap((name) => [name, `${name}_low`, `${name}_high`]);
  return { first: steps, last: steps, ...Object.fromEntries(curves.map((name) => [name, tens])) };
}

function message(fields) {
  return { marks: [], ...fields };
}

test("steps of later messages are appended", () => {
  const steps = new LiveSteps();
  steps.take(message({ base: columns(1, 2) }));
  steps.take(message({ new: columns(3), first_step: 2 }));
  assert.deepEqual(steps.columns.last, [1, 2, 3]);
  assert.deepEqual(steps.columns.peak, [10, 20, 30]);
  assert.equal(steps.last, 3);
});

test("steps that are there already are not appended again", () => {
  const steps = new LiveSteps();
  steps.take(message({ base: columns(1, 2, 3) }));
  steps.take(message({ new: columns(2, 3, 4), first_step: 1 }));
  assert.deepEqual(steps.columns.last, [1, 2, 3, 4]);
  assert.ok(steps.isComplete);
});

test("a lost message is noticed", () => {
  const steps = new LiveSteps();
  steps.take(message({ base: columns(1) }));
  steps.take(message({ new: columns(4), first_step: 3 }));
  assert.ok(!steps.isComplete);
});

test("all steps in bins replace what was there, marks included", () => {
  const steps = new LiveSteps();
  steps.take(message({ new: columns(1), first_step: 0, marks: [{ step: 1, kind: "rise", text: "old" }] }));
  steps.take(message({ base: columns(1, 2), marks: [{ step: 2, kind: "rise", text: "new" }] }));
  assert.deepEqual(steps.columns.last, [1, 2]);
  assert.deepEqual([...steps.marks.keys()], [2]);
});

test("a mark that comes again has its newest text", () => {
  const steps = new LiveSteps();
  steps.take(message({ base: columns(1), marks: [{ step: 1, kind: "rise", text: "unknown" }] }));
  steps.take(message({ new: columns(2), first_step: 1, marks: [{ step: 1, kind: "rise", text: "larger batch" }] }));
  assert.equal(steps.marks.get(1)?.text, "larger batch");
});

test("of neighbours the lowest minimum, the mean and the highest maximum are drawn", () => {
  const four = { first: [1, 2, 3, 4], last: [1, 2, 3, 4], peak_low: [5, 3, 8, 9], peak: [6, 4, 8, 10], peak_high: [7, 9, 8, NaN] };
  assert.deepEqual(thinned(four, 2), { first: [1, 3], last: [2, 4], peak_low: [3, 8], peak: [5, 9], peak_high: [9, 8] });
});

test("few columns are drawn as they are", () => {
  const some = columns(1, 2);
  assert.equal(thinned(some, 2), some);
});

test("a band goes along the maxima and back along the minima", () => {
  const { first, last } = columns(1, 2);
  const bins = { ...columns(1, 2), first, last, peak_low: [1, 2], peak_high: [3, 4] };
  const [band] = filled([{ name: "peak range", x: [], y: [] }], bins, [], {});
  assert.deepEqual([band.x, band.y], [[1, 2, 2, 1], [3, 4, 2, 1]]);
});

test("a mark stands at the peak of its step, with its text escaped", () => {
  const template = [{ name: "peak rose", x: [], y: [] }];
  const marks = [{ step: 2, kind: "rise", text: "<new>" }, { step: 1, kind: "skipped", text: "" }];
  const [trace] = filled(template, columns(1, 2), marks, { "peak rose": "rise" });
  assert.deepEqual([trace.x, trace.y, trace.text], [[2], [20], ["step 2: &lt;new&gt;"]]);
});

test("the highest value is that of any curve, at least 1", () => {
  assert.equal(highestOfColumns({ ...columns(1), peak_reserved_high: [50] }), 50);
  assert.equal(highestOfColumns({}), 1);
});
