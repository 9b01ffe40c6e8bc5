import assert from "node:assert/strict";
import { test } from "node:test";

import type { Kind, Page, Profile } from "../src/data";
import {
  devicesOf,
  differenceOf,
  firstDevice,
  has,
  kindShown,
  missing,
  pairOf,
  whyNot,
} from "../src/select";
import { pageOf, profileOf, segmentsOf } from "./pages";

/** A page of two files; profiles as [device, kind, bytes, unit]. */
type Given = [number, Kind, number, string?];

function twoFiles(before: Given[], after: Given[]): Page {
  const { page } = pageOf([]);
  const source = (name: string, given: Given[]) => ({
    name,
    warnings: [],
    devices: [...new Set(given.map(([device]) => device))],
  });
  page.sources = [source("one", before), source("two", after)];
  page.view = "difference";
  page.profiles = [before, after].flatMap((given, index) =>
    given.map(([device, kind, totalBytes, unit = "bytes"]) =>
      profileOf({ source: index, device, kind, totalBytes, unit }),
    ),
  );
  return page;
}

const sizes = (page: Page, kind: Kind, device: number): (number | null)[] => {
  const { before, after, problem } = differenceOf(page, kind, device);
  assert.equal(problem, "");
  return [before, after].map((side: Profile | null) => side?.totalBytes ?? null);
};

test("devices are paired by number", () => {
  assert.deepEqual(pairOf([0, 1], [0, 1], 1), { before: 1, after: 1 });
  assert.deepEqual(pairOf([0], [0, 1], 0), { before: 0, after: 0 });
  assert.deepEqual(pairOf([0], [0, 1], 1), { before: null, after: 1 });
  assert.deepEqual(pairOf([0, 1], [0], 1), { before: 1, after: null });
  assert.deepEqual(pairOf([], [1], 1), { before: null, after: 1 });
});

test("two ranks with one device each are a pair, whichever of the two is chosen", () => {
  for (const device of [0, 1])
    assert.deepEqual(pairOf([0], [1], device), { before: 0, after: 1 });
});

test("a device that only one file has is all new or all gone", () => {
  const grown = twoFiles([[0, "live", 7]], [[0, "live", 8], [1, "live", 9]]);
  assert.deepEqual(sizes(grown, "live", 0), [7, 8]);
  assert.deepEqual(sizes(grown, "live", 1), [null, 9]);
  const shrunk = twoFiles([[0, "live", 7], [1, "live", 6]], [[0, "live", 8]]);
  assert.deepEqual(sizes(shrunk, "live", 1), [6, null]);
  assert.deepEqual(sizes(twoFiles([[0, "live", 7]], [[1, "live", 8]]), "live", 1), [7, 8]);
});

test("what one file did not record is not compared", () => {
  const page = twoFiles([[0, "live", 7]], [[0, "live", 8], [0, "peak", 20]]);
  const asked = { view: "difference", kind: "peak", device: 0 } as const;
  assert.equal(has(page, asked), false);
  assert.equal(whyNot(page, asked), "no peak profile in one");
  assert.equal(kindShown(page, asked), "live");
  assert.equal(has(page, { ...asked, view: "flamegraph" }), true);
  const apart = twoFiles([[0, "live", 7]], [[0, "peak", 8]]);
  assert.equal(kindShown(apart, asked), "peak");
  assert.equal(
    missing(apart, asked),
    "The peak memory of device 0 cannot be compared: no peak profile in one.",
  );
});

test("different units are said, and not compared", () => {
  const page = twoFiles(
    [[0, "live", 7, "rounded"], [0, "peak", 1]],
    [[0, "live", 8, "requested"], [0, "peak", 2]],
  );
  const asked = { view: "difference", kind: "live", device: 0 } as const;
  assert.equal(kindShown(page, asked), "live");
  assert.equal(
    missing(page, asked),
    "The live memory of device 0 cannot be compared: one has rounded, two requested.",
  );
  assert.equal(missing(page, { ...asked, kind: "peak" }), "");
  assert.equal(missing(page, { ...asked, view: "flamegraph" }), "");
});

test("segments are of one file", () => {
  const page = twoFiles([[0, "live", 7]], [[0, "live", 8]]);
  page.segments = [{ ...segmentsOf(page, 1, 0), source: 1 }];
  assert.equal(has(page, { view: "flamegraph", kind: "segment", device: 0 }), true);
  assert.equal(has(page, { view: "difference", kind: "segment", device: 0 }), false);
  const asked = { view: "difference", kind: "segment", device: 0 } as const;
  assert.match(whyNot(page, asked), /cannot be matched/);
});

test("the page opens with the device that holds most, of the file that is shown", () => {
  const page = twoFiles([[0, "live", 99], [3, "live", 1]], [[1, "live", 5], [2, "peak", 6]]);
  assert.deepEqual(devicesOf(page), [0, 1, 2, 3]);
  assert.equal(firstDevice(page), 2);
  page.device = 0;
  assert.equal(firstDevice(page), 0);
});

test("a view without data says what is missing", () => {
  const page = twoFiles([], [[0, "live", 5]]);
  const asked = { view: "timeline", kind: "live", device: 0 } as const;
  assert.match(missing(page, asked), /^two holds no trace of device 0: record history/);
  assert.equal(missing(page, { ...asked, view: "segments" }), "two holds no segments of device 0.");
  assert.equal(
    missing(page, { ...asked, view: "flamegraph", device: 4 }),
    "two holds no memory of device 4.",
  );
});
