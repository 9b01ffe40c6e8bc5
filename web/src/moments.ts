// What was alive at a moment, and few points out of a million for a line of a thousand pixels.

import type { Span, Timeline } from "./data";
import type { Held } from "./tree";

/** Bytes by stack at entry `index` of a timeline; `otherNode` takes what was left out of the file. */
export function heldAt(timeline: Timeline, index: number, nodes: number, otherNode: number): Held {
  const { readings, allocations } = timeline;
  if (readings) {
    const from = readings.start[index]!;
    const to = readings.start[index + 1]!;
    return {
      node: readings.node.subarray(from, to),
      objects: readings.objects.subarray(from, to),
      bytes: readings.bytes.subarray(from, to),
    };
  }
  const bytes = new Float64Array(nodes);
  const objects = new Float64Array(nodes);
  let sum = 0;
  if (allocations) {
    const moment = timeline.moment[index]!;
    const { born, died, node, bytes: sizes } = allocations;
    for (let i = 0; i < born.length; i++) {
      if (born[i]! > moment || died[i]! <= moment) continue;
      bytes[node[i]!]! += sizes[i]!;
      objects[node[i]!]! += 1;
      sum += sizes[i]!;
    }
  }
  const left = timeline.allocated[index]! - sum;
  if (left > 0) bytes[otherNode]! += left;
  const found: number[] = [];
  for (let i = 0; i < nodes; i++) if (bytes[i] || objects[i]) found.push(i);
  return {
    node: Uint32Array.from(found),
    objects: Float64Array.from(found, (i) => objects[i]!),
    bytes: Float64Array.from(found, (i) => bytes[i]!),
  };
}

/** First index whose value is larger than wanted; values ascend. */
export function upper(values: ArrayLike<number>, wanted: number): number {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle]! <= wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Entries from..to (not included) thinned to those that a plot of so many columns needs: of each
 * column the first, the last, and the lowest and highest of both lines. The entries at both ends
 * and all extremes stay. */
export function thinned(
  x: ArrayLike<number>,
  lines: ArrayLike<number>[],
  from: number,
  to: number,
  columns: number,
): number[] {
  if (to - from <= 4 * columns) return Array.from({ length: Math.max(0, to - from) }, (_, i) => from + i);
  const kept: number[] = [];
  const begin = x[from]!;
  const scale = columns / (x[to - 1]! - begin || 1);
  let start = from;
  while (start < to) {
    const bucket = Math.min(columns - 1, Math.floor((x[start]! - begin) * scale));
    const chosen = new Set([start]);
    const extremes = lines.map(() => [start, start] as [number, number]);
    let at = start;
    for (; at < to; at++) {
      if (Math.min(columns - 1, Math.floor((x[at]! - begin) * scale)) !== bucket) break;
      for (let l = 0; l < lines.length; l++) {
        const line = lines[l]!;
        const best = extremes[l]!;
        if (line[at]! < line[best[0]]!) best[0] = at;
        if (line[at]! > line[best[1]]!) best[1] = at;
      }
    }
    chosen.add(at - 1);
    for (const [low, high] of extremes) chosen.add(low).add(high);
    kept.push(...[...chosen].sort((a, b) => a - b));
    start = at;
  }
  return kept;
}

const MOST_LANES = 10;

/** Rows that annotated ranges need above the lines; those further in are not drawn. */
export function lanesOf(spans: Span[]): number {
  return Math.min(MOST_LANES, spans.reduce((most, span) => Math.max(most, span.lane + 1), 0));
}

/** Places on the x axis: number of the moment, or seconds since the first one. Clocks can step
 * back; a line cannot, so a time never is less than the one before. */
export function places(timeline: Timeline, by: "time" | "index"): Float64Array {
  if (by === "index" || !timeline.time) return Float64Array.from(timeline.moment);
  const { time } = timeline;
  const begin = time[0] ?? 0;
  const found = new Float64Array(time.length);
  let last = 0;
  for (let i = 0; i < time.length; i++) found[i] = last = Math.max(last, (time[i]! - begin) / 1e6);
  return found;
}
