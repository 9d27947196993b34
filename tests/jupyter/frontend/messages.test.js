// Messages to a model whose own handler has given up.
import assert from "node:assert/strict";
import { test } from "node:test";

import { receiveMessages } from "../../../memexplore/jupyter/frontend/messages.js";

class Base {
  handled = /** @type {unknown[]} */ ([]);
  _handle_comm_msg(/** @type {unknown} */ message) {
    this.handled.push(message);
  }
}

class GaveUp extends Base {
  /** @type {{ on_msg(handler: (message: unknown) => unknown): void } | undefined} */
  comm;
  _handle_comm_msg() {
    throw new Error("Failed to initialize model.");
  }
}

test("messages reach the handler of the base class, with the model as its receiver", async () => {
  const raw = new GaveUp();
  let receive = /** @type {(message: unknown) => unknown} */ (() => undefined);
  raw.comm = { on_msg: (handler) => void (receive = handler) };
  const model = { get: () => "7f", widget_manager: { get_model: async (/** @type {string} */ id) => id === "7f" && raw } };
  await receiveMessages(/** @type {any} */ (model));
  receive("update");
  assert.deepEqual(raw.handled, ["update"]);
});

test("a page without a manager of models, or a model without a comm, is left as it is", async () => {
  await receiveMessages(/** @type {any} */ ({ get: () => "7f" }));
  await receiveMessages(/** @type {any} */ ({ get: () => "7f", widget_manager: {} }));
  const manager = { get_model: async () => new GaveUp() };
  await receiveMessages(/** @type {any} */ ({ get: () => "7f", widget_manager: manager }));
});
