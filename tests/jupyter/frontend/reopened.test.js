import assert from "node:assert/strict";
import { test } from "node:test";

import widget from "../../../memexplore/jupyter/frontend/reopened/index.js";

const STATE = { _model_name: "AnyModel", _model_module: "anywidget", _model_module_version: "1", value: 3 };
const OUTPUTS = [{ output_type: "display_data", data: { "text/html": "<img class=picture-1>" }, metadata: {} }];
const ANSWER = { states: { layout: STATE, view: STATE }, cell: "c", view: "view", outputs: OUTPUTS, display: "d", image: "picture-1" };

/** A page of JupyterLab with some models and the outputs of one cell, and what was done with it. */
function page(t, { models = [], restoredStatus = false, outputs = [], reconnects = false } = {}) {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const done = { sent: [], made: [], restored: 0 };
  const handlers = {};
  const list = [...outputs];
  const cell = {
    id: "c",
    trusted: false,
    outputs: {
      toJSON: () => [...list],
      clear: () => list.splice(0),
      add: (output) => (list.push(output), (notebook.dirty = true)),
      set: (index, output) => ((list[index] = output), (notebook.dirty = true)),
    },
  };
  const notebook = { dirty: false, cells: [cell] };
  const own = new Map(models.map((id) => [id, { comm: { send: () => "shell", _hookupCallbacks() {} } }]));
  const kernel = {
    username: "u",
    clientId: "s",
    sendControlMessage: (message) => (done.sent.push(message), { msg: message }),
    iopubMessage: { connect: (handler) => (handlers.iopub = handler) },
  };
  const manager = {
    kernel,
    restoredStatus,
    context: { model: notebook },
    has_model: (id) => own.has(id),
    get_model: async (id) => own.get(id),
    _create_comm: async () => ({ _hookupCallbacks() {} }),
    new_model: async (options, state) => (done.made.push([options.model_id, state]), own.set(options.model_id, options)),
    _restored: { emit: () => (done.restored += 1) },
  };
  const values = { models: ["layout", "view"], comm: "offer", reconnects };
  const model = { get: (name) => values[name], on: (_, handler) => (handlers.answer = handler), widget_manager: manager };
  widget.initialize({ model });
  return { done, handlers, cell, list, notebook, own };
}

const update = (display, data) => ({ header: { msg_type: "update_display_data" }, content: { data, metadata: {}, transient: { display_id: display } } });

test("a page without the models asks for them on the control channel, after JupyterLab had its time", (t) => {
  const { done } = page(t);
  t.mock.timers.tick(900);
  assert.equal(done.sent.length, 0);
  t.mock.timers.tick(200);
  const [{ channel, header, content }] = done.sent;
  assert.deepEqual([channel, header.msg_type, header.session], ["control", "comm_msg", "s"]);
  assert.deepEqual(content, { comm_id: "offer", data: { method: "custom", content: { type: "states" } } });
});

for (const [name, options] of [
  ["a page with the models", { models: ["layout", "view"] }],
  ["a page whose widgets JupyterLab has restored", { restoredStatus: true }],
]) {
  test(`${name} asks for nothing`, (t) => {
    const { done, handlers } = page(t, options);
    t.mock.timers.tick(5000);
    assert.deepEqual([done.sent, handlers], [[], {}]);
  });
}

test("other pages than those of JupyterLab do nothing", () => {
  const model = { get: () => [], on: () => assert.fail() };
  widget.initialize({ model });
  widget.initialize({ model: { ...model, widget_manager: { kernel: null } } });
});

test("an answer makes the models, whose messages take the control channel, and draws the outputs", async (t) => {
  const { done, handlers, own } = page(t);
  await handlers.answer(ANSWER);
  assert.deepEqual(done.made, [["layout", STATE], ["view", STATE]]);
  assert.equal(done.restored, 1);
  const id = own.get("view").comm.send({ method: "custom", content: { type: "ping" } });
  assert.equal(done.sent[0].header.msg_id, id);
  assert.deepEqual([done.sent[0].channel, done.sent[0].content.comm_id], ["control", "view"]);
});

test("an answer that comes twice makes the models once", async (t) => {
  const { done, handlers } = page(t);
  await handlers.answer(ANSWER);
  await handlers.answer(ANSWER);
  assert.equal(done.made.length, 2);
});

test("a notebook without the outputs of the run gets them, and does not count as changed", async (t) => {
  const { handlers, cell, list, notebook } = page(t, { outputs: [{ output_type: "stream", text: "an earlier run" }] });
  await handlers.answer(ANSWER);
  assert.deepEqual(list, OUTPUTS);
  assert.deepEqual([cell.trusted, notebook.dirty], [true, false]);
});

test("a notebook with the outputs of the run keeps them", async (t) => {
  const saved = [{ output_type: "stream", text: "printed" }, { data: { view: "view" } }];
  const { handlers, cell, list } = page(t, { outputs: saved });
  await handlers.answer(ANSWER);
  assert.deepEqual([list, cell.trusted], [saved, false]);
});

test("the static image follows the kernel", async (t) => {
  const { handlers, list, notebook } = page(t);
  await handlers.answer(ANSWER);
  handlers.iopub(null, update("another", { "text/html": "no" }));
  assert.deepEqual(list, OUTPUTS);
  handlers.iopub(null, update("d", { "text/html": "the end" }));
  assert.deepEqual(list.map(({ data }) => data), [{ "text/html": "the end" }]);
  assert.equal(notebook.dirty, false);
});

test("with an old kernel the models of a page take the control channel", async (t) => {
  const { done, own } = page(t, { models: ["layout", "view"], reconnects: true });
  await new Promise((resolve) => setImmediate(resolve));
  own.get("view").comm.send({ method: "update" });
  assert.deepEqual([done.sent[0].channel, done.sent[0].content.data], ["control", { method: "update" }]);
});
