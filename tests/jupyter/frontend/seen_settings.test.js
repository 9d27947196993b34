import assert from "node:assert/strict";
import { test } from "node:test";

import { ExplorerRequests } from "../../../memexplore/jupyter/frontend/explorer_requests.js";
import { SeenSettings } from "../../../memexplore/jupyter/frontend/seen_settings.js";

const SIZES = ["1", "2", "4"];

/** A page whose kernel has one slider, and what the page draws. */
function page(t, { isZoomed = () => false } = {}) {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const requests = new ExplorerRequests(() => {}, "page", () => true);
  const drawn = [];
  const seen = new SeenSettings(requests, {
    isZoomed,
    selection: () => null,
    enqueue: (task) => task(),
    draw: ({ name }) => drawn.push(name),
    answer: ({ name }, early) => drawn.push(early ? `${name} as drawn` : `${name} instead`),
  });
  let wanted = 0;
  const tell = (index, more) => {
    const knobs = [{ field: "batch", kind: "slider", options: SIZES, index, value: "" }];
    requests.receive({ received: { page: requests.number }, knobs, changes: [], wanted, shown: wanted, working: false, ...more });
  };
  tell(0);
  const turn = (index) => {
    requests.send({ type: "knob", field: "batch", index, drag: "d" });
    seen.request("knob");
  };
  /** The kernel sends a picture and then its state. */
  const answer = async (index, tape, name = `picture ${SIZES[index]}`) => {
    if (seen.arrive({ tape, name, window: null }, [new DataView(new TextEncoder().encode(name).buffer)])) drawn.push(name);
    wanted += 1;
    tell(index);
    await seen.receive(tape);
  };
  /** Both larger sizes are shown, the last one at the end. */
  const showBoth = async () => {
    for (const [index, tape] of [[1, 1], [2, 2]]) {
      turn(index);
      await answer(index, tape);
    }
    drawn.length = 0;
  };
  return { drawn, seen, turn, answer, tell, showBoth };
}

test("a setting that was on the screen is drawn before the kernel answers, and not again", async (t) => {
  const { drawn, turn, answer, showBoth } = page(t);
  await showBoth();
  turn(1);
  assert.deepEqual(drawn, ["picture 2"]);
  await answer(1, 3);
  assert.deepEqual(drawn, ["picture 2", "picture 2 as drawn"]);
});

test("another picture of the kernel replaces the early one", async (t) => {
  const { drawn, turn, answer, showBoth } = page(t);
  await showBoth();
  turn(1);
  drawn.length = 0;
  await answer(1, 3, "changed");
  assert.deepEqual(drawn, ["changed instead"]);
});

test("messages about settings between are not drawn over an early picture", async (t) => {
  const { drawn, seen, turn, answer, showBoth } = page(t);
  await showBoth();
  turn(0);
  turn(1);
  drawn.length = 0;
  assert.equal(seen.arrive({ tape: 3, name: "picture 1", window: null }, []), false);
  await answer(1, 4);
  assert.deepEqual(drawn, ["picture 2 as drawn"]);
});

test("a setting that the kernel refuses gives way to the picture before", async (t) => {
  const { drawn, seen, turn, answer, tell, showBoth } = page(t);
  await showBoth();
  turn(1);
  drawn.length = 0;
  tell(2); // back to the setting before; its picture is the latest
  await seen.receive(2);
  assert.deepEqual(drawn, ["picture 4 instead"]);
});

test("nothing is drawn early from another baseline, or while a part is shown", async (t) => {
  let zoomed = false;
  const { drawn, seen, turn, answer, showBoth } = page(t, { isZoomed: () => zoomed });
  await showBoth();
  zoomed = true;
  turn(1);
  zoomed = false;
  turn(2);
  assert.deepEqual(drawn, ["picture 4"]);
  seen.request("pin");
  turn(1);
  assert.deepEqual(drawn, ["picture 4"]);
});

test("of many pictures the newest are kept", (t) => {
  const { seen } = page(t);
  for (let number = 0; number < 100; number += 1) seen.keep(String(number), {});
  assert.equal(seen.kept.size, 64);
  assert.ok(seen.kept.has("99") && !seen.kept.has("35"));
});
