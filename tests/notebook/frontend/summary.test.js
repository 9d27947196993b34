import assert from "node:assert/strict";
import { test } from "node:test";

import { titleOfNotes } from "../../../memexplore/notebook/frontend/summary.js";

test("notes are called assumptions if all of them are", () => {
  assert.equal(titleOfNotes(["assumed: 3 tokens"]), "1 assumption");
  assert.equal(titleOfNotes(["assumed: 3 tokens", "assumed: 2 graphs"]), "2 assumptions");
  assert.equal(titleOfNotes(["assumed: 3 tokens", "Files: best.pt was not kept."]), "2 notes");
  assert.equal(titleOfNotes(["Files: best.pt was not kept."]), "1 note");
});
