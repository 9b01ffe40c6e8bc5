// What is reserved as a flame graph: a tower for each segment, in it the stacks of its blocks.

import type { Page, SegmentTable } from "./data";
import { hex } from "./format";
import { STATES } from "./segments";
import { makeRooted, type Rooted, type Shape, type Tree } from "./tree";

/** Indexes of names that are in no file, but among the page's strings. */
interface Names {
  segments: Uint32Array;
  states: number[];
  rest: number;
}

export class BySegment {
  private readonly added = new Map<string, number>();
  private readonly known = new Map<SegmentTable, Names>();

  constructor(private readonly page: Page) {}

  tree(table: SegmentTable, shape: Shape): Tree {
    return makeRooted(this.page, shape, "all", blocks(table, this.names(table)));
  }

  private names(table: SegmentTable): Names {
    let names = this.known.get(table);
    if (!names) {
      const { strings } = this.page;
      const nameOf = (s: number) =>
        `segment ${hex(table.address[s]!)} ${strings[table.kind[s]!]}` +
        `${table.expandable[s] ? " expandable" : ""}, ${table.pools[table.pool[s]!]}, ` +
        `stream ${table.stream[s]}`;
      names = {
        segments: Uint32Array.from(table.bytes, (_, s) => this.add(nameOf(s))),
        states: STATES.map((state) => this.add(`[${state}]`)),
        rest: this.add("[no block]"),
      };
      this.known.set(table, names);
    }
    return names;
  }

  private add(text: string): number {
    let index = this.added.get(text);
    if (index === undefined)
      this.added.set(text, (index = this.page.strings.push(text) - 1));
    return index;
  }
}

function* blocks(table: SegmentTable, names: Names): Iterable<Rooted> {
  for (let s = 0; s < table.bytes.length; s++) {
    const root = names.segments[s]!;
    let filled = 0;
    for (let b = table.first[s]!; b < table.first[s + 1]!; b++) {
      const bytes = table.block.bytes[b]!;
      filled += bytes;
      const name = names.states[table.block.state[b]!]!;
      yield { root, node: table.block.node[b]!, name, bytes };
    }
    const bytes = table.bytes[s]! - filled;
    if (bytes > 0) yield { root, node: 0, name: names.rest, bytes };
  }
}
