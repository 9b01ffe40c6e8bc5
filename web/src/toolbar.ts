// The buttons above a view, and which of them belong to it.

import type { ColorBy } from "./colors";
import type { Kind, Page, View } from "./data";
import { Choices, el, field, select, toggle } from "./dom";
import { has, KINDS, whyNot } from "./select";
import { type Actions, COLORS, other, type State, type Widths } from "./state";

const KIND_BUTTONS: Record<Kind, { label: string; key: string; what: string }> = {
  live: { label: "Live", key: "l", what: "what is allocated at the end" },
  peak: { label: "Peak", key: "p", what: "what was allocated at the highest moment" },
  allocated: {
    label: "Allocated",
    key: "a",
    what: "everything that was allocated while recording",
  },
  pinned: { label: "Pinned", key: "", what: "pinned host memory" },
  segment: { label: "By segment", key: "s", what: "what is reserved, segment by segment" },
};
const COLOR_WORDS: Record<ColorBy, string> = {
  package: "package",
  origin: "origin",
  root: "root frame",
};

type Tool =
  | "kinds" | "widths" | "invert" | "flip" | "lines" | "colors" | "search" | "found" | "reset";
const TOOLS: Record<View, readonly Tool[]> = {
  flamegraph: ["kinds", "invert", "flip", "lines", "colors", "search", "found", "reset"],
  difference: ["kinds", "widths", "invert", "flip", "lines", "search", "found", "reset"],
  timeline: ["invert", "flip", "lines", "colors", "search", "found", "reset"],
  segments: [],
};

export class Toolbar {
  readonly header: HTMLElement;
  /** In the order of the page. */
  readonly tools: Record<Tool, HTMLElement>;
  private readonly views: Choices;
  private readonly kinds: Choices;
  private readonly devices: HTMLSelectElement;
  private readonly colors: HTMLSelectElement;
  private readonly widths: Choices;
  private readonly invert;
  private readonly flip;
  private readonly lines;
  private readonly theme: HTMLButtonElement;
  private readonly searchBox: HTMLInputElement;
  private readonly found = el("span", { class: "found", "aria-live": "polite" });

  constructor(
    private readonly page: Page,
    on: Actions,
  ) {
    const two = page.sources.length > 1;
    this.views = new Choices(
      "view",
      [
        { value: "flamegraph", label: "Flame graph", key: "1" },
        { value: "timeline", label: "Timeline", key: "2" },
        { value: "segments", label: "Segments", key: "3" },
        ...(two ? [{ value: "difference", label: "Difference", key: "4" }] : []),
      ],
      (value) => on.setView(value as View),
    );
    const pinned = page.profiles.some((profile) => profile.kind === "pinned");
    this.kinds = new Choices(
      "kind",
      KINDS.filter((kind) => kind !== "pinned" || pinned).map((kind) => ({
        value: kind,
        label: KIND_BUTTONS[kind].label,
        key: KIND_BUTTONS[kind].key,
      })),
      (value) => on.setKind(value as Kind),
    );
    this.devices = select(
      "device",
      on.devices.map((d) => [String(d), d < 0 ? "all devices" : `device ${d}`]),
      (value) => on.setDevice(Number(value)),
    );
    this.colors = select(
      "colour by",
      COLORS.map((by) => [by, COLOR_WORDS[by]]),
      (value) => on.setColor(value as ColorBy),
    );
    this.invert = toggle("Invert", "key i", (is) => on.setInverted(is));
    this.flip = toggle("Root below", "key f", (is) => on.setFlipped(is));
    this.lines = toggle("Lines", "key n: lines of a function apart", (is) => on.setLines(is));
    this.widths = new Choices(
      "widths",
      [
        { value: "max", label: "Larger of both", key: "w" },
        { value: "after", label: "After", key: "w" },
      ],
      (value) => on.setWidths(value as Widths),
    );
    this.searchBox = el("input", {
      type: "search",
      placeholder: "search",
      "aria-label": "search for frames",
      title: "key /",
      spellcheck: "false",
      input: () => on.search(this.searchBox.value, false),
    });
    const button = (text: string, title: string, click: () => void) =>
      el("button", { type: "button", title, click }, text);
    const help = button("?", "keys", () => on.showHelp());
    help.setAttribute("aria-label", "keys");
    this.theme = button("Dark", "key t", () => on.setTheme(other(on.state.theme)));
    this.tools = {
      kinds: this.kinds.element,
      widths: field("widths", this.widths.element),
      invert: this.invert.element,
      flip: this.flip.element,
      lines: this.lines.element,
      colors: field("colour", this.colors),
      search: this.searchBox,
      found: this.found,
      reset: button("Reset zoom", "key Esc", () => on.reset()),
    };
    this.header = el(
      "header",
      {},
      this.views.element,
      this.devices,
      el("h1", { title: page.title }, baseName(page.title)),
      el("span", { class: "grow" }),
      this.theme,
      help,
    );
  }

  show(state: Readonly<State>): void {
    const { view, device } = state;
    for (const [name, element] of Object.entries(this.tools))
      element.hidden = !TOOLS[view].includes(name as Tool);
    this.views.show(view);
    this.kinds.show(state.kind);
    for (const kind of KINDS) {
      const { key, what } = KIND_BUTTONS[kind];
      const asked = { view, kind, device };
      const there = has(this.page, asked);
      const title = there ? `${what}${key ? ` (key ${key})` : ""}` : whyNot(this.page, asked);
      this.kinds.allow(kind, there, title);
    }
    this.devices.value = String(device);
    this.colors.value = state.colorBy;
    this.widths.show(state.widths);
    this.invert.show(state.inverted);
    this.flip.show(state.flipped);
    this.lines.show(state.lines);
    this.theme.textContent = state.theme === "dark" ? "Light" : "Dark";
    if (this.searchBox.value !== state.text) this.searchBox.value = state.text;
  }

  /** What a search found. */
  tell(found: string): void {
    this.found.textContent = found;
  }

  get told(): string {
    return this.found.textContent;
  }

  focusSearch(): void {
    this.searchBox.focus();
  }
}

/** The last part of a path: of a file name that is what tells. */
function baseName(path: string): string {
  return path.slice(Math.max(path.lastIndexOf("/"), path.lastIndexOf("\\")) + 1) || path;
}
