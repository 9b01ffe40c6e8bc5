// What the keys do: one table for the page and for its help.

import type { Kind, View } from "./data";
import { type Actions, COLORS, other } from "./state";

export interface Key {
  /** As `KeyboardEvent.key` has them where there is an action, else as people call them. */
  keys: readonly string[];
  what: string;
  /** What people call the key, where that is something else. */
  shown?: string;
  /** Also while a field has the focus, which it then leaves. */
  typing?: boolean;
  /** Without one the key belongs to the part of the page that has the focus. */
  act?: (on: Actions, key: string) => void;
}

const VIEWS: Record<string, View> = {
  "1": "flamegraph",
  "2": "timeline",
  "3": "segments",
  "4": "difference",
};
const KINDS: Record<string, Kind> = { l: "live", p: "peak", a: "allocated", s: "segment" };

function next<T>(all: readonly T[], now: T): T {
  return all[(all.indexOf(now) + 1) % all.length]!;
}

export const KEYS: readonly Key[] = [
  {
    keys: Object.keys(VIEWS),
    what: "flame graph, timeline, segments, difference",
    act: (on, key) => on.setView(VIEWS[key]!),
  },
  {
    keys: Object.keys(KINDS),
    what: "live, peak, allocated, by segment",
    act: (on, key) => on.setKind(KINDS[key]!),
  },
  {
    keys: ["/"],
    what: "search: text anywhere in a name or file, or /an expression/",
    act: (on) => on.focusSearch(),
  },
  {
    keys: ["Escape"],
    shown: "Esc",
    what: "leave the search, else show everything again",
    typing: true,
    act: (on) => (on.state.text ? on.search("", false) : on.reset()),
  },
  {
    keys: ["i"],
    what: "invert: what allocated first, below it what called that",
    act: (on) => on.setInverted(!on.state.inverted),
  },
  {
    keys: ["f"],
    what: "root at the bottom, or at the top",
    act: (on) => on.setFlipped(!on.state.flipped),
  },
  {
    keys: ["n"],
    what: "lines of a function apart, or together",
    act: (on) => on.setLines(!on.state.lines),
  },
  {
    keys: ["c"],
    what: "colour by package, origin or root frame",
    act: (on) => on.setColor(next(COLORS, on.state.colorBy)),
  },
  {
    keys: ["w"],
    what: "widths of a difference: the larger of both, or after",
    act: (on) => on.setWidths(on.state.widths === "max" ? "after" : "max"),
  },
  {
    keys: ["d"],
    what: "next device",
    act: (on) => on.setDevice(next(on.devices, on.state.device)),
  },
  {
    keys: ["t"],
    what: "dark or light",
    act: (on) => on.setTheme(other(on.state.theme)),
  },
  {
    keys: ["arrows"],
    what:
      "in a flame graph: choose a frame; in a timeline: a moment (with Shift: further); " +
      "in the map: a segment or block",
  },
  { keys: ["Enter", "Backspace"], what: "zoom to the chosen frame, one frame back" },
  {
    keys: ["+", "-", "0"],
    what: "zoom the timeline, show all of it",
    act: (on, key) => on.zoomTime(key === "0" ? null : key === "+" ? 0.5 : 2),
  },
  { keys: ["wheel"], what: "timeline: zoom; flame graph: with Ctrl zoom, with Shift move" },
  { keys: ["?"], what: "this list", act: (on) => on.showHelp() },
];

/** Listens to the keys of the whole page, unless it is `busy` with a dialog. */
export function listen(on: Actions, busy: () => boolean): void {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || busy()) return;
    const { target } = event;
    const typing = target instanceof HTMLInputElement || target instanceof HTMLSelectElement;
    const key = KEYS.find((one) => one.act && one.keys.includes(event.key));
    if (!key || (typing && !key.typing)) return;
    event.preventDefault();
    key.act!(on, event.key);
    if (typing) target.blur();
  });
}
