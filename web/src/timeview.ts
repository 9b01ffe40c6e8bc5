// The view of time: the plot, and the flame graph of the moment that is chosen in it.

import type { Page, Timeline } from "./data";
import { Choices, el, field, type Tooltip } from "./dom";
import { count, humanBytes, seconds, utc } from "./format";
import { heldAt } from "./moments";
import { FlamePanel, type Look } from "./panel";
import { TimelinePlot } from "./timeline";
import { makeTree, type Shape } from "./tree";

const OTHER_NODE = 1;

export interface TimeEvents {
  said(text: string): void;
  searched(name: string): void;
  /** Another moment is shown: what is to be said about it. */
  moved(numbers: (Node | string)[]): void;
}

export class TimelineView {
  readonly element: HTMLElement;
  readonly tools: HTMLElement[];
  readonly legend = el("span", { class: "legend" });
  readonly panel: FlamePanel;
  readonly plot: TimelinePlot;
  private readonly host = el("div", {
    class: "plot",
    tabindex: 0,
    role: "application",
    "aria-label": "Memory over time. Left and right choose a moment.",
  });
  private readonly xs: Choices;
  private xBy: "time" | "index" = "time";
  private moment = 0;
  private timeline: Timeline | null = null;
  private shape: Shape = { inverted: false, lines: false };
  private look: Look = { colorBy: "package", theme: "light", inverted: false };

  constructor(
    private readonly page: Page,
    tooltip: Tooltip,
    private readonly events: TimeEvents,
  ) {
    this.panel = new FlamePanel(page, tooltip, "Flame graph of the moment. Arrow keys choose a frame, Enter zooms.", events);
    this.plot = new TimelinePlot(this.host, (index) => this.choose(index));
    this.xs = new Choices(
      "x axis",
      [
        { value: "time", label: "Time" },
        { value: "index", label: "Order" },
      ],
      (value) => {
        this.xBy = value as "time" | "index";
        this.showPlot();
      },
    );
    const whole = el("button", { type: "button", title: "key 0, or a double click", click: () => this.plot.reset() }, "Whole time");
    this.tools = [field("x", this.xs.element), whole];
    const below = el("main", {}, this.panel.element, this.panel.side);
    this.element = el("main", {}, el("div", { class: "view" }, this.host, below));
  }

  show(timeline: Timeline, shape: Shape, look: Look): void {
    if (this.timeline !== timeline) this.moment = timeline.peak;
    this.timeline = timeline;
    this.shape = shape;
    this.look = look;
    this.xs.allow("time", timeline.time !== null, timeline.time ? "by time" : "times are not in this file (torch before 2.2)");
    this.xs.allow("index", true, `by number of ${timeline.what}`);
    const has = (action: string) => timeline.marks.some((mark) => mark.action === action);
    const exact = timeline.unit === "requested bytes" ? "requested" : "rounded";
    this.legend.replaceChildren(
      el("span", { class: "allocated" }, `allocated (${exact})`),
      el("span", { class: "reserved" }, "reserved"),
      el("span", { class: "peak" }, "peak"),
      ...(has("oom") ? [el("span", { class: "oom" }, "out of memory")] : []),
      ...(has("annotate") ? [el("span", { class: "note" }, "annotation")] : []),
      ...(timeline.spans.length ? [el("span", { class: "band" }, "range")] : []),
    );
    this.showPlot();
    this.showMoment();
  }

  restyle(look: Look): void {
    this.look = look;
    this.panel.restyle(look);
    this.plot.repaint();
  }

  choose(index: number): void {
    this.moment = index;
    this.plot.choose(index);
    this.showMoment();
  }

  private showPlot(): void {
    const timeline = this.timeline!;
    const by = timeline.time ? this.xBy : "index";
    this.xs.show(by);
    this.plot.chosen = this.moment;
    this.plot.setTimeline(timeline, by);
  }

  private showMoment(): void {
    const timeline = this.timeline!;
    const index = this.moment;
    const held = heldAt(timeline, index, this.page.trie.parent.length, OTHER_NODE);
    this.panel.show(makeTree(this.page, held, this.shape, this.label(index)), this.look);
    const peak = humanBytes(timeline.allocated[timeline.peak]!);
    this.events.moved([
      `${index === timeline.peak ? "peak, " : ""}${this.label(index)}${this.since(index)}: `,
      el("b", {}, humanBytes(timeline.allocated[index]!)),
      " allocated, ",
      el("b", {}, humanBytes(timeline.reserved[index]!)),
      index === timeline.peak ? " reserved" : ` reserved; peak ${peak}`,
    ]);
    const mark = timeline.marks.find((m) => this.plot.indexOf(m.moment) === index);
    const when = timeline.time ? utc(timeline.time[index]!) : "";
    this.events.said([when, mark?.text ?? ""].filter(Boolean).join(" | "));
  }

  private label(index: number): string {
    const timeline = this.timeline!;
    const number = timeline.moment[index]!;
    if (timeline.what === "readings") return `reading ${count(number + 1)}`;
    return number ? `event ${count(number)}` : "before the first event";
  }

  private since(index: number): string {
    const { time } = this.timeline!;
    if (!time) return "";
    const range = (time[time.length - 1]! - time[0]!) / 1e6;
    return ` at ${seconds((time[index]! - time[0]!) / 1e6, range / 100)}`;
  }

  state() {
    const timeline = this.timeline!;
    return {
      index: this.moment,
      moments: timeline.allocated.length,
      peak: timeline.peak,
      allocated: timeline.allocated[this.moment],
      reserved: timeline.reserved[this.moment],
      highest: timeline.allocated[timeline.peak],
      marks: timeline.marks.length,
      spans: timeline.spans.length,
      range: this.plot.rangeShown,
      points: this.plot.pointsShown,
    };
  }
}
