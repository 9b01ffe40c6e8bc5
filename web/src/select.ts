// Which of the data a view shows, decided from the page alone.

import type { Kind, Page, Profile, SegmentTable, Timeline, View } from "./data";

export interface Asked {
  view: View;
  kind: Kind;
  device: number;
}

/** In the order in which they are offered. */
export const KINDS: readonly Kind[] = ["live", "peak", "allocated", "pinned", "segment"];

/** One device in both files; null: that file does not have it. */
export interface Pair {
  before: number | null;
  after: number | null;
}

export interface Difference {
  pair: Pair;
  before: Profile | null;
  after: Profile | null;
  /** Why the two are not to be compared, else empty. */
  problem: string;
}

const last = (page: Page): number => page.sources.length - 1;

/** Of all files, in order. */
export function devicesOf(page: Page): number[] {
  const found = new Set<number>();
  for (const source of page.sources) for (const device of source.devices) found.add(device);
  return [...found].sort((a, b) => a - b);
}

/** The device with the most memory of any kind, where the page does not name one. */
export function firstDevice(page: Page): number {
  if (page.device !== null) return page.device;
  const devices = devicesOf(page);
  const total = (device: number) =>
    page.profiles
      .filter((p) => p.device === device && p.source === last(page))
      .reduce((most, p) => Math.max(most, p.totalBytes), 0);
  return devices.reduce((best, d) => (total(d) > total(best) ? d : best), devices[0] ?? 0);
}

/** By number, as `gpumem-otel compare` does; but two ranks of a job have a device each, and these
 * are what is to be compared, whatever their numbers. */
export function pairOf(before: readonly number[], after: readonly number[], device: number): Pair {
  if (before.length === 1 && after.length === 1) return { before: before[0]!, after: after[0]! };
  return {
    before: before.includes(device) ? device : null,
    after: after.includes(device) ? device : null,
  };
}

/** The profile of the file that is shown, or of the later one of two. */
export function profileOf(page: Page, kind: Kind, device: number): Profile | null {
  return found(page, last(page), kind, device);
}

export function segmentsOf(page: Page, device: number): SegmentTable | null {
  return page.segments.find((s) => s.source === last(page) && s.device === device) ?? null;
}

export function timelineOf(page: Page, device: number): Timeline | null {
  return page.timelines.find((t) => t.source === last(page) && t.device === device) ?? null;
}

/** Both sides of a difference. A device that is in one file only is all new or all gone. */
export function differenceOf(page: Page, kind: Kind, device: number): Difference {
  const [first, second] = [page.sources[0]!, page.sources[last(page)]!];
  const pair = pairOf(first.devices, second.devices, device);
  const before = found(page, 0, kind, pair.before);
  const after = found(page, last(page), kind, pair.after);
  let problem = "";
  if (kind === "segment") problem = "segments of two files cannot be matched";
  else if (!before && !after) problem = `no ${kind} profile in either file`;
  // what was not recorded is not known: it is no 0 bytes
  else if (!before && pair.before !== null) problem = `no ${kind} profile in ${first.name}`;
  else if (!after && pair.after !== null) problem = `no ${kind} profile in ${second.name}`;
  else if (before && after && before.unit !== after.unit)
    problem = `${first.name} has ${before.unit}, ${second.name} ${after.unit}`;
  return { pair, before, after, problem };
}

/** Whether there is something to show for a kind, or two sides to say something about. */
export function has(page: Page, { view, kind, device }: Asked): boolean {
  if (view === "difference") {
    const { before, after, problem } = differenceOf(page, kind, device);
    return problem === "" || (before !== null && after !== null);
  }
  return (kind === "segment" ? segmentsOf(page, device) : profileOf(page, kind, device)) !== null;
}

/** Why a kind is not offered. */
export function whyNot(page: Page, { view, kind, device }: Asked): string {
  if (view === "difference") return differenceOf(page, kind, device).problem;
  return nothingOf(kind);
}

/** The kind that is asked for, or the first that is there. */
export function kindShown(page: Page, asked: Asked): Kind {
  if (has(page, asked)) return asked.kind;
  return KINDS.find((kind) => has(page, { ...asked, kind })) ?? asked.kind;
}

/** What to say instead of a view for which there is nothing to show, else empty. */
export function missing(page: Page, asked: Asked): string {
  const { view, kind, device } = asked;
  const where = page.sources[last(page)]!.name;
  const on = device < 0 ? "" : ` of device ${device}`;
  if (view === "timeline" && !timelineOf(page, device))
    return (
      `${where} holds no trace${on}: record history with ` +
      "torch.cuda.memory._record_memory_history(max_entries=100_000) to see memory over time."
    );
  if (view === "segments" && !segmentsOf(page, device)) return `${where} holds no segments${on}.`;
  if (view === "flamegraph" && !has(page, asked)) return `${where} holds no memory${on}.`;
  if (view === "difference") {
    const { problem } = differenceOf(page, kind, device);
    if (problem) return `The ${kind} memory${on} cannot be compared: ${problem}.`;
  }
  return "";
}

function found(page: Page, source: number, kind: Kind, device: number | null): Profile | null {
  return (
    page.profiles.find((p) => p.source === source && p.kind === kind && p.device === device) ?? null
  );
}

function nothingOf(kind: Kind): string {
  if (kind === "segment") return "no segments in this file";
  if (kind === "live" || kind === "pinned") return `no ${kind} profile in this file`;
  return "no allocation events of this device in this file";
}
