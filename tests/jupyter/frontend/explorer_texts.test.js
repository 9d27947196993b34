import assert from "node:assert/strict";
import { test } from "node:test";

import { changeParts, comparison } from "../../../memexplore/jupyter/frontend/changes.js";
import { lineKind } from "../../../memexplore/jupyter/frontend/code.js";
import { runningText } from "../../../memexplore/jupyter/frontend/explorer.js";
import { valueText } from "../../../memexplore/jupyter/frontend/knob.js";
import { hiddenText } from "../../../memexplore/jupyter/frontend/knobs.js";
import { durationText, progressText } from "../../../memexplore/jupyter/frontend/search.js";
import { buttonAfterKey } from "../../../memexplore/jupyter/frontend/toolbar.js";
import { appliedTitle, barShares, detailText, problemText } from "../../../memexplore/jupyter/frontend/verdict.js";

test("a slider says its value with the unit", () => {
  const samples = { options: ["1", "64"], unit: "samples", unit_of_one: "sample" };
  assert.equal(valueText(samples, 1), "64 samples");
  assert.equal(valueText(samples, 0), "1 sample");
  assert.equal(valueText({ options: ["off", "on"], unit: "", unit_of_one: "" }, 0), "off");
  assert.equal(valueText({ options: [], unit: "", unit_of_one: "" }, -1), "");
});

test("no line of the verdict begins with a dot, a percent sign or a version alone", () => {
  assert.equal(
    detailText("Peak 2 GiB · 80 % activations · predicted, torch 2.13"),
    "Peak 2 GiB\u00a0· 80\u00a0% activations\u00a0· predicted, torch\u00a02.13",
  );
});

test("why a request failed stays beside why a setting was not applied", () => {
  assert.equal(problemText({ request: "", setting: "" }), "");
  assert.equal(problemText({ request: "KeyError: 'x'", setting: "" }), "KeyError: 'x'");
  assert.equal(problemText({ request: "KeyError: 'x'", setting: "no room" }), "KeyError: 'x' · no room");
  assert.equal(problemText({ request: "no room", setting: "no room" }), "no room");
});

test("changes are given against the step as written and the pinned setting", () => {
  assert.deepEqual(comparison({ written: "−47 %", pinned: "−12 %" }), ["peak vs written −47 %", "vs pinned −12 %"]);
  assert.deepEqual(comparison({ written: "−47 %", pinned: "" }), ["peak vs written −47 %"]);
  assert.deepEqual(comparison({ written: "", pinned: "" }), []);
});

test("the new value of a change is a part of its own", () => {
  assert.deepEqual(changeParts("Batch", "Batch 16 → 8"), ["Batch ", "16 ", "→ 8"]);
  assert.deepEqual(changeParts("GPU", "GPU T4 · 14.4 GiB → H200 · 139 GiB"), ["GPU ", "T4 · 14.4 GiB ", "→ H200 · 139 GiB"]);
  assert.deepEqual(changeParts("Expandable segments", "Expandable segments on"), ["Expandable segments ", "", "on"]);
  assert.deepEqual(changeParts("", "variables n=2"), ["variables n=2", "", ""]); // set in code
});

test("knobs that do not apply are listed with their reasons", () => {
  const hidden = [["Batch, Accumulation", "a"], ["Size", "b"]].map(([label, reason]) => ({ label, reason }));
  assert.equal(hiddenText([]), "");
  assert.equal(hiddenText(hidden), "Not shown: Batch, Accumulation (a); Size (b).");
});

test("progress has an estimate without false precision", () => {
  assert.equal(progressText({ done: 18, planned: 40, seconds_left: 21.2 }, 0), "18 of about 40 · about 25 s left");
  assert.equal(progressText({ done: 3, planned: 40, seconds_left: null }, 0), "3 of about 40");
  // 21.2 - 8 = 13.2, rounded up to 15; after 30 s the estimate was wrong
  assert.equal(progressText({ done: 18, planned: 40, seconds_left: 21.2 }, 8), "18 of about 40 · about 15 s left");
  assert.equal(progressText({ done: 18, planned: 40, seconds_left: 21.2 }, 30), "18 of about 40");
  assert.deepEqual([0.2, 9.1, 61, 100].map(durationText), ["1 s", "10 s", "65 s", "2 min"]);
});

test("notes on a setting are told from those on the tape beside them", () => {
  assert.equal(appliedTitle(1, 0), "1 note on this setting");
  assert.equal(appliedTitle(2, 4), "2 notes on this setting, 4 not changed");
  assert.equal(appliedTitle(0, 4), "4 not changed");
});

test("a setting that waits for a cell is not said to run", () => {
  const changes = [{ field: "batch", text: "Batch 2 → 4" }];
  const text = (more) => runningText({ changes, working: true, expected: false, ...more });
  assert.equal(text(), "Running Batch 2 → 4…");
  assert.equal(text({ working: false }), "Waiting for the kernel: Batch 2 → 4");
  assert.equal(text({ changes: [] }), "Running the step as written…");
});

test("a picture before its run is said to be expected", () => {
  const changes = [{ field: "batch", text: "Batch 2 → 4" }];
  assert.equal(runningText({ changes, working: true, expected: true }), "Expected. Running Batch 2 → 4…");
});

test("the bar has the memory within the capacity, the memory beyond it, and the capacity", () => {
  // 10 of 40 are within, 30 beyond: the capacity is at a quarter.
  assert.deepEqual(barShares({ used: 10, needed: 40, capacity: 10 }), { within: 0.25, beyond: 0.75, capacity: 0.25 });
  assert.deepEqual(barShares({ used: 10, needed: 10, capacity: 40 }), { within: 0.25, beyond: 0, capacity: 1 });
  assert.deepEqual(barShares({ used: 10, needed: 10, capacity: null }), { within: 1, beyond: 0, capacity: null });
  assert.deepEqual(barShares({ used: 0, needed: 0, capacity: 0 }), { within: 0, beyond: 0, capacity: 0 });
});

test("arrows move around a toolbar, Home and End to its ends", () => {
  const moves = [["ArrowLeft", 0], ["ArrowRight", 2], ["ArrowRight", 0], ["Home", 2], ["End", 0], ["x", 1]];
  assert.deepEqual(moves.map(([key, number]) => buttonAfterKey(key, number, 3)), [2, 0, 1, 0, 2, undefined]);
});

test("lines of a diff are added, removed or kept", () => {
  assert.deepEqual(["+a", "-b", " c", "@@ train.py", ""].map(lineKind), ["added", "removed", "", "place", ""]);
});
