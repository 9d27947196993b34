import assert from "node:assert/strict";
import { test } from "node:test";

import { tabOfLine } from "../../../memexplore/jupyter/frontend/details.js";

test("a growing line is shown in the table of growth, another one among the lines at the cursor", () => {
  assert.equal(tabOfLine("train.py:9", [{ path: "train.py:7" }, { path: "train.py:9" }]), "Growth");
  assert.equal(tabOfLine("train.py:8", [{ path: "train.py:7" }]), "Lines");
});
