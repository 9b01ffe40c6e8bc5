// What the file holds, read back from the form that page/payload.py writes:
// base64 of gzip of [length of the header, uint32][header, JSON][columns, each on 8 bytes].

import { printable } from "./format";

export type Kind = "live" | "peak" | "allocated" | "pinned" | "segment";
export type View = "flamegraph" | "timeline" | "segments" | "difference";

export interface Source {
  name: string;
  warnings: string[];
  devices: number[];
}

/** Bytes by stack; `node` are nodes of the trie. */
export interface Profile {
  source: number;
  device: number;
  kind: Kind;
  unit: string;
  comments: string[];
  totalBytes: number;
  node: Uint32Array;
  objects: Float64Array;
  bytes: Float64Array;
}

export interface Mark {
  moment: number;
  action: string;
  text: string;
}

export interface Span {
  name: string;
  fromUs: number;
  toUs: number;
  lane: number;
}

/** One entry per allocation; alive while born <= moment < died. */
export interface Allocations {
  node: Uint32Array;
  bytes: Float64Array;
  born: Uint32Array;
  died: Uint32Array;
  /** Bytes of allocations that were left out: they are what is missing from `allocated`. */
  leftOut: number;
}

/** Profiles of all readings, one behind the other; reading i ends where i + 1 begins. */
export interface Readings {
  start: Uint32Array;
  node: Uint32Array;
  objects: Float64Array;
  bytes: Float64Array;
}

export interface Timeline {
  source: number;
  device: number;
  what: "events" | "readings";
  unit: string;
  /** Number of the moment that each entry below is about. */
  moment: Uint32Array;
  /** Microseconds since 1970, null where not all are known. */
  time: Float64Array | null;
  allocated: Float64Array;
  reserved: Float64Array;
  /** Index of the entry with the most allocated. */
  peak: number;
  marks: Mark[];
  spans: Span[];
  allocations: Allocations | null;
  readings: Readings | null;
}

export interface SegmentTable {
  source: number;
  device: number;
  totals: Record<string, number>;
  pools: string[];
  address: BigUint64Array;
  bytes: Float64Array;
  stream: Float64Array;
  kind: Uint32Array;
  pool: Uint32Array;
  expandable: Uint8Array;
  node: Uint32Array;
  /** Index of the first block of each segment, and one more. */
  first: Uint32Array;
  block: {
    address: BigUint64Array;
    bytes: Float64Array;
    requested: Float64Array;
    /** 0 allocated, 1 pending free, 2 inactive. */
    state: Uint8Array;
    node: Uint32Array;
  };
}

/** All stacks, root first: node 0 is the root, the parent of a node comes before it. */
export interface Trie {
  parent: Uint32Array;
  frame: Uint32Array;
}

export interface Page {
  title: string;
  view: View;
  kind: Kind;
  device: number | null;
  madeBy: string;
  sources: Source[];
  strings: string[];
  frames: { name: Uint32Array; file: Uint32Array; line: Float64Array };
  trie: Trie;
  profiles: Profile[];
  timelines: Timeline[];
  segments: SegmentTable[];
}

type Column = Uint8Array | Uint32Array | Float64Array | BigUint64Array;
type Json = any; // the header is ours, and every column in it is looked up by its number

const FORM = 1;

async function gunzip(data: Uint8Array<ArrayBuffer>): Promise<ArrayBuffer> {
  const stream = new Blob([data]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

function fromBase64(text: string): Uint8Array<ArrayBuffer> {
  const binary = atob(text);
  const data = new Uint8Array(binary.length);
  for (let i = 0; i < data.length; i++) data[i] = binary.charCodeAt(i);
  return data;
}

function column(data: ArrayBuffer, from: number, form: Json): Column {
  const [type, delta, offset, length] = form as [string, number, number, number];
  const start = from + offset;
  if (type === "u8") return new Uint8Array(data, start, length);
  if (type === "u64") return new BigUint64Array(data, start, length);
  const values =
    type === "u32" ? new Uint32Array(data, start, length) : new Float64Array(data, start, length);
  if (delta) for (let i = 1; i < length; i++) values[i]! += values[i - 1]!;
  return values;
}

/** Reads the text inside the page's payload element. */
export async function decode(base64: string): Promise<Page> {
  const data = await gunzip(fromBase64(base64.trim()));
  const length = new DataView(data).getUint32(0, true);
  const header: Json = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length)));
  if (header.form !== FORM) throw new Error(`form ${header.form} of the data is not ${FORM}`);
  const from = Math.ceil((4 + length) / 8) * 8;
  const columns: Column[] = header.columns.map((form: Json) => column(data, from, form));
  const at = <T extends Column>(index: number): T => columns[index] as T;
  const strings: string[] = header.strings.map(printable);

  const allocations = (form: Json): Allocations => {
    const born = at<Uint32Array>(form.born);
    const died = at<Uint32Array>(form.life);
    for (let i = 0; i < died.length; i++) died[i]! += born[i]!;
    return {
      node: at(form.node),
      bytes: at(form.bytes),
      born,
      died,
      leftOut: form.left_out,
    };
  };
  const timeline = (form: Json): Timeline => {
    const allocated = at<Float64Array>(form.allocated);
    const every = () => Uint32Array.from(allocated, (_, i) => i);
    return {
      source: form.source,
      device: form.device,
      what: form.what,
      unit: form.unit,
      moment: form.moment === null ? every() : at(form.moment),
      time: form.time === null ? null : at(form.time),
      allocated,
      reserved: at(form.reserved),
      peak: form.peak,
      marks: form.marks.map((mark: Json) => ({ ...mark, text: printable(mark.text) })),
      spans: form.spans.map((span: Json) => ({
        name: printable(span.name),
        fromUs: span.from_us ?? -Infinity,
        toUs: span.to_us ?? Infinity,
        lane: span.lane,
      })),
      allocations: form.allocations === null ? null : allocations(form.allocations),
      readings:
        form.readings === null
          ? null
          : {
              start: at(form.readings.start),
              node: at(form.readings.node),
              objects: at(form.readings.objects),
              bytes: at(form.readings.bytes),
            },
    };
  };

  return {
    title: printable(header.title),
    view: header.view,
    kind: header.kind,
    device: header.device,
    madeBy: header.made_by,
    sources: header.sources.map((source: Json) => ({
      name: printable(source.name),
      warnings: source.warnings.map(printable),
      devices: source.devices,
    })),
    strings,
    frames: {
      name: at(header.frames.name),
      file: at(header.frames.file),
      line: at(header.frames.line),
    },
    trie: { parent: at(header.trie.parent), frame: at(header.trie.frame) },
    profiles: header.profiles.map((form: Json) => ({
      source: form.source,
      device: form.device,
      kind: form.kind,
      unit: form.unit,
      comments: form.comments.map(printable),
      totalBytes: form.total_bytes,
      node: at(form.node),
      objects: at(form.objects),
      bytes: at(form.bytes),
    })),
    timelines: header.timelines.map(timeline),
    segments: header.segments.map((form: Json) => ({
      source: form.source,
      device: form.device,
      totals: form.totals,
      pools: form.pools,
      address: at(form.address),
      bytes: at(form.bytes),
      stream: at(form.stream),
      kind: at(form.kind),
      pool: at(form.pool),
      expandable: at(form.expandable),
      node: at(form.node),
      first: at(form.first),
      block: {
        address: at(form.block.address),
        bytes: at(form.block.bytes),
        requested: at(form.block.requested),
        state: at(form.block.state),
        node: at(form.block.node),
      },
    })),
  };
}
