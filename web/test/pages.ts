// Small pages, made by hand.

import type { Page, Profile, SegmentTable, Timeline } from "../src/data";
import type { Held } from "../src/tree";

/** A page that knows these frames ("name" or "name:line"), and stacks of them, root first. */
export function pageOf(stacks: string[][]): { page: Page; nodes: number[] } {
  const strings: string[] = [""];
  const string = (text: string) => {
    if (!strings.includes(text)) strings.push(text);
    return strings.indexOf(text);
  };
  const frames: { name: number; line: number }[] = [];
  const parent = [0];
  const frame = [0];
  const node = (above: number, text: string): number => {
    const [name, line] = text.split("@") as [string, string | undefined];
    const wanted = { name: string(name), line: Number(line ?? 0) };
    let index = frames.findIndex((f) => f.name === wanted.name && f.line === wanted.line);
    if (index < 0) index = frames.push(wanted) - 1;
    for (let i = 1; i < parent.length; i++) if (parent[i] === above && frame[i] === index) return i;
    parent.push(above);
    frame.push(index);
    return parent.length - 1;
  };
  const nodes = [["[other]"], ...stacks].map((stack) => stack.reduce(node, 0)).slice(1);
  const page: Page = {
    title: "", view: "flamegraph", kind: "live", device: null, madeBy: "",
    sources: [{ name: "a", warnings: [], devices: [0] }],
    strings,
    frames: {
      name: Uint32Array.from(frames, (f) => f.name),
      file: new Uint32Array(frames.length),
      line: Float64Array.from(frames, (f) => f.line),
    },
    trie: { parent: Uint32Array.from(parent), frame: Uint32Array.from(frame) },
    profiles: [], timelines: [], segments: [],
  };
  return { page, nodes };
}

export function held(nodes: number[], bytes: number[], objects = bytes.map(() => 1)): Held {
  return {
    node: Uint32Array.from(nodes),
    bytes: Float64Array.from(bytes),
    objects: Float64Array.from(objects),
  };
}

export function timelineOf(part: Partial<Timeline>): Timeline {
  const allocated = part.allocated ?? new Float64Array(4);
  return {
    source: 0, device: 0, what: "events", unit: "requested bytes",
    moment: Uint32Array.from(allocated, (_, i) => i),
    time: null, allocated, reserved: allocated, peak: 0, marks: [], spans: [],
    allocations: null, readings: null,
    ...part,
  };
}

export function profileOf(part: Partial<Profile>): Profile {
  return {
    source: 0, device: 0, kind: "live", unit: "bytes", comments: [], totalBytes: 0,
    node: new Uint32Array(), objects: new Float64Array(), bytes: new Float64Array(),
    ...part,
  };
}

/** Segments of 10 bytes with an allocated block of 6 each, whose stack is this node. */
export function segmentsOf(page: Page, number: number, node: number): SegmentTable {
  const each = <T>(value: (index: number) => T) =>
    Array.from({ length: number }, (_, i) => value(i));
  const address = BigUint64Array.from(each((i) => BigInt(i) * 10n));
  const kind = page.strings.push("large") - 1;
  const zeros = () => new Uint32Array(number);
  return {
    source: 0, device: 0, totals: {}, pools: ["default pool"], address,
    bytes: Float64Array.from(each(() => 10)),
    stream: new Float64Array(number),
    kind: Uint32Array.from(each(() => kind)),
    pool: zeros(),
    expandable: new Uint8Array(number),
    node: zeros(),
    first: Uint32Array.from({ length: number + 1 }, (_, i) => i),
    block: {
      address,
      bytes: Float64Array.from(each(() => 6)),
      requested: Float64Array.from(each(() => 5)),
      state: new Uint8Array(number),
      node: Uint32Array.from(each(() => node)),
    },
  };
}
