import assert from "node:assert/strict";
import { test } from "node:test";

import { Requests } from "../../../memexplore/notebook/frontend/requests.js";

/** Two views of one widget: both send to one kernel. */
function twoViews() {
  const sent = [];
  const send = (request) => sent.push(request);
  return { sent, one: new Requests(send, "one"), other: new Requests(send, "other") };
}

test("a request names its view, its tape and its number", () => {
  const { sent, one } = twoViews();
  one.tape = 3;
  one.sendNumbered("timeline", { window: [1, 2] });
  assert.deepEqual(sent, [{ type: "timeline", window: [1, 2], view: "one", tape: 3, number: 1 }]);
});

test("a reply to one view is not taken by the other, though both have asked as often", () => {
  const { one, other } = twoViews();
  one.sendNumbered("timeline");
  other.sendNumbered("timeline");
  const reply = { type: "timeline", view: "other", number: 1 };
  assert.deepEqual([one.isLatest(reply), other.isLatest(reply)], [false, true]);
  assert.deepEqual([one.concerns(reply), other.concerns(reply)], [false, true]);
});

test("a message without a view is for all views", () => {
  const { one, other } = twoViews();
  assert.ok(one.concerns({ type: "tape" }) && other.concerns({ type: "tape" }));
});

test("only the reply to the latest request of a type is drawn", () => {
  const { one } = twoViews();
  one.sendNumbered("timeline");
  one.sendNumbered("timeline");
  one.sendNumbered("blocks");
  assert.ok(!one.isLatest({ type: "timeline", view: "one", number: 1 }));
  assert.ok(one.isLatest({ type: "timeline", view: "one", number: 2 }));
  assert.ok(one.isLatest({ type: "blocks", view: "one", number: 1 }));
});

test("requests wait until they are settled", () => {
  const { one } = twoViews();
  one.sendNumbered("timeline");
  one.sendNumbered("blocks");
  one.settle("timeline");
  assert.ok(one.isWaiting);
  one.settleAll();
  assert.ok(!one.isWaiting);
});
