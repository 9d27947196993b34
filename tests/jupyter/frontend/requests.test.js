import assert from "node:assert/strict";
import { test } from "node:test";

import { Requests } from "../../../memexplore/jupyter/frontend/requests.js";

/** Two views of one widget: both send to one kernel. */
function twoViews(kernel = {}) {
  const sent = [];
  const send = (request) => sent.push(request);
  const idle = { canRead: () => true, isWorking: () => false, ...kernel };
  return { sent, one: new Requests(send, "one", idle), other: new Requests(send, "other", idle) };
}

/** The kernel's reply to the latest message, which is a ping. */
function pong(sent) {
  const { type, view, number } = sent.at(-1);
  assert.equal(type, "ping");
  return { type: "pong", view, number };
}

/** @param {import("node:test").TestContext} t */
function clock(t) {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  return t.mock.timers;
}

test("a request names its view, its tape and its number", (t) => {
  clock(t);
  const { sent, one } = twoViews();
  one.tape = 3;
  one.send("timeline", { window: [1, 2] });
  one.send("blocks");
  assert.deepEqual(sent[0], { type: "timeline", window: [1, 2], view: "one", tape: 3, number: 1 });
  assert.equal(sent[1].number, 2);
});

test("a reply to one view is not taken by the other, though both have asked as often", (t) => {
  clock(t);
  const { one, other } = twoViews();
  one.send("timeline");
  other.send("timeline");
  const reply = { type: "timeline", view: "other", number: 1 };
  assert.deepEqual([one.isLatest(reply), other.isLatest(reply)], [false, true]);
  assert.deepEqual([one.concerns(reply), other.concerns(reply)], [false, true]);
});

test("a message without a view is for all views, and a reply for its sender", (t) => {
  clock(t);
  const { one, other } = twoViews();
  one.send("cursor", { row: 3 });
  other.send("cursor", { row: 4 });
  const moved = { type: "cursor", sender: "one", number: 1 };
  assert.ok(one.concerns(moved) && other.concerns(moved));
  assert.deepEqual([one.isLatest(moved), other.isLatest(moved)], [true, false]);
});

test("only the reply to the latest request of a type is drawn", (t) => {
  clock(t);
  const { one } = twoViews();
  one.send("timeline");
  one.send("timeline");
  one.send("blocks");
  assert.ok(!one.isLatest({ type: "timeline", view: "one", number: 1 }));
  assert.ok(one.isLatest({ type: "timeline", view: "one", number: 2 }));
  assert.ok(one.isLatest({ type: "blocks", view: "one", number: 3 }));
});

test("requests wait until they are settled", (t) => {
  clock(t);
  const { one } = twoViews();
  one.send("timeline");
  one.send("blocks");
  one.settle("timeline");
  assert.ok(one.isWaiting);
  one.settleAll();
  assert.ok(!one.isWaiting);
});

test("of each topic the latest request without a reply is sent again after the reply to a later ping", (t) => {
  const time = clock(t);
  const { sent, one } = twoViews();
  one.send("cursor", { row: 3 });
  one.send("cursor", { row: 4 });
  one.send("select", { layer: "fc" }, "selection");
  one.send("block", { row: 9 }, "selection");
  one.send("blocks");
  one.hear({ type: "blocks", view: "one", number: 5 });
  time.tick(1500);
  one.hear(pong(sent));
  assert.deepEqual(
    sent.slice(6).map(({ type, row, number, again }) => [type, row, number, again]),
    [["cursor", 4, 2, true], ["block", 9, 4, true]],
  );
});

test("a request whose reply is late, but precedes the reply to the ping, is sent once", (t) => {
  const time = clock(t);
  const { sent, one } = twoViews();
  one.send("cursor", { row: 3 });
  time.tick(1500);
  one.hear({ type: "cursor", sender: "one", number: 1 });
  one.hear(pong(sent));
  time.tick(60_000);
  assert.deepEqual(sent.map(({ type }) => type), ["cursor", "ping"]);
});

test("a request sent after a ping is not lost because the ping has its reply", (t) => {
  const time = clock(t);
  const { sent, one } = twoViews();
  one.send("cursor", { row: 3 });
  time.tick(1500);
  const reply = pong(sent);
  one.send("blocks");
  one.hear(reply);
  assert.deepEqual(sent.map(({ type }) => type), ["cursor", "ping", "blocks", "cursor"]);
});

test("the reply to an earlier ping sends nothing for the third time", (t) => {
  const time = clock(t);
  const { sent, one } = twoViews();
  one.send("cursor", { row: 3 });
  time.tick(1500);
  const first = pong(sent);
  time.tick(3000);
  const second = pong(sent);
  one.hear(first);
  one.hear(second);
  assert.deepEqual(sent.map(({ type }) => type), ["cursor", "ping", "ping", "cursor"]);
});

test("the reply to another view's ping sends nothing", (t) => {
  clock(t);
  const { sent, one } = twoViews();
  one.send("cursor", { row: 3 });
  one.hear({ type: "pong", view: "other", number: 9 });
  assert.equal(sent.length, 1);
});

test("nothing is sent again while the kernel makes a new tape", (t) => {
  const time = clock(t);
  let isWorking = false;
  const { sent, one } = twoViews({ isWorking: () => isWorking });
  one.send("cursor", { row: 3 });
  time.tick(1500);
  isWorking = true;
  one.hear(pong(sent));
  assert.equal(sent.length, 2);
});

test("nothing is sent twice when every request has its reply", (t) => {
  const time = clock(t);
  const { sent, one } = twoViews();
  one.send("cursor", { row: 3 });
  one.send("picture", { happened: true }, "tape");
  one.send("drawn", {}, "details");
  one.hear({ type: "cursor", sender: "one", number: 1 });
  one.hear({ type: "tape", sender: "one", number: 2, tape: 1 });
  one.hear({ type: "details", tape: 0 });
  time.tick(60_000);
  assert.equal(sent.length, 3);
});

test("the kernel is pinged only while it reads messages, and ever more rarely", (t) => {
  const time = clock(t);
  let canRead = false;
  const { sent, one } = twoViews({ canRead: () => canRead });
  one.send("cursor", { row: 3 });
  time.tick(20_000);
  assert.equal(sent.length, 1);
  canRead = true;
  time.tick(1500); // and after 3, 6 and 12 seconds more
  time.tick(3000);
  time.tick(2999);
  assert.deepEqual(sent.map(({ type }) => type), ["cursor", "ping", "ping"]);
});

test("details of an earlier tape are no answer", (t) => {
  const time = clock(t);
  const { sent, one } = twoViews();
  one.tape = 2;
  one.send("drawn", {}, "details");
  one.hear({ type: "details", tape: 1 });
  time.tick(1500);
  one.hear(pong(sent));
  assert.equal(sent.length, 3);
});

test("a closed view sends nothing", (t) => {
  const time = clock(t);
  const { sent, one } = twoViews();
  one.send("cursor", { row: 3 });
  one.close();
  time.tick(60_000);
  assert.equal(sent.length, 1);
});
