// For tests: what is shown, in numbers, and where it is in the window.

import type { App } from "./app";
import type { FlamePanel } from "./panel";
import { segmentsOf, timelineOf } from "./select";
import { nameOf } from "./tree";

export class Probe {
  constructor(private readonly app: App) {}

  get panel(): FlamePanel | null {
    return this.app.panel;
  }

  setDevice(device: number): void {
    this.app.setDevice(device);
  }

  state() {
    const { app, panel } = this;
    const { page, state, time, blocks } = app;
    const { view, kind, device, theme, inverted, colorBy } = state;
    const tree = panel?.tree ?? null;
    return {
      view,
      kind,
      device,
      theme,
      inverted,
      colorBy,
      numbers: app.numbers.textContent,
      status: app.status.textContent,
      found: app.toolbar.told,
      nodes: tree?.size ?? 0,
      total: tree?.total[0] ?? null,
      objects: tree?.objects[0] ?? null,
      before: tree?.before?.[0] ?? null,
      zoom: tree && panel ? nameOf(page, tree, panel.flame.zoomedTo) : null,
      match: panel?.match ? { matches: panel.match.matches, bytes: panel.match.bytes } : null,
      moment: view === "timeline" && timelineOf(page, device) ? time.state() : null,
      segments: view === "segments" && segmentsOf(page, device) ? blocks.state() : null,
    };
  }

  /** How many texts the page holds. */
  texts(): number {
    return this.app.page.strings.length;
  }

  /** The widest node of a name, or of any name at a depth: its numbers, and its place. */
  node(wanted: string | number) {
    const panel = this.panel!;
    const tree = panel.tree!;
    for (let i = 0; i < tree.size; i++) {
      const name = nameOf(this.app.page, tree, i);
      if (typeof wanted === "string" ? name !== wanted : tree.depth[i] !== wanted) continue;
      return {
        name,
        total: tree.total[i],
        before: tree.before?.[i] ?? null,
        objects: tree.objects[i],
        place: panel.flame.placeOf(i),
      };
    }
    return null;
  }

  placeOfMoment(index: number) {
    return this.app.time.plot.placeOf(index);
  }

  placeOfBlock(row: number, nth: number) {
    return this.app.blocks.placeOfBlock(row, nth);
  }

  /** Milliseconds that the main flame graph takes to be drawn, at its slowest of so many zooms. */
  drawTimes(times: number): number[] {
    const { flame, tree } = this.app.main;
    return Array.from({ length: times }, (_, i) => {
      flame.zoomedTo = Math.min(i, tree!.size - 1);
      const begin = performance.now();
      flame.draw();
      return performance.now() - begin;
    });
  }
}
