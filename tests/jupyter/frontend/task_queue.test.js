import assert from "node:assert/strict";
import { test } from "node:test";

import { TaskQueue } from "../../../memexplore/jupyter/frontend/task_queue.js";

const pause = () => new Promise((resolve) => setTimeout(resolve));

test("tasks run one after the other", async () => {
  const done = [];
  const queue = new TaskQueue(() => {}, assert.fail);
  queue.add(async () => {
    await pause();
    done.push("slow");
  });
  queue.add(() => done.push("fast"));
  assert.equal(queue.pending, 2);
  await queue.last;
  assert.deepEqual([done, queue.pending], [["slow", "fast"], 0]);
});

test("an error is reported and the next task runs", async () => {
  const errors = [];
  const queue = new TaskQueue(() => {}, (error) => errors.push(error.message));
  let ran = false;
  queue.add(() => {
    throw new Error("wrong");
  });
  queue.add(() => (ran = true));
  await queue.last;
  assert.deepEqual([errors, ran], [["wrong"], true]);
});

test("a closed queue skips what has not started", async () => {
  const queue = new TaskQueue(() => {}, assert.fail);
  queue.add(() => assert.fail("ran"));
  queue.close();
  await queue.last;
});
