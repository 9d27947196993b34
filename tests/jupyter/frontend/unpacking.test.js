import assert from "node:assert/strict";
import { test } from "node:test";
import { gzipSync } from "node:zlib";

import { unpack, unpackAll, withArrays } from "../../../memexplore/jupyter/frontend/unpacking.js";

const view = (bytes) => new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
const text = (content) => view(new TextEncoder().encode(JSON.stringify(content)));

test("references become the numbers they name", () => {
  const content = { data: [{ x: { offset: 1, length: 2 } }], rows: [3], name: "peak" };
  const filled = withArrays(content, Float64Array.of(10, 11, 12));
  assert.deepEqual([...filled.data[0].x], [11, 12]);
  assert.deepEqual([filled.rows, filled.name], [[3], "peak"]);
});

test("an empty array and null stay what they are", () => {
  const filled = withArrays({ x: { offset: 0, length: 0 }, window: null }, new Float64Array(0));
  assert.deepEqual([filled.x.length, filled.window], [0, null]);
});

test("numbers may begin at any byte of a message", async () => {
  const bytes = new Uint8Array(3 + 8);
  bytes.set(new Uint8Array(Float64Array.of(2.5).buffer), 3);
  const numbers = new DataView(bytes.buffer, 3, 8);
  assert.deepEqual([...(await unpack(text({ x: { offset: 0, length: 1 } }), numbers)).x], [2.5]);
});

test("compressed text is decompressed", async () => {
  const compressed = new Uint8Array(gzipSync(JSON.stringify({ row: 7 })));
  assert.deepEqual(await unpack(view(compressed), view(new Uint8Array(0))), { row: 7 });
});

test("later pairs of buffers overwrite earlier ones", async () => {
  const empty = view(new Uint8Array(0));
  const content = await unpackAll([text({ row: 1, text: "a" }), empty, text({ row: 2 }), empty]);
  assert.deepEqual(content, { row: 2, text: "a" });
});
