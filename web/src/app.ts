// The page: what is asked for, and the view that shows it.

import { BySegment } from "./bysegment";
import type { ColorBy, Theme } from "./colors";
import type { Kind, Page, View } from "./data";
import { el, Tooltip } from "./dom";
import { humanBytes, plural, signedBytes } from "./format";
import { dialogs } from "./help";
import { listen } from "./keys";
import { FlamePanel, type Look } from "./panel";
import { SegmentsView } from "./segview";
import {
  devicesOf,
  differenceOf,
  firstDevice,
  has,
  kindShown,
  missing,
  type Pair,
  profileOf,
  segmentsOf,
  timelineOf,
} from "./select";
import type { Actions, State, Widths } from "./state";
import { TimelineView } from "./timeview";
import { Toolbar } from "./toolbar";
import { type Held, makeDifference, makeTree, type Shape, type Tree } from "./tree";

const NOTHING: Held = {
  node: new Uint32Array(),
  objects: new Float64Array(),
  bytes: new Float64Array(),
};

export class App implements Actions {
  readonly element = el("div", { id: "app" });
  readonly state: State;
  readonly devices: number[];
  readonly main: FlamePanel;
  readonly time: TimelineView;
  readonly blocks: SegmentsView;
  readonly toolbar: Toolbar;
  readonly numbers = el("span", { class: "numbers", "aria-live": "polite" });
  readonly status = el("span", { role: "status", "aria-live": "polite" });
  private readonly tooltip = new Tooltip();
  private readonly dialogs = dialogs();
  private readonly bySegment: BySegment;
  private readonly flame: HTMLElement;
  private readonly empty = el("div", { class: "empty", hidden: true });
  private readonly notes = el("button", {
    type: "button",
    click: () => this.dialogs.showNotes(this.page, this.comments),
  });
  /** About what is shown. */
  private comments: string[] = [];

  constructor(readonly page: Page) {
    this.devices = devicesOf(page);
    const device = firstDevice(page);
    const view = page.view === "difference" && page.sources.length < 2 ? "flamegraph" : page.view;
    this.state = {
      view,
      kind: page.kind,
      device,
      theme: "light",
      colorBy: "package",
      inverted: false,
      flipped: false,
      lines: false,
      widths: "max",
      text: "",
      exact: false,
    };
    this.bySegment = new BySegment(page);
    const events = {
      said: (text: string) => this.say(text),
      searched: (name: string) => this.search(name, true),
    };
    const label = "Flame graph. Arrow keys choose a frame, Enter zooms.";
    this.main = new FlamePanel(page, this.tooltip, label, events);
    this.time = new TimelineView(page, this.tooltip, {
      ...events,
      moved: (numbers) => {
        this.numbers.replaceChildren(...numbers);
        this.toolbar.tell(this.time.panel.found());
      },
    });
    this.blocks = new SegmentsView(page, this.tooltip, (text) => this.say(text));
    this.toolbar = new Toolbar(page, this);
    this.flame = el("main", {}, this.main.element, this.main.side);
    const { time, blocks, toolbar } = this;
    const tools = [...time.tools, ...Object.values(toolbar.tools), ...blocks.tools];
    const grow = el("span", { class: "grow" });
    this.element.append(
      toolbar.header,
      el("div", { class: "tools", role: "toolbar", "aria-label": "this view" }, ...tools),
      el("div", { class: "info" }, this.numbers, grow, time.legend, blocks.legend),
      this.flame,
      time.element,
      blocks.element,
      this.empty,
      el("footer", {}, this.status, this.notes, el("span", {}, page.madeBy)),
      this.tooltip.element,
      this.dialogs.help,
      this.dialogs.notes,
    );
  }

  /** Once the element is in the document. */
  start(): void {
    document.title = this.page.title;
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const follow = () => this.setTheme(dark.matches ? "dark" : "light");
    dark.addEventListener("change", follow);
    follow();
    listen(this, () => this.dialogs.help.open || this.dialogs.notes.open);
    this.show();
  }

  setView(view: View): void {
    if (view === "difference" && this.page.sources.length < 2) return;
    this.tooltip.hide();
    this.change({ view });
  }

  setKind(kind: Kind): void {
    const { view, device } = this.state;
    if (!has(this.page, { view, kind, device })) return;
    const flame = view === "difference" ? view : "flamegraph";
    this.change({ kind, view: flame });
  }

  setDevice(device: number): void {
    this.change({ device });
  }

  setTheme(theme: Theme): void {
    this.state.theme = theme;
    document.documentElement.dataset.theme = theme;
    this.main.restyle(this.look);
    this.time.restyle(this.look);
    this.blocks.map.repaint();
    this.toolbar.show(this.state);
  }

  setColor(colorBy: ColorBy): void {
    this.state.colorBy = colorBy;
    this.main.restyle(this.look);
    this.time.panel.restyle(this.look);
    this.toolbar.show(this.state);
  }

  setInverted(inverted: boolean): void {
    this.change({ inverted });
  }

  setFlipped(flipped: boolean): void {
    for (const panel of [this.main, this.time.panel]) panel.flame.flipped = flipped;
    this.change({ flipped });
  }

  setLines(lines: boolean): void {
    this.change({ lines });
  }

  setWidths(widths: Widths): void {
    this.change({ widths });
  }

  search(text: string, exact: boolean): void {
    this.state.text = text;
    this.state.exact = exact && text !== "";
    this.panel?.search(text, this.state.exact);
    this.toolbar.show(this.state);
    this.toolbar.tell(this.panel?.found() ?? "");
  }

  focusSearch(): void {
    if (this.panel) this.toolbar.focusSearch();
  }

  reset(): void {
    this.panel?.flame.reset();
  }

  zoomTime(factor: number | null): void {
    if (this.state.view !== "timeline") return;
    if (factor === null) this.time.plot.reset();
    else this.time.plot.zoomBy(factor);
  }

  showHelp(): void {
    this.dialogs.help.showModal();
  }

  /** The flame graph that is shown. */
  get panel(): FlamePanel | null {
    const { view } = this.state;
    if (view === "segments") return null;
    return view === "timeline" ? this.time.panel : this.main;
  }

  private get look(): Look {
    const { colorBy, theme, inverted } = this.state;
    return { colorBy, theme, inverted };
  }

  private get shape(): Shape {
    const { inverted, lines } = this.state;
    return { inverted, lines };
  }

  private change(part: Partial<State>): void {
    Object.assign(this.state, part);
    this.show();
  }

  private say(text: string): void {
    // while nothing is pointed at: what this page is about
    this.status.textContent = text || this.page.sources.map((source) => source.name).join(" to ");
  }

  private show(): void {
    const { page, state, time, blocks } = this;
    const { view, device } = state;
    const flame = view === "flamegraph" || view === "difference";
    if (flame) state.kind = kindShown(page, state);
    this.toolbar.show(state);
    for (const element of [...time.tools, time.legend]) element.hidden = view !== "timeline";
    for (const element of [...blocks.tools, blocks.legend]) element.hidden = view !== "segments";
    const problem = missing(page, state);
    this.flame.hidden = !flame || problem !== "";
    time.element.hidden = view !== "timeline" || problem !== "";
    blocks.element.hidden = view !== "segments" || problem !== "";
    this.empty.hidden = problem === "";
    this.empty.textContent = problem;
    this.comments = [];
    if (problem) this.numbers.replaceChildren();
    else if (flame) this.showFlame();
    else if (view === "timeline") time.show(timelineOf(page, device)!, this.shape, this.look);
    else this.numbers.replaceChildren(...blocks.show(segmentsOf(page, device)!));
    this.toolbar.tell(problem ? "" : (this.panel?.found() ?? ""));
    this.showNotes();
    if (view !== "timeline" || problem) this.say("");
  }

  private showNotes(): void {
    const warnings = this.page.sources.reduce((sum, source) => sum + source.warnings.length, 0);
    this.notes.textContent = warnings ? plural(warnings, "warning") : "notes";
    this.notes.className = warnings ? "warn" : "";
    this.notes.hidden = warnings + this.comments.length === 0;
  }

  private showFlame(): void {
    const { view, kind } = this.state;
    if (view === "difference") this.showDifference();
    else if (kind === "segment") this.showBySegment();
    else this.showProfile();
  }

  private showTree(tree: Tree): void {
    this.main.show(tree, this.look);
    this.main.search(this.state.text, this.state.exact);
  }

  private showProfile(): void {
    const profile = profileOf(this.page, this.state.kind, this.state.device)!;
    const tree = makeTree(this.page, profile, this.shape, "all");
    const objects = plural(tree.objects[0]!, "allocation");
    this.numbers.replaceChildren(
      el("b", {}, humanBytes(tree.total[0]!)),
      ` in ${objects}, ${plural(profile.node.length, "stack")}; ${profile.unit}`,
    );
    this.comments = profile.comments;
    this.showTree(tree);
  }

  private showBySegment(): void {
    const table = segmentsOf(this.page, this.state.device)!;
    const tree = this.bySegment.tree(table, this.shape);
    this.numbers.replaceChildren(
      el("b", {}, humanBytes(tree.total[0]!)),
      ` reserved in ${plural(table.bytes.length, "segment")}`,
    );
    this.showTree(tree);
  }

  private showDifference(): void {
    const { kind, device, widths } = this.state;
    const { pair, before, after } = differenceOf(this.page, kind, device);
    const given = [before ?? NOTHING, after ?? NOTHING] as const;
    const tree = makeDifference(this.page, ...given, this.shape, widths, "all");
    const [from, to] = [tree.before![0]!, tree.total[0]!];
    const color = to > from ? "red" : to < from ? "blue" : "";
    this.numbers.replaceChildren(
      "before ", el("b", {}, humanBytes(from)),
      ", after ", el("b", {}, humanBytes(to)),
      ", change ", el("b", { class: color }, signedBytes(to - from)),
      `; ${(after ?? before)!.unit}${aboutPair(pair)}`,
    );
    this.comments = [...(before?.comments ?? []), ...(after?.comments ?? [])];
    this.showTree(tree);
  }
}

function aboutPair({ before, after }: Pair): string {
  if (before === after) return "";
  if (before === null) return `; device ${after} is in the later file only`;
  if (after === null) return `; device ${before} is in the earlier file only`;
  return `; device ${before} before, device ${after} after`;
}
