import assert from "node:assert/strict";
import { test } from "node:test";

import { BySegment } from "../src/bysegment";
import { nameOf } from "../src/tree";
import { pageOf, segmentsOf } from "./pages";

const PLAIN = { inverted: false, lines: false };

test("each segment is a tower, what no block covers a part of it", () => {
  const { page, nodes } = pageOf([["main", "f"]]);
  const table = segmentsOf(page, 2, nodes[0]!);
  const tree = new BySegment(page).tree(table, PLAIN);
  const named = Array.from({ length: tree.size }, (_, i) => [nameOf(page, tree, i), tree.total[i]]);
  assert.deepEqual(named, [
    ["all", 20],
    ["segment 0x0 large, default pool, stream 0", 10],
    ["segment 0xa large, default pool, stream 0", 10],
    ["main", 6], ["[no block]", 4],
    ["main", 6], ["[no block]", 4],
    ["f", 6], ["f", 6],
  ]);
});

test("20,000 segments add a name each, once, however often they are shown", () => {
  const { page, nodes } = pageOf([["main", "f"]]);
  const table = segmentsOf(page, 20_000, nodes[0]!);
  const other = { ...table, device: 1 };
  const bySegment = new BySegment(page);
  const before = page.strings.length;
  const expected = before + 20_000 + 3 + 1; // states of blocks, and no block
  for (const shape of [PLAIN, { inverted: true, lines: true }, PLAIN])
    for (const shown of [table, other]) {
      assert.equal(bySegment.tree(shown, shape).total[0], 200_000);
      assert.equal(page.strings.length, expected);
    }
  assert.equal(new Set(page.strings).size, expected);
});
