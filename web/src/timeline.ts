// Memory over time: allocated, reserved, the peak, marks and annotated ranges.

import uPlot from "uplot";

import type { Timeline } from "./data";
import { cssColor } from "./dom";
import { humanBytes, seconds } from "./format";
import { lanesOf, places, thinned, upper } from "./moments";

const LANE = 13;
const COLORS = [
  "text", "font", "grid", "reserved", "allocated", "allocated-fill",
  "back", "bad", "note", "peak", "focus", "band", "frame-text",
] as const;
type Colors = Record<(typeof COLORS)[number], string>;

export class TimelinePlot {
  timeline: Timeline | null = null;
  by: "time" | "index" = "time";
  chosen = 0;
  private plot: uPlot | null = null;
  private x: Float64Array = new Float64Array();
  private shown: number[] = [];
  private range: [number, number] = [0, 1];
  private lanes = 0;
  private colors = {} as Colors;

  constructor(
    private readonly host: HTMLElement,
    private readonly pick: (index: number) => void,
  ) {
    new ResizeObserver(() => this.sized()).observe(host);
    host.addEventListener("keydown", (event) => this.pressed(event));
  }

  setTimeline(timeline: Timeline, by: "time" | "index"): void {
    this.timeline = timeline;
    this.by = timeline.time ? by : "index";
    this.x = places(timeline, this.by);
    this.lanes = lanesOf(timeline.spans);
    this.chosen = Math.min(this.chosen, this.x.length - 1);
    this.range = this.whole();
    this.build();
  }

  /** Colours changed. */
  repaint(): void {
    if (this.timeline) this.build();
  }

  choose(index: number): void {
    this.chosen = index;
    const x = this.x[index]!;
    if (x < this.range[0] || x > this.range[1]) {
      const half = (this.range[1] - this.range[0]) / 2;
      this.zoom(x - half, x + half);
    }
    this.plot?.redraw(false);
  }

  private whole(): [number, number] {
    const first = this.x[0] ?? 0;
    const last = this.x[this.x.length - 1] ?? 1;
    return first === last ? [first - 0.5, last + 0.5] : [first, last];
  }

  reset(): void {
    this.zoom(...this.whole());
  }

  zoomBy(factor: number): void {
    const [from, to] = this.range;
    const at = this.x[this.chosen]!;
    const middle = at >= from && at <= to ? at : (from + to) / 2;
    this.zoom(middle - (middle - from) * factor, middle + (to - middle) * factor);
  }

  zoom(from: number, to: number): void {
    const [first, last] = this.whole();
    const width = Math.min(to - from, last - first);
    const start = Math.min(Math.max(from, first), last - width);
    if (!(width > 0)) return;
    this.range = [start, start + width];
    this.plot?.batch(() => {
      this.plot!.setData(this.columns(), false);
      this.plot!.setScale("x", { min: this.range[0], max: this.range[1] });
    });
  }

  get rangeShown(): [number, number] {
    return this.range;
  }

  get pointsShown(): number {
    return this.shown.length;
  }

  /** Where a moment is in the window, for tests. */
  placeOf(index: number): { x: number; y: number } {
    const box = this.plot!.over.getBoundingClientRect();
    return { x: box.left + this.plot!.valToPos(this.x[index]!, "x"), y: box.top + box.height / 2 };
  }

  private columns(): uPlot.AlignedData {
    const { allocated, reserved } = this.timeline!;
    const [from, to] = this.range;
    const first = Math.max(0, upper(this.x, from) - 2);
    const last = Math.min(this.x.length, upper(this.x, to) + 1);
    const columns = Math.max(100, this.host.clientWidth);
    this.shown = thinned(this.x, [allocated, reserved], first, last, columns);
    return [
      this.shown.map((i) => this.x[i]!),
      this.shown.map((i) => reserved[i]!),
      this.shown.map((i) => allocated[i]!),
    ];
  }

  private build(): void {
    this.plot?.destroy();
    // read once: asking for a style is slow, and there may be thousands of ranges in each frame
    this.colors = Object.fromEntries(COLORS.map((name) => [name, cssColor(name)])) as Colors;
    const { colors } = this;
    const stepped = uPlot.paths.stepped!({ align: 1 });
    const axis = {
      stroke: colors.text,
      font: `11px ${colors.font}`,
      grid: { stroke: colors.grid, width: 1 },
      ticks: { stroke: colors.grid, width: 1 },
    };
    const range = () => this.range[1] - this.range[0];
    const options: uPlot.Options = {
      width: Math.max(200, this.host.clientWidth),
      height: Math.max(120, this.host.clientHeight),
      padding: [10, 16, 0, 0],
      legend: { show: false },
      // a drag zooms, a double click shows everything: both by way of the thinned points
      cursor: { drag: { x: true, y: false, setScale: false }, points: { size: 6 }, bind: { dblclick: () => null } },
      scales: {
        x: { time: false, range: () => this.range },
        // room above for the lanes of annotated ranges
        y: { range: (_u, _min, max) => [0, (max || 1) * (1.06 + (this.lanes * LANE) / Math.max(120, this.host.clientHeight - 44))] },
      },
      axes: [
        {
          ...axis,
          size: 34,
          values: (_u, values) =>
            values.map((v) => (this.by === "time" ? seconds(v, range()) : Number.isInteger(v) ? v.toLocaleString("en-US") : "")),
        },
        { ...axis, size: 84, values: (_u, values) => values.map(humanBytes), incrs: binarySteps() },
      ],
      series: [
        {},
        { label: "reserved", stroke: colors.reserved, width: 1.5, paths: stepped, points: { show: false } },
        {
          label: "allocated",
          stroke: colors.allocated,
          fill: colors["allocated-fill"],
          width: 1.5,
          paths: stepped,
          points: { show: false },
        },
      ],
      hooks: {
        draw: [(u) => this.drawMarks(u)],
        setSelect: [
          (u) => {
            if (u.select.width < 3) return;
            const from = u.posToVal(u.select.left, "x");
            const to = u.posToVal(u.select.left + u.select.width, "x");
            u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            this.zoom(from, to);
          },
        ],
      },
    };
    this.plot = new uPlot(options, this.columns(), this.host);
    this.listen(this.plot.over);
  }

  private listen(over: HTMLElement): void {
    let down = 0;
    over.addEventListener("mousedown", (event) => (down = event.clientX));
    over.addEventListener("click", (event) => {
      if (Math.abs(event.clientX - down) > 3) return;
      this.pick(this.indexAt(event.clientX - over.getBoundingClientRect().left));
    });
    over.addEventListener("dblclick", () => this.reset());
    over.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        const at = this.plot!.posToVal(event.clientX - over.getBoundingClientRect().left, "x");
        const factor = 1.0018 ** event.deltaY;
        const [from, to] = this.range;
        if (event.shiftKey) {
          const moved = ((event.deltaY || event.deltaX) / over.clientWidth) * (to - from);
          this.zoom(from + moved, to + moved);
        } else this.zoom(at - (at - from) * factor, at + (to - at) * factor);
      },
      { passive: false },
    );
  }

  /** The entry that holds at a place: the last at or before it. */
  indexAt(left: number): number {
    const value = this.plot!.posToVal(left, "x");
    const width = (this.range[1] - this.range[0]) / this.plot!.over.clientWidth;
    const index = Math.min(this.x.length - 1, Math.max(0, upper(this.x, value) - 1));
    // nobody can hit one of a million: within two pixels the peak or a mark is what is meant
    const { peak, marks } = this.timeline!;
    const near = [peak, ...marks.map((mark) => this.indexOf(mark.moment))].filter(
      (i) => Math.abs(this.x[i]! - value) <= 3 * width,
    );
    return near.length
      ? near.reduce((a, b) => (Math.abs(this.x[b]! - value) < Math.abs(this.x[a]! - value) ? b : a))
      : index;
  }

  /** Entry of a moment, or the one before it where that was thinned away. */
  indexOf(moment: number): number {
    return Math.max(0, upper(this.timeline!.moment, moment) - 1);
  }

  private drawMarks(u: uPlot): void {
    const timeline = this.timeline!;
    const { colors } = this;
    const g = u.ctx;
    const ratio = uPlot.pxRatio;
    const { left, top, width, height } = u.bbox;
    g.save();
    g.beginPath();
    g.rect(left, top, width, height);
    g.clip();
    this.drawSpans(u);
    const line = (x: number, color: string, dash: number[], wide = 1) => {
      const at = u.valToPos(x, "x", true);
      g.strokeStyle = color;
      g.lineWidth = wide * ratio;
      g.setLineDash(dash.map((d) => d * ratio));
      g.beginPath();
      g.moveTo(at, top);
      g.lineTo(at, top + height);
      g.stroke();
      return at;
    };
    g.font = `${11 * ratio}px ${colors.font}`;
    g.textAlign = "left"; // uPlot leaves it as its axes had it
    const below = top + this.lanes * LANE * ratio;
    const say = (text: string, at: number, y: number, color: string) => {
      const wide = g.measureText(text).width;
      const x = at + 4 * ratio + wide > left + width ? at - 4 * ratio - wide : at + 4 * ratio;
      g.fillStyle = colors.back;
      g.globalAlpha = 0.8;
      g.fillRect(x - 2 * ratio, y - 8 * ratio, wide + 4 * ratio, 15 * ratio);
      g.globalAlpha = 1;
      g.fillStyle = color;
      g.textBaseline = "middle";
      g.fillText(text, x, y);
    };
    let last = -Infinity;
    for (const mark of timeline.marks) {
      const x = this.x[this.indexOf(mark.moment)]!;
      const place = u.valToPos(x, "x", true);
      if (place < left || place > left + width || place - last < ratio) continue;
      const oom = mark.action === "oom";
      const at = line(x, colors[oom ? "bad" : "note"], oom ? [] : [2, 3], oom ? 1.5 : 1);
      if (place - last > 60 * ratio) say(mark.text.slice(0, 60), at, below + (oom ? 12 : 28) * ratio, colors[oom ? "bad" : "note"]);
      last = place;
    }
    const peakX = this.x[timeline.peak]!;
    const peakAt = line(peakX, colors.peak, [5, 4]);
    const highest = timeline.allocated[timeline.peak]!;
    const peakY = u.valToPos(highest, "y", true);
    g.fillStyle = colors.peak;
    g.setLineDash([]);
    g.beginPath();
    g.arc(peakAt, peakY, 4 * ratio, 0, 2 * Math.PI);
    g.fill();
    say(`peak ${humanBytes(highest)}`, peakAt, Math.max(below + 44 * ratio, peakY - 14 * ratio), colors.peak);
    line(this.x[this.chosen]!, colors.focus, [], 2);
    g.setLineDash([]);
    g.restore();
  }

  private drawSpans(u: uPlot): void {
    const timeline = this.timeline!;
    const { time } = timeline;
    if (!timeline.spans.length || !time) return;
    const g = u.ctx;
    const ratio = uPlot.pxRatio;
    const { left, top, width, height } = u.bbox;
    const { colors, lanes } = this;
    const place = (timeUs: number) => {
      if (timeUs === -Infinity) return left;
      if (timeUs === Infinity) return left + width;
      const x =
        this.by === "time" ? (timeUs - time[0]!) / 1e6 : this.x[Math.max(0, upper(time, timeUs) - 1)]!;
      return Math.min(left + width, Math.max(left, u.valToPos(x, "x", true)));
    };
    g.font = `${10 * ratio}px ${colors.font}`;
    g.textBaseline = "middle";
    g.textAlign = "left";
    for (const span of timeline.spans) {
      if (span.lane >= lanes) continue;
      const from = place(span.fromUs);
      const to = place(span.toUs);
      if (to - from < 0.5 * ratio) continue;
      const y = top + span.lane * LANE * ratio;
      g.globalAlpha = 0.25;
      g.fillStyle = colors.band;
      g.fillRect(from, top, to - from, span.lane === 0 ? height : 0);
      g.globalAlpha = 0.85;
      g.fillRect(from, y, Math.max(ratio, to - from - ratio), (LANE - 1) * ratio);
      g.globalAlpha = 1;
      if (to - from < 24 * ratio) continue;
      g.fillStyle = colors["frame-text"];
      const room = (to - from) / ratio - 6;
      g.fillText(span.name.slice(0, Math.floor(room / 5.4)), from + 3 * ratio, y + ((LANE - 1) / 2) * ratio);
    }
  }

  private sized(): void {
    if (!this.plot || !this.host.clientWidth || !this.host.clientHeight) return;
    this.plot.setSize({ width: this.host.clientWidth, height: this.host.clientHeight });
    this.zoom(...this.range);
  }

  private pressed(event: KeyboardEvent): void {
    if (!this.timeline || event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.x.length - 1;
    const far = event.shiftKey ? Math.max(10, Math.ceil(last / 50)) : 1;
    let next = this.chosen;
    if (event.key === "ArrowLeft") next -= far;
    else if (event.key === "ArrowRight") next += far;
    else if (event.key === "Home") next = 0;
    else if (event.key === "End") next = last;
    else return;
    event.preventDefault();
    this.pick(Math.min(last, Math.max(0, next)));
  }
}

/** Steps of an axis of bytes: powers of two, so that labels are round. */
function binarySteps(): number[] {
  return Array.from({ length: 50 }, (_, i) => 2 ** (i + 3));
}
