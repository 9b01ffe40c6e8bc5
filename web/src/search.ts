// Which nodes of a flame graph match a text, and what they hold.

import type { Page } from "./data";
import type { Tree } from "./tree";

export interface Match {
  /** Of each node: 1 where it matches. */
  hit: Uint8Array;
  matches: number;
  /** Of stacks that go through a match; each counted once. */
  bytes: number;
  beforeBytes: number;
}

/** Nodes whose name or file matches. Text is found anywhere, in any case; /.../ is an expression. */
export function search(page: Page, tree: Tree, text: string, exact = false): Match {
  const found: Match = { hit: new Uint8Array(tree.size), matches: 0, bytes: 0, beforeBytes: 0 };
  const test = matcher(text, exact);
  if (!test) return found;
  const known = new Map<number, boolean>();
  const looked = (index: number): boolean => {
    let answer = known.get(index);
    if (answer === undefined) known.set(index, (answer = test(page.strings[index]!)));
    return answer;
  };
  const inside = new Uint8Array(tree.size);
  for (let i = 1; i < tree.size; i++) {
    const up = tree.parent[i]!;
    const frame = tree.frame[i]!;
    const hit =
      looked(tree.name[i]!) || (!exact && frame >= 0 && looked(page.frames.file[frame]!));
    if (hit) {
      found.hit[i] = 1;
      found.matches += 1;
    }
    inside[i] = inside[up]! | Number(hit);
    if (hit && !inside[up]) {
      found.bytes += tree.total[i]!;
      found.beforeBytes += tree.before?.[i] ?? 0;
    }
  }
  return found;
}

function matcher(text: string, exact: boolean): ((text: string) => boolean) | null {
  if (!text) return null;
  if (exact) return (given) => given === text;
  const expression = /^\/(.+)\/$/.exec(text);
  if (expression) {
    try {
      const pattern = new RegExp(expression[1]!, "i");
      return (given) => pattern.test(given);
    } catch {
      return null; // not finished yet
    }
  }
  const wanted = text.toLowerCase();
  return (given) => given.toLowerCase().includes(wanted);
}
