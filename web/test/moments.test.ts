import assert from "node:assert/strict";
import { test } from "node:test";

import { heldAt, lanesOf, places, thinned, upper } from "../src/moments";
import { timelineOf } from "./pages";

const allocations = {
  node: Uint32Array.of(2, 3, 2),
  bytes: Float64Array.of(100, 20, 7),
  born: Uint32Array.of(0, 1, 2),
  died: Uint32Array.of(3, 4, 4),
  leftOut: 0,
};

test("alive is what is born and has not died, by stack", () => {
  const timeline = timelineOf({ allocations, allocated: Float64Array.of(100, 120, 127, 27) });
  const at = (moment: number) => {
    const held = heldAt(timeline, moment, 5, 1);
    return [...held.node].map((node, i) => [node, held.bytes[i], held.objects[i]]);
  };
  assert.deepEqual(at(0), [[2, 100, 1]]);
  assert.deepEqual(at(2), [[2, 107, 2], [3, 20, 1]]);
  assert.deepEqual(at(3), [[2, 7, 1], [3, 20, 1]]);
});

test("what was left out of the file is in [other], so that every moment adds up", () => {
  const timeline = timelineOf({ allocations, allocated: Float64Array.of(150, 120, 127, 27) });
  const held = heldAt(timeline, 0, 5, 1);
  assert.deepEqual([...held.node], [1, 2]);
  assert.deepEqual([...held.bytes], [50, 100]);
});

test("a reading's profile is its own part of the columns", () => {
  const readings = {
    start: Uint32Array.of(0, 1, 3),
    node: Uint32Array.of(4, 4, 5),
    objects: Float64Array.of(1, 2, 3),
    bytes: Float64Array.of(10, 20, 30),
  };
  const timeline = timelineOf({ what: "readings", readings, allocated: Float64Array.of(10, 50) });
  assert.deepEqual([...heldAt(timeline, 1, 9, 1).bytes], [20, 30]);
});

test("thinning keeps ends and extremes of every line", () => {
  const n = 100_000;
  const x = Float64Array.from({ length: n }, (_, i) => i);
  const low = Float64Array.from({ length: n }, (_, i) => (i === 61_234 ? 0 : 5 + (i % 7)));
  const high = Float64Array.from({ length: n }, (_, i) => (i === 12_345 ? 1e9 : i % 11));
  const kept = thinned(x, [low, high], 0, n, 500);
  assert.ok(kept.length <= 6 * 500);
  assert.ok(kept.includes(61_234) && kept.includes(12_345));
  assert.deepEqual([kept[0], kept.at(-1)], [0, n - 1]);
  assert.deepEqual(kept, [...new Set(kept)].sort((a, b) => a - b));
  assert.deepEqual(thinned(x, [low], 10, 20, 500), [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]);
  assert.deepEqual(thinned(x, [low], 3, 3, 500), []);
});

test("many moments at one time are thinned too", () => {
  const x = new Float64Array(50_000);
  const line = Float64Array.from(x, (_, i) => (i === 777 ? -1 : 0));
  const kept = thinned(x, [line], 0, x.length, 100);
  assert.ok(kept.length < 10 && kept.includes(777));
});

test("a clock that steps back does not bend the line", () => {
  const timeline = timelineOf({ time: Float64Array.of(5e6, 6e6, 5.5e6, 7e6) });
  assert.deepEqual([...places(timeline, "time")], [0, 1, 1, 2]);
  assert.deepEqual([...places(timeline, "index")], [0, 1, 2, 3]);
  assert.deepEqual([...places(timelineOf({}), "time")], [0, 1, 2, 3]);
});

test("ranges have as many lanes as are in use, up to ten", () => {
  const spans = (...lanes: number[]) =>
    lanes.map((lane) => ({ name: "", fromUs: 0, toUs: 1, lane }));
  assert.deepEqual([[], [0], [0, 3, 1], [12, 0]].map((l) => lanesOf(spans(...l))), [0, 1, 4, 10]);
});

test("upper is the first that is larger", () => {
  assert.deepEqual([0, 1, 2, 3].map((v) => upper([1, 2, 2, 3], v)), [0, 1, 3, 4]);
});
