import assert from "node:assert/strict";
import { test } from "node:test";

import { tabAfterKey } from "../../../memexplore/jupyter/frontend/tabs.js";

const NAMES = ["Layers", "Tensors", "Blocks"];

test("arrows go round, Home and End to the ends", () => {
  assert.equal(tabAfterKey("ArrowRight", NAMES, "Layers"), "Tensors");
  assert.equal(tabAfterKey("ArrowRight", NAMES, "Blocks"), "Layers");
  assert.equal(tabAfterKey("ArrowLeft", NAMES, "Layers"), "Blocks");
  assert.equal(tabAfterKey("Home", NAMES, "Blocks"), "Layers");
  assert.equal(tabAfterKey("End", NAMES, "Layers"), "Blocks");
});

test("other keys are left alone", () => {
  for (const key of ["ArrowDown", "Enter", "a"]) assert.equal(tabAfterKey(key, NAMES, "Layers"), undefined);
});
