import assert from "node:assert/strict";
import { test } from "node:test";

import { stepsAxis } from "../../../memexplore/jupyter/frontend/history.js";

test("the axis of few steps has each number once", () => {
  assert.deepEqual(stepsAxis(0), { range: [1, 2], dtick: 1 });
  assert.deepEqual(stepsAxis(3), { range: [1, 3], dtick: 1 });
  assert.deepEqual(stepsAxis(500), { range: [1, 500] });
});
