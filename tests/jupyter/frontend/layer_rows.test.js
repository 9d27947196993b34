import assert from "node:assert/strict";
import { test } from "node:test";
import { Folds, afterKey, bytesOf, isHit, moreText, rowAround, visibleRows } from "../../../memexplore/jupyter/frontend/layer_rows.js";
import { arranged } from "../../../memexplore/jupyter/frontend/memory_tables.js";

const row = (label, bytes, children = [], members = []) => ({
  name: label, label, kind: "", count: members.length || 1, size: "", each: "", sizes: [bytes], children, members,
});
const BLOCKS = row("h", 80, [row("attn", 20), row("mlp", 60, [row("act", 60)])], [row("0", 40), row("1", 40)]);
const TREE = [row("Net", 95, [BLOCKS, row("fc", 15)]), row("none", 5)];
const labels = (rows) => rows.map(({ row, level }) => `${level} ${row.label}`);

test("the root and layers with much of the total are open at first", () => {
  // h has 80 of 100 bytes; mlp, on the third level, has 60
  assert.deepEqual(labels(visibleRows(TREE, new Folds(), 100)), ["1 Net", "2 h", "3 attn", "3 mlp", "4 act", "2 fc", "1 none"]);
});

test("rows below the visible part are counted, with the largest size", () => {
  const sized = (label, bytes) => ({ ...row(label, bytes), size: `${bytes} B` });
  assert.equal(moreText([sized("a", 5), sized("b", 9), sized("c", 2)]), "▾ 3 more rows below: up to 9 B");
  assert.equal(moreText([sized("a", 5)]), "▾ 1 more row below: 5 B");
  assert.equal(moreText([]), "");
});

test("a row around a match is no match itself", () => {
  assert.ok(!isHit(BLOCKS, "attn"));
  assert.ok(isHit(BLOCKS.children[0], "attn"));
});

test("a row stays open or closed as chosen, whatever the next tape holds", () => {
  const folds = new Folds();
  visibleRows(TREE, folds, 100);
  assert.equal(visibleRows(TREE, folds, 1000).length, 7);
  const h = visibleRows(TREE, folds, 100)[1];
  folds.open.set(h.id, false);
  assert.deepEqual(labels(visibleRows(TREE, folds, 100)), ["1 Net", "2 h", "2 fc", "1 none"]);
});

test("a row of several layers shows them one by one", () => {
  const folds = new Folds();
  folds.split.add(visibleRows(TREE, folds, 100)[1].id);
  assert.deepEqual(labels(visibleRows(TREE, folds, 100)), ["1 Net", "2 h", "3 0", "3 1", "2 fc", "1 none"]);
});

test("rows have unique ids, also where layers of both forms have the same label", () => {
  const folds = new Folds();
  const ids = visibleRows(TREE, folds, 100).map(({ id }) => id);
  assert.equal(new Set(ids).size, ids.length);
});

test("a search leaves matches and the rows above them, open", () => {
  const folds = new Folds();
  const h = visibleRows(TREE, folds, 100)[1];
  folds.open.set(h.id, false);
  assert.deepEqual(labels(visibleRows(TREE, folds, 100, "act")), ["1 Net", "2 h", "3 mlp", "4 act"]);
});

test("keys move as in a tree", () => {
  const rows = visibleRows(TREE, new Folds(), 100);
  assert.deepEqual(afterKey("ArrowDown", rows, 0), { index: 1 });
  assert.deepEqual(afterKey("ArrowUp", rows, 0), { index: 0 });
  assert.deepEqual(afterKey("End", rows, 0), { index: 6 });
  assert.deepEqual(afterKey("ArrowRight", rows, 1), { index: 2 }); // open: to its first child
  assert.deepEqual(afterKey("ArrowLeft", rows, 1), { open: false });
  assert.deepEqual(afterKey("ArrowLeft", rows, 4), { index: 3 }); // from act to mlp
  assert.deepEqual(afterKey("ArrowRight", rows, 5), {}); // fc holds no layers
  assert.equal(afterKey("x", rows, 0), undefined);
});

test("bytes of a row are those of its categories", () => {
  assert.equal(bytesOf({ ...BLOCKS, sizes: [1, 2, 3] }), 6);
});

test("tables are sorted by bytes or text, and searched in every cell", () => {
  const rows = [["10 B", 10, "relu"], ["9 KiB", 9216, "mm"], ["1 MiB", 1048576, "add"]].map(([size, bytes, op]) => ({ size, bytes, op }));
  const columns = [{ title: "Size", texts: ({ size }) => [size] }, { title: "Op", texts: ({ op }) => [op] }];
  const ops = (found) => found.map(({ op }) => op);
  assert.deepEqual(ops(arranged(rows, columns, "", 0, false)), ["add", "mm", "relu"]);
  assert.deepEqual(ops(arranged(rows, columns, "", 1, true)), ["relu", "mm", "add"]);
  assert.deepEqual(ops(arranged(rows, columns, "kib", 0, false)), ["mm"]);
});

test("a selected layer that is not visible is inside the innermost visible row around it", () => {
  const folds = new Folds();
  const around = (layer) => rowAround(visibleRows(TREE, folds, 100), layer)?.row.label;
  assert.equal(around("act"), undefined); // visible
  assert.equal(around(null), undefined);
  assert.equal(around("1"), "h"); // one of the layers that the row of h shows together
  folds.open.set(visibleRows(TREE, folds, 100)[1].id, false);
  assert.equal(around("act"), "h");
  folds.open.set(visibleRows(TREE, folds, 100)[0].id, false);
  assert.equal(around("act"), "Net");
});
