import assert from "node:assert/strict";
import { test } from "node:test";

import { Requests } from "../../../memexplore/notebook/frontend/requests.js";

/** Two views of one widget: both send to one kernel. */
function twoViews({ canSend = () => true } = {}) {
  const sent = [];
  const send = (request) => sent.push(request);
  const views = { sent, one: new Requests(send, "one", canSend), other: new Requests(send, "other", canSend) };
  return views;
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

test("of each topic the latest request without a reply is sent again", (t) => {
  const time = clock(t);
  const { sent, one } = twoViews();
  one.send("cursor", { row: 3 });
  one.send("cursor", { row: 4 });
  one.send("select", { layer: "fc" }, "selection");
  one.send("block", { row: 9 }, "selection");
  one.send("blocks");
  one.hear({ type: "blocks", view: "one", number: 5 });
  sent.length = 0;
  time.tick(1500);
  assert.deepEqual(
    sent.map(({ type, row, number, again }) => [type, row, number, again]),
    [["cursor", 4, 2, true], ["block", 9, 4, true]],
  );
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

test("the kernel is asked again only while it is idle, and ever more rarely", (t) => {
  const time = clock(t);
  let isIdle = false;
  const { sent, one } = twoViews({ canSend: () => isIdle });
  one.send("cursor", { row: 3 });
  time.tick(20_000);
  assert.equal(sent.length, 1);
  isIdle = true;
  time.tick(1500); // and after 3, 6 and 12 seconds more
  time.tick(3000);
  time.tick(2999);
  assert.equal(sent.length, 3);
});

test("details of an earlier tape are no answer", (t) => {
  const time = clock(t);
  const { sent, one } = twoViews();
  one.tape = 2;
  one.send("drawn", {}, "details");
  one.hear({ type: "details", tape: 1 });
  time.tick(1500);
  assert.equal(sent.length, 2);
});

test("a closed view sends nothing", (t) => {
  const time = clock(t);
  const { sent, one } = twoViews();
  one.send("cursor", { row: 3 });
  one.close();
  time.tick(60_000);
  assert.equal(sent.length, 1);
});
