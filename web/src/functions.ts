// A flame graph summed up by function.

import type { Tree } from "./tree";

export interface FunctionRow {
  name: number;
  self: number;
  /** Its own and what it called; a function that calls itself counts once. */
  total: number;
  objects: number;
  beforeSelf: number;
  beforeTotal: number;
}

/** Sums by function. Self is what the stack ends in, so of an inverted tree the first level. */
export function functions(tree: Tree, inverted: boolean): FunctionRow[] {
  const rows = new Map<number, FunctionRow>();
  const row = (name: number): FunctionRow => {
    let found = rows.get(name);
    if (!found) {
      found = { name, self: 0, total: 0, objects: 0, beforeSelf: 0, beforeTotal: 0 };
      rows.set(name, found);
    }
    return found;
  };
  // depth first, with the names above: a stack of its own, since depths reach 500
  const above = new Map<number, number>();
  const open: number[] = [];
  const leave = (depth: number) => {
    while (open.length > depth) {
      const name = tree.name[open.pop()!]!;
      above.set(name, above.get(name)! - 1);
    }
  };
  const todo: number[] = [];
  const push = (node: number) => {
    for (let i = tree.children[node]! - 1; i >= 0; i--) todo.push(tree.firstChild[node]! + i);
  };
  push(0);
  while (todo.length) {
    const node = todo.pop()!;
    leave(tree.depth[node]! - 1);
    const name = tree.name[node]!;
    const found = row(name);
    const seen = above.get(name) ?? 0;
    const first = tree.depth[node] === 1;
    const before = tree.before?.[node] ?? 0;
    if (!seen) {
      found.total += tree.total[node]!;
      found.beforeTotal += before;
    }
    if (inverted ? first : true) {
      let own = inverted ? tree.total[node]! : tree.self[node]!;
      let ownBefore = before;
      let ownObjects = tree.objects[node]!;
      if (!inverted)
        for (let i = 0; i < tree.children[node]!; i++) {
          const child = tree.firstChild[node]! + i;
          ownBefore -= tree.before?.[child] ?? 0;
          ownObjects -= tree.objects[child]!;
        }
      found.self += own;
      found.beforeSelf += ownBefore;
      found.objects += ownObjects;
    }
    above.set(name, seen + 1);
    open.push(node);
    push(node);
  }
  return [...rows.values()];
}
