import assert from "node:assert/strict";
import { test } from "node:test";

import type { Page } from "../src/data";
import { functions } from "../src/functions";
import { search } from "../src/search";
import { makeDifference, makeRooted, makeTree, nameOf, pathTo, type Tree } from "../src/tree";
import { held, pageOf } from "./pages";

const PLAIN = { inverted: false, lines: false };

function find(page: Page, tree: Tree, path: string): number {
  for (let i = 0; i < tree.size; i++)
    if (pathTo(tree, i).slice(1).map((n) => page.strings[tree.name[n]!]).join("/") === path) return i;
  throw new Error(`no ${path}`);
}

/** What is true of every tree. */
function sound(tree: Tree): void {
  for (let i = 0; i < tree.size; i++) {
    let [total, x] = [tree.self[i]!, tree.x[i]!];
    for (let c = tree.firstChild[i]!; c < tree.firstChild[i]! + tree.children[i]!; c++) {
      assert.equal(tree.parent[c], i);
      assert.equal(tree.depth[c], tree.depth[i]! + 1);
      assert.equal(tree.x[c], x);
      x += tree.width[c]!;
      total += tree.total[c]!;
      if (c > tree.firstChild[i]!) assert.ok(tree.width[c]! <= tree.width[c - 1]!);
    }
    assert.equal(total, tree.total[i]);
    assert.ok(x <= tree.x[i]! + tree.width[i]!);
  }
  for (let d = 0; d + 1 < tree.levels.length; d++)
    for (let i = tree.levels[d]!; i < tree.levels[d + 1]!; i++) assert.equal(tree.depth[i], d);
}

test("bytes of stacks add up to the root, the widest child first", () => {
  const { page, nodes } = pageOf([["main", "a"], ["main", "b"], ["main"]]);
  const tree = makeTree(page, held(nodes, [10, 30, 2], [1, 5, 1]), PLAIN, "all");
  sound(tree);
  assert.equal(tree.total[0], 42);
  assert.equal(tree.objects[0], 7);
  assert.deepEqual([...tree.total], [42, 42, 30, 10]);
  assert.equal(tree.self[find(page, tree, "main")], 2);
});

test("the name of a root is no string of the page, however many moments are looked at", () => {
  const { page, nodes } = pageOf([["main"]]);
  const before = [...page.strings];
  const trees = Array.from({ length: 100 }, (_, i) =>
    makeTree(page, held(nodes, [1]), PLAIN, `event ${i}`),
  );
  assert.deepEqual(page.strings, before);
  assert.deepEqual([0, 1].map((node) => nameOf(page, trees[7]!, node)), ["event 7", "main"]);
});

test("lines of one function are one node, unless they are asked for", () => {
  const { page, nodes } = pageOf([["f@1"], ["f@2"]]);
  const together = makeTree(page, held(nodes, [1, 2]), PLAIN, "all");
  assert.equal(together.size, 2);
  assert.equal(together.lines[1], 1);
  const apart = makeTree(page, held(nodes, [1, 2]), { inverted: false, lines: true }, "all");
  assert.deepEqual([...apart.total], [3, 2, 1]);
  sound(apart);
});

test("inverted, the first level is what allocated", () => {
  const { page, nodes } = pageOf([["main", "f", "empty"], ["main", "g", "empty"], ["main", "zeros"]]);
  const tree = makeTree(page, held(nodes, [1, 2, 4]), { inverted: true, lines: false }, "all");
  sound(tree);
  assert.equal(tree.total[0], 7);
  assert.equal(tree.total[find(page, tree, "zeros")], 4);
  assert.equal(tree.total[find(page, tree, "empty")], 3);
  assert.equal(tree.total[find(page, tree, "empty/g/main")], 2);
});

test("a difference has both sums, and is as wide as the larger of each stack", () => {
  const { page, nodes } = pageOf([["main", "grown"], ["main", "gone"], ["main", "new"]]);
  const before = held([nodes[0]!, nodes[1]!], [10, 5]);
  const after = held([nodes[0]!, nodes[2]!], [25, 7]);
  const tree = makeDifference(page, before, after, PLAIN, "max", "all");
  sound(tree);
  assert.equal(tree.before![0], 15);
  assert.equal(tree.total[0], 32);
  assert.equal(tree.width[0], 25 + 5 + 7);
  const gone = find(page, tree, "main/gone");
  assert.deepEqual([tree.before![gone], tree.total[gone], tree.width[gone]], [5, 0, 5]);
  const narrow = makeDifference(page, before, after, PLAIN, "after", "all");
  assert.equal(narrow.width[0], 32);
  assert.equal(narrow.width[find(page, narrow, "main/gone")], 0);
});

test("a file compared with itself does not differ", () => {
  const { page, nodes } = pageOf([["a", "b"], ["a", "c"]]);
  const same = held(nodes, [3, 4]);
  const tree = makeDifference(page, same, same, PLAIN, "max", "all");
  assert.deepEqual([...tree.before!], [...tree.total]);
});

test("rooted blocks stand below their root, those without a stack under a name", () => {
  const { page, nodes } = pageOf([["main", "f"]]);
  const one = page.strings.push("segment 1") - 1;
  const two = page.strings.push("segment 2") - 1;
  const free = page.strings.push("[inactive]") - 1;
  const tree = makeRooted(page, PLAIN, "all", [
    { root: one, node: nodes[0]!, name: free, bytes: 8 },
    { root: one, node: nodes[0]!, name: free, bytes: 8 },
    { root: two, node: 0, name: free, bytes: 5 },
  ]);
  sound(tree);
  assert.equal(tree.total[find(page, tree, "segment 1/main/f")], 16);
  assert.equal(tree.objects[find(page, tree, "segment 1/main/f")], 2);
  assert.equal(tree.total[find(page, tree, "segment 2/[inactive]")], 5);
});

test("a search counts every stack once, however often it matches", () => {
  const { page, nodes } = pageOf([["run", "train", "train"], ["run", "test"], ["other"]]);
  const tree = makeTree(page, held(nodes, [4, 2, 1]), PLAIN, "all");
  const train = search(page, tree, "TRAIN");
  assert.deepEqual([train.matches, train.bytes], [2, 4]);
  assert.deepEqual(search(page, tree, "/t(rain|est)/").bytes, 6);
  assert.equal(search(page, tree, "/(/").matches, 0);
  assert.equal(search(page, tree, "tr", true).matches, 0);
  assert.equal(search(page, tree, "train", true).matches, 2);
  assert.equal(search(page, tree, "").matches, 0);
});

test("a function's total counts recursion once, self adds up to all", () => {
  const { page, nodes } = pageOf([["f", "g", "f"], ["f", "g"], ["h"]]);
  const given = held(nodes, [4, 2, 1]);
  for (const inverted of [false, true]) {
    const rows = functions(makeTree(page, given, { inverted, lines: false }, "all"), inverted);
    const row = (name: string) => rows.find((r) => page.strings[r.name] === name)!;
    assert.deepEqual([row("f").self, row("f").total], [4, 6], `inverted ${inverted}`);
    assert.deepEqual([row("g").self, row("g").total], [2, 6]);
    assert.equal(rows.reduce((sum, r) => sum + r.self, 0), 7);
    assert.equal(rows.reduce((sum, r) => sum + r.objects, 0), 3);
  }
});

test("100,000 random stacks keep their sum and shape", () => {
  let seed = 1;
  const random = (below: number) => (seed = (Math.imul(seed, 1103515245) + 12345) >>> 1) % below;
  const { page } = pageOf([["x"]]);
  const names = 500;
  page.strings.length = 0;
  for (let i = 0; i < names; i++) page.strings.push(`f${i}`);
  page.frames = { name: Uint32Array.from({ length: names }, (_, i) => i), file: new Uint32Array(names), line: new Float64Array(names) };
  const n = 100_001;
  page.trie = {
    parent: Uint32Array.from({ length: n }, (_, i) => (i < 50 ? 0 : random(i - 1) + 1)),
    frame: Uint32Array.from({ length: n }, () => random(names)),
  };
  const given = held(Array.from({ length: n - 1 }, (_, i) => i + 1), Array.from({ length: n - 1 }, () => random(1 << 20)));
  const sum = given.bytes.reduce((a, b) => a + b, 0);
  for (const inverted of [false, true]) {
    const tree = makeTree(page, given, { inverted, lines: false }, "all");
    sound(tree);
    assert.equal(tree.total[0], sum);
    assert.ok(tree.size > 50_000);
    assert.equal(functions(tree, inverted).reduce((all, row) => all + row.self, 0), sum);
  }
});
