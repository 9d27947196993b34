// Clicks on a graph: the browser counts the presses, whatever plotly makes of them.
import assert from "node:assert/strict";
import { test } from "node:test";

import { reportClicks } from "../../../memexplore/jupyter/frontend/clicks.js";

/** A graph whose clicks are noted: `press(detail)`, then what plotly reports of it, each press in a task of its own. */
function listened() {
  const graph = Object.assign(new EventTarget(), {
    handlers: /** @type {Record<string, (click?: any) => void>} */ ({}),
    /** @param {string} event @param {(click?: any) => void} handler */
    on: (event, handler) => void (graph.handlers[event] = handler),
  });
  const /** @type {string[]} */ noted = [];
  reportClicks(/** @type {any} */ (graph), {
    onPress: () => noted.push("press"),
    onClick: ([{ customdata }]) => noted.push(`click ${customdata}`),
    onDoubleClick: () => noted.push("double click"),
  });
  const press = async (/** @type {number} */ detail, /** @type {string[]} */ ...reported) => {
    graph.dispatchEvent(detail ? Object.assign(new Event("mousedown"), { detail }) : new Event("touchstart"));
    for (const kind of reported) graph.handlers[`plotly_${kind}`]({ points: [{ customdata: 7 }] });
    await new Promise((done) => setTimeout(done));
  };
  return { noted, press };
}

test("a double click is a press, a click and a double click", async () => {
  const { noted, press } = listened();
  await press(1, "click");
  await press(2, "doubleclick", "click");
  assert.deepEqual(noted, ["press", "click 7", "double click"]);
});

test("two presses that plotly takes for single ones are a double click", async () => {
  const { noted, press } = listened();
  await press(1, "click");
  await press(2, "click");
  assert.deepEqual(noted, ["press", "click 7", "double click"]);
});

test("a press soon after a drag is a click, and a double click there is one", async () => {
  const { noted, press } = listened();
  await press(1); // the drag
  await press(1, "doubleclick", "click"); // plotly counts the drag
  await press(2, "click"); // the third press for plotly
  assert.deepEqual(noted, ["press", "press", "click 7", "double click"]);
});

test("plotly counts touches", async () => {
  const { noted, press } = listened();
  await press(0, "click");
  await press(0, "doubleclick", "click");
  assert.deepEqual(noted, ["click 7", "double click"]);
});
