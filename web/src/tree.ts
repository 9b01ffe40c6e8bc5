// Flame graphs as columns: from bytes by stack to nodes with a place, in milliseconds for 100,000.

import { Children, Growing } from "./columns";
import type { Page, Trie } from "./data";

/** A flame graph. Nodes are in breadth-first order; node 0 is everything. */
export interface Tree {
  size: number;
  /** What node 0 is called: no text of the file, so none of the page's strings. */
  root: string;
  /** Of each node: index into the page's strings, and of its first frame (-1: none). See `nameOf`. */
  name: Uint32Array;
  frame: Int32Array;
  /** 1 where frames of several lines are in one node. */
  lines: Uint8Array;
  parent: Int32Array;
  depth: Uint16Array;
  /** Children of a node are neighbours, the widest first. */
  firstChild: Uint32Array;
  children: Uint32Array;
  self: Float64Array;
  total: Float64Array;
  objects: Float64Array;
  /** Of the file before, in a difference; else null. */
  before: Float64Array | null;
  beforeObjects: Float64Array | null;
  /** Where a node is drawn, in bytes from the left. */
  x: Float64Array;
  width: Float64Array;
  /** First node of each depth, and one more. */
  levels: number[];
}

/** Bytes by stack. */
export interface Held {
  node: Uint32Array;
  objects: Float64Array;
  bytes: Float64Array;
}

/** A block below a root; names are indexes into the page's strings, node 0 is no stack. */
export interface Rooted {
  root: number;
  node: number;
  name: number;
  bytes: number;
}

export interface Shape {
  /** Leaf first: what allocated, and below it what called that. */
  inverted: boolean;
  /** Lines of one function apart. */
  lines: boolean;
}

class Maker {
  private readonly places = new Children();
  private readonly name = new Growing(new Int32Array(1024));
  private readonly frame = new Growing(new Int32Array(1024));
  private readonly lines = new Growing(new Uint8Array(1024));
  private readonly parent = new Growing(new Int32Array(1024));
  private readonly numbers = [0, 1, 2, 3].map(() => new Growing(new Float64Array(1024)));
  private size = 1;

  constructor(
    private readonly page: Page,
    private readonly shape: Shape,
    private readonly root: string,
  ) {
    this.frame.values[0] = -1;
    this.parent.values[0] = -1;
  }

  /** The node below a parent for a frame of the page. */
  byFrame(parent: number, frame: number): number {
    const names = this.page.frames.name;
    // names and frames are counted apart, so that a key is of one kind only in any tree
    const key = this.shape.lines ? frame : names[frame]!;
    const node = this.below(parent, key, names[frame]!, frame);
    if (this.page.frames.line[frame] !== this.page.frames.line[this.frame.values[node]!])
      this.lines.values[node] = 1;
    return node;
  }

  /** The node below a parent for a name that is no frame's: `key` has to be far from theirs. */
  byName(parent: number, name: number): number {
    return this.below(parent, 0xffffffff - name, name, -1);
  }

  private below(parent: number, key: number, name: number, frame: number): number {
    const found = this.places.find(parent, key);
    if (found >= 0) return found;
    const node = this.size++;
    for (const column of [this.name, this.frame, this.lines, this.parent, ...this.numbers])
      column.ensure(this.size);
    this.name.values[node] = name;
    this.frame.values[node] = frame;
    this.parent.values[node] = parent;
    this.places.put(-1 - found, parent, key, node);
    return node;
  }

  add(node: number, side: 0 | 1, bytes: number, objects: number): void {
    this.numbers[2 * side]!.values[node]! += bytes;
    this.numbers[2 * side + 1]!.values[node]! += objects;
  }

  /** Totals, widths and places. A width is what a node holds or, in a difference, the larger of
   * before and after of each stack, so that what is gone can be seen too. */
  finish(difference: boolean, widths: "max" | "after" = "after"): Tree {
    const n = this.size;
    const parent = this.parent.values;
    const [self, selfObjects, gone, goneObjects] = this.numbers.map((c) => c.values) as [
      Float64Array,
      Float64Array,
      Float64Array,
      Float64Array,
    ];
    const total = self.slice(0, n);
    const objects = selfObjects.slice(0, n);
    const before = gone.slice(0, n);
    const beforeObjects = goneObjects.slice(0, n);
    const width = new Float64Array(n);
    for (let i = 0; i < n; i++)
      width[i] = difference && widths === "max" ? Math.max(self[i]!, gone[i]!) : self[i]!;
    const children = new Uint32Array(n);
    for (let i = n - 1; i > 0; i--) {
      const up = parent[i]!;
      total[up]! += total[i]!;
      objects[up]! += objects[i]!;
      before[up]! += before[i]!;
      beforeObjects[up]! += beforeObjects[i]!;
      width[up]! += width[i]!;
      children[up]! += 1;
    }
    const start = new Uint32Array(n + 1);
    for (let i = 0; i < n; i++) start[i + 1] = start[i]! + children[i]!;
    const filled = start.slice();
    const below = new Uint32Array(Math.max(n - 1, 0));
    for (let i = 1; i < n; i++) below[filled[parent[i]!]!++] = i;

    const order = new Uint32Array(n);
    const tree: Tree = {
      size: n,
      root: this.root,
      name: new Uint32Array(n),
      frame: new Int32Array(n),
      lines: new Uint8Array(n),
      parent: new Int32Array(n),
      depth: new Uint16Array(n),
      firstChild: new Uint32Array(n),
      children: new Uint32Array(n),
      self: new Float64Array(n),
      total: new Float64Array(n),
      objects: new Float64Array(n),
      before: difference ? new Float64Array(n) : null,
      beforeObjects: difference ? new Float64Array(n) : null,
      x: new Float64Array(n),
      width: new Float64Array(n),
      levels: [0],
    };
    tree.parent[0] = -1;
    let end = 1;
    for (let i = 0; i < n; i++) {
      const old = order[i]!;
      if (i > 0 && tree.depth[i] !== tree.depth[i - 1]) tree.levels.push(i);
      tree.name[i] = this.name.values[old]!;
      tree.frame[i] = this.frame.values[old]!;
      tree.lines[i] = this.lines.values[old]!;
      tree.self[i] = self[old]!;
      tree.total[i] = total[old]!;
      tree.objects[i] = objects[old]!;
      tree.width[i] = width[old]!;
      if (tree.before && tree.beforeObjects) {
        tree.before[i] = before[old]!;
        tree.beforeObjects[i] = beforeObjects[old]!;
      }
      const mine = below.subarray(start[old]!, start[old + 1]!);
      if (mine.length > 1) mine.sort((a, b) => width[b]! - width[a]! || a - b);
      tree.firstChild[i] = end;
      tree.children[i] = mine.length;
      let x = tree.x[i]!;
      for (const child of mine) {
        order[end] = child;
        tree.parent[end] = i;
        tree.depth[end] = tree.depth[i]! + 1;
        tree.x[end] = x;
        x += width[child]!;
        end += 1;
      }
    }
    tree.levels.push(n);
    return tree;
  }

  addHeld(trie: Trie, held: Held, side: 0 | 1): void {
    if (this.shape.inverted) {
      for (let i = 0; i < held.node.length; i++) {
        let at = 0;
        for (let up = held.node[i]!; up !== 0; up = trie.parent[up]!)
          at = this.byFrame(at, trie.frame[up]!);
        this.add(at, side, held.bytes[i]!, held.objects[i]!);
      }
      return;
    }
    // root first: every node of the trie is looked up once, however many stacks go through it
    const used = new Uint8Array(trie.parent.length);
    for (const node of held.node)
      for (let up = node; up !== 0 && !used[up]; up = trie.parent[up]!) used[up] = 1;
    const place = new Uint32Array(trie.parent.length);
    for (let node = 1; node < place.length; node++)
      if (used[node]) place[node] = this.byFrame(place[trie.parent[node]!]!, trie.frame[node]!);
    for (let i = 0; i < held.node.length; i++)
      this.add(place[held.node[i]!]!, side, held.bytes[i]!, held.objects[i]!);
  }

  /** Walks a stack root first below some node. */
  addStack(trie: Trie, from: number, node: number, bytes: number): void {
    const path: number[] = [];
    for (let up = node; up !== 0; up = trie.parent[up]!) path.push(trie.frame[up]!);
    if (!this.shape.inverted) path.reverse();
    let at = from;
    for (const frame of path) at = this.byFrame(at, frame);
    this.add(at, 0, bytes, 1);
  }
}

/** What a node is called. */
export function nameOf(page: Page, tree: Tree, node: number): string {
  return node === 0 ? tree.root : page.strings[tree.name[node]!]!;
}

export function makeTree(page: Page, held: Held, shape: Shape, root: string): Tree {
  const maker = new Maker(page, shape, root);
  maker.addHeld(page.trie, held, 0);
  return maker.finish(false);
}

export function makeDifference(
  page: Page,
  before: Held,
  after: Held,
  shape: Shape,
  widths: "max" | "after",
  root: string,
): Tree {
  const maker = new Maker(page, shape, root);
  maker.addHeld(page.trie, before, 1);
  maker.addHeld(page.trie, after, 0);
  return maker.finish(true, widths);
}

/** A tower of its own for each root; a block without a stack has a name instead. */
export function makeRooted(
  page: Page,
  shape: Shape,
  root: string,
  blocks: Iterable<Rooted>,
): Tree {
  const maker = new Maker(page, shape, root);
  for (const block of blocks) {
    const tower = maker.byName(0, block.root);
    if (block.node) maker.addStack(page.trie, tower, block.node, block.bytes);
    else maker.add(maker.byName(tower, block.name), 0, block.bytes, 1);
  }
  return maker.finish(false);
}

/** From the root to a node, both included. */
export function pathTo(tree: Tree, node: number): number[] {
  const path: number[] = [];
  for (let at = node; at >= 0; at = tree.parent[at]!) path.push(at);
  return path.reverse();
}
