import assert from "node:assert/strict";
import { test } from "node:test";

import { addSteps, addStepsBackwards, scaleOf } from "../../../memexplore/jupyter/frontend/areas.js";

/** The points that a function adds to a path. */
function points(add, xs, ys) {
  const added = [];
  add({ lineTo: (x, y) => added.push([x, y]) }, xs, ys);
  return added;
}

test("each value holds until the next row", () => {
  assert.deepEqual(points(addSteps, [0, 1, 2], [5, 7, 9]), [
    [1, 5],
    [1, 7],
    [2, 7],
    [2, 9],
  ]);
});

test("constant rows add no corners, except at the end", () => {
  assert.deepEqual(points(addSteps, [0, 1, 2, 3], [5, 5, 5, 5]), [
    [3, 5],
    [3, 5],
  ]);
});

test("the way back has the same corners in reverse", () => {
  const [xs, ys] = [
    [0, 1, 2, 3],
    [5, 7, 7, 9],
  ];
  const forwards = points(addSteps, xs, ys);
  assert.deepEqual(points(addStepsBackwards, xs, ys), [...forwards.reverse(), [0, 5]]);
});

test("rows and bytes become pixels inside an edge of 8", () => {
  const { x, y } = scaleOf([100, 200], [0, 1000], 500, 300);
  assert.deepEqual([x(100), x(150), x(200)], [8, 258, 508]);
  assert.deepEqual([y(0), y(250), y(1000)], [308, 233, 8]);
});
