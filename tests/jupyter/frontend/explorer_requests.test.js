import assert from "node:assert/strict";
import { test } from "node:test";

import { ExplorerRequests } from "../../../memexplore/jupyter/frontend/explorer_requests.js";

/** Requests of one page, and what the kernel was sent. */
function page({ canSend = true } = {}) {
  const sent = [];
  const requests = new ExplorerRequests((request) => sent.push(request), "page", () => canSend);
  return { sent, requests };
}

const state = (received, more = {}) => ({ received: { page: received }, wanted: 1, shown: 1, working: false, search: { state: "idle" }, ...more });
const turn = (index, drag = "d") => ({ type: "knob", field: "batch", index, drag });
const knob = { field: "batch", index: 0, value: "", problem: "too large" };

test("numbers rise, and a request names its page", (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const { sent, requests } = page();
  requests.send(turn(1));
  requests.send({ type: "undo" });
  assert.deepEqual(sent.map(({ number, view }) => [number, view]), [[1, "page"], [2, "page"]]);
});

test("what the kernel has not received is sent again, in order, of one drag only the last value", (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const { sent, requests } = page();
  for (const index of [1, 2, 3]) requests.send(turn(index));
  requests.send({ type: "pin" });
  sent.length = 0;
  t.mock.timers.tick(1500);
  assert.deepEqual(sent.map(({ type, index, number }) => [type, index, number]), [["knob", 3, 3], ["pin", undefined, 4]]);
});

test("what was received is not sent again", (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const { sent, requests } = page();
  requests.send(turn(1));
  requests.send(turn(2, "another"));
  requests.receive(state(1)); // the second was lost
  sent.length = 0;
  t.mock.timers.tick(1500);
  assert.deepEqual(sent.map(({ number }) => number), [2]);
  requests.receive(state(2));
  t.mock.timers.tick(60_000);
  assert.equal(sent.length, 1);
});

test("a request says which one precedes it, and none that the kernel has", (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const { sent, requests } = page();
  const order = () => sent.splice(0).map(({ number, after }) => [number, after]);
  requests.send({ type: "pin" });
  requests.send(turn(1));
  requests.send(turn(2)); // replaces the one before it
  assert.deepEqual(order(), [[1, 0], [2, 1], [3, 1]]);
  requests.receive(state(1));
  requests.send({ type: "undo" });
  assert.deepEqual(order(), [[4, 3]]);
  t.mock.timers.tick(1500);
  assert.deepEqual(order(), [[3, 0], [4, 3]]);
});

test("a value of a drag is not replaced by one that follows another request", (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const { sent, requests } = page();
  for (const request of [turn(1), { type: "pin" }, turn(2)]) requests.send(request);
  sent.length = 0;
  t.mock.timers.tick(1500);
  assert.deepEqual(sent.map(({ type, index }) => [type, index]), [["knob", 1], ["pin", undefined], ["knob", 2]]);
});

test("a busy kernel is not asked again before it is idle", (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const sent = [];
  let isIdle = false;
  const requests = new ExplorerRequests((request) => sent.push(request), "page", () => isIdle);
  requests.send(turn(1));
  t.mock.timers.tick(20_000);
  assert.equal(sent.length, 1);
  isIdle = true;
  t.mock.timers.tick(1500);
  assert.equal(sent.length, 2);
});

test("a control shows the user's value until the kernel has received it, then the kernel's", (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const { requests } = page();
  requests.send(turn(4));
  assert.deepEqual(requests.withRequested(knob), { ...knob, index: 4, problem: "" });
  requests.receive(state(1));
  assert.deepEqual(requests.withRequested(knob), knob); // reverted, with the reason
});

test("a kernel that runs a setting or a search says so", (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const { requests } = page();
  const isRunning = (more) => (requests.receive(state(0, more)), requests.isRunning);
  assert.ok(!requests.isRunning);
  assert.deepEqual([isRunning({}), isRunning({ working: true }), isRunning({ wanted: 2 })], [false, true, true]);
  assert.ok(isRunning({ search: { state: "running" } }));
});

test("a page waits while anything is on its way, wanted or run", (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const { requests } = page();
  assert.ok(!requests.isWaiting);
  requests.send(turn(4));
  assert.ok(requests.isWaiting);
  requests.receive(state(1, { wanted: 2, shown: 1 }));
  assert.ok(requests.isWaiting);
  requests.receive(state(1, { wanted: 2, shown: 2, working: true }));
  assert.ok(requests.isWaiting);
  requests.receive(state(1, { wanted: 2, shown: 2 }));
  assert.ok(!requests.isWaiting);
});
