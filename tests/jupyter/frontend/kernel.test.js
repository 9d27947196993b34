import assert from "node:assert/strict";
import { test } from "node:test";

import { Kernel } from "../../../memexplore/jupyter/frontend/kernel.js";

// What of a page the module reads.
globalThis.document = { visibilityState: "visible", addEventListener() {}, removeEventListener() {} };

/** A signal of JupyterLab. */
function signal() {
  const handlers = new Set();
  return { connect: (one) => handlers.add(one), disconnect: (one) => handlers.delete(one), emit: () => handlers.forEach((one) => one()) };
}

let made;

/** A kernel and its page: what was sent, and whether the kernel is said to be gone. */
function watch(t, connection, isRunning = () => false) {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  made = { sent: [], gone: 0, back: 0, idle: 0, isMarked: false };
  const root = { closest: () => (made.isMarked ? {} : null) };
  const handlers = {};
  const model = {
    send: (request) => made.sent.push(request.type),
    on: (name, handler) => (handlers[name] = handler),
    off: (name) => delete handlers[name],
    widget_manager: connection && { kernel: connection },
  };
  const count = (name) => () => (made[name] += 1);
  const handlersOfPage = { onGone: count("gone"), onBack: count("back"), onIdle: count("idle"), isRunning };
  const kernel = new Kernel(model, root, handlersOfPage);
  return { kernel, handlers };
}

const connected = (status) => ({ status, statusChanged: signal(), disposed: signal() });

test("an answer in time needs no ping", (t) => {
  const { kernel } = watch(t, connected("idle"));
  kernel.expect();
  t.mock.timers.tick(2900);
  kernel.hear();
  t.mock.timers.tick(60_000);
  assert.deepEqual([made.sent, made.gone], [[], 0]);
});

test("a kernel that answers neither a request nor a ping while it is idle is gone", (t) => {
  const { kernel } = watch(t, connected("idle"));
  kernel.expect();
  t.mock.timers.tick(3000);
  assert.deepEqual(made.sent, ["ping"]);
  t.mock.timers.tick(7900);
  assert.equal(made.gone, 0);
  t.mock.timers.tick(200);
  assert.equal(made.gone, 1);
  assert.ok(!kernel.canRead);
});

test("a busy kernel is not gone, and is judged when it is idle", (t) => {
  const connection = connected("busy");
  const { kernel } = watch(t, connection);
  const pass = (seconds) => Array.from({ length: seconds }, () => t.mock.timers.tick(1000));
  kernel.expect();
  pass(60);
  assert.deepEqual([made.sent, made.gone], [[], 0]);
  connection.status = "idle";
  pass(11); // at most 3 s until the ping, and 8 s without an answer
  assert.deepEqual([made.sent, made.gone], [["ping"], 1]);
});

test("a kernel that runs a setting on its main thread is not gone, although it reports to be idle", (t) => {
  let isRunning = true;
  const { kernel } = watch(t, connected("idle"), () => isRunning);
  const pass = (seconds) => Array.from({ length: seconds }, () => t.mock.timers.tick(1000));
  kernel.expect();
  pass(60);
  assert.deepEqual([made.sent, made.gone], [[], 0]);
  isRunning = false;
  pass(11);
  assert.equal(made.gone, 1);
});

test("a kernel that was only late is back with its next message, one that has ended is not", (t) => {
  const connection = connected("idle");
  const { kernel } = watch(t, connection);
  kernel.expect();
  t.mock.timers.tick(3000);
  t.mock.timers.tick(8000);
  assert.deepEqual([made.gone, kernel.isGone], [1, true]);
  kernel.hear();
  assert.deepEqual([made.back, kernel.isGone, kernel.canRead], [1, false, true]);
  connection.status = "dead";
  connection.statusChanged.emit();
  kernel.hear();
  assert.deepEqual([made.gone, made.back, kernel.isGone], [2, 1, true]);
});

test("without a connection nothing is said: a busy kernel looks the same", (t) => {
  const { kernel } = watch(t, null);
  kernel.expect();
  t.mock.timers.tick(60_000);
  assert.equal(made.gone, 0);
});

test("a restart, an end and a shutdown are noticed at once, and said once", (t) => {
  for (const status of ["restarting", "autorestarting", "terminating", "dead"]) {
    const connection = connected("idle");
    watch(t, connection);
    connection.status = status;
    connection.statusChanged.emit();
    connection.statusChanged.emit();
    assert.equal(made.gone, 1);
    t.mock.timers.reset();
  }
  const connection = connected("idle");
  watch(t, connection);
  connection.isDisposed = true;
  connection.disposed.emit();
  assert.equal(made.gone, 1);
});

test("a widget that ipywidgets marks as disconnected has lost its kernel", (t) => {
  const { handlers } = watch(t, connected("idle"));
  handlers.comm_live_update();
  t.mock.timers.tick(1);
  assert.equal(made.gone, 0); // the event comes also when a widget is connected
  made.isMarked = true;
  handlers.comm_live_update();
  t.mock.timers.tick(1);
  assert.equal(made.gone, 1);
});
