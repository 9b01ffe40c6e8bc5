import assert from "node:assert/strict";
import { test } from "node:test";

import { KEYS } from "../src/keys";
import type { Actions } from "../src/state";

/** What a key asks for, in a state. */
function asks(key: string, state: object): unknown[] {
  const asked: unknown[] = [];
  const on = new Proxy({ state, devices: [0, 3] } as unknown as Actions, {
    get: (given, name) =>
      Reflect.get(given, name) ?? ((...values: unknown[]) => asked.push(name, ...values)),
  });
  KEYS.find((one) => one.keys.includes(key))!.act!(on, key);
  return asked;
}

test("no key means two things, and all are told", () => {
  const all = KEYS.flatMap((one) => one.keys);
  assert.equal(new Set(all).size, all.length);
  assert.ok(KEYS.every((one) => one.what !== ""));
});

test("a key asks for what its line says", () => {
  const cases: [string, object, unknown[]][] = [
    ["3", {}, ["setView", "segments"]],
    ["s", {}, ["setKind", "segment"]],
    ["i", { inverted: true }, ["setInverted", false]],
    ["c", { colorBy: "root" }, ["setColor", "package"]],
    ["w", { widths: "max" }, ["setWidths", "after"]],
    ["d", { device: 3 }, ["setDevice", 0]],
    ["t", { theme: "light" }, ["setTheme", "dark"]],
    ["+", {}, ["zoomTime", 0.5]],
    ["0", {}, ["zoomTime", null]],
    ["Escape", { text: "adam" }, ["search", "", false]],
    ["Escape", { text: "" }, ["reset"]],
  ];
  for (const [key, state, expected] of cases) assert.deepEqual(asks(key, state), expected, key);
});
