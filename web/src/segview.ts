// The view of segments: the map, its tools, and what a chosen block is.

import type { Page, SegmentTable } from "./data";
import { Choices, el, field, type Tooltip } from "./dom";
import { humanBytes, percent, plural } from "./format";
import { type Scale, SegmentsMap, type SortBy, STATES } from "./segments";

export class SegmentsView {
  readonly element: HTMLElement;
  readonly tools: HTMLElement[];
  readonly legend = el("span", { class: "legend" }, ...STATES.map((state, i) => el("span", { class: `s${i}` }, state)));
  readonly map: SegmentsMap;
  private table: SegmentTable | null = null;
  private sortBy: SortBy = "size";
  private scale: Scale = "size";
  private pool = "all";
  private readonly sorts = new Choices(
    "sort by",
    [
      { value: "size", label: "Size" },
      { value: "address", label: "Address" },
      { value: "free", label: "Free" },
    ],
    (value) => {
      this.sortBy = value as SortBy;
      this.arrange();
    },
  );
  private readonly scales = new Choices(
    "scale",
    [
      { value: "size", label: "To scale" },
      { value: "full", label: "Full width" },
    ],
    (value) => {
      this.scale = value as Scale;
      this.arrange();
    },
  );
  private readonly pools = el("select", {
    "aria-label": "pool",
    change: () => {
      this.pool = this.pools.value;
      this.arrange();
    },
  });
  private readonly totals = el("div", { class: "totals", role: "img" });
  private readonly detail = el("div", { class: "side detail", role: "region", "aria-label": "block" });
  private told: string[] = [];

  constructor(
    page: Page,
    tooltip: Tooltip,
    private readonly say: (text: string) => void,
  ) {
    const host = el("div", { class: "pane" });
    this.map = new SegmentsMap(host, page, tooltip, (segment, block) => this.showBlock(segment, block));
    this.element = el("main", {}, el("div", { class: "view" }, host), this.detail);
    this.tools = [field("sort", this.sorts.element), this.scales.element, field("pool", this.pools), this.totals];
  }

  /** Shows a device's segments; what they add up to. */
  show(table: SegmentTable): (Node | string)[] {
    this.table = table;
    const { totals } = table;
    if (this.pool !== "all" && !table.pools.includes(this.pool)) this.pool = "all";
    this.pools.replaceChildren(
      ...["all", ...table.pools].map((pool) => el("option", { value: pool }, pool === "all" ? "all pools" : pool)),
    );
    this.pools.value = this.pool;
    const reserved = totals.reserved!;
    const parts: [string, number, string][] = [
      ["s0", totals.allocated!, "allocated"],
      ["s1", totals.pending_free!, "waiting for another stream"],
      ["f1", totals.split_remainders!, "free beside allocated blocks (split remainders)"],
      ["f2", totals.private_pools_free!, "free in private pools"],
      ["f0", totals.free_segments!, "whole free segments"],
    ];
    this.totals.replaceChildren(
      ...parts.map(([name, bytes, what]) => {
        const part = el("i", { class: name, title: `${humanBytes(bytes)} ${what}, ${percent(bytes, reserved)}` });
        part.style.width = `${reserved ? (100 * bytes) / reserved : 0}%`;
        return part;
      }),
    );
    this.told = parts.filter(([, bytes]) => bytes).map(([, bytes, what]) => `${humanBytes(bytes)} ${what}`);
    this.totals.setAttribute("aria-label", this.told.join(", "));
    this.arrange();
    return [
      el("b", {}, humanBytes(reserved)),
      " reserved, ",
      el("b", {}, humanBytes(totals.allocated!)),
      " allocated, ",
      el("b", {}, humanBytes(reserved - totals.allocated! - totals.pending_free!)),
      totals.pending_free ? ` free, ${humanBytes(totals.pending_free)} waiting in ` : " free in ",
      `${plural(table.bytes.length, "segment")}, ${plural(table.block.bytes.length, "block")}`,
    ];
  }

  private arrange(): void {
    this.sorts.show(this.sortBy);
    this.scales.show(this.scale);
    this.map.setTable(this.table!, this.sortBy, this.pool, this.scale);
    this.detail.replaceChildren(
      el("div", { class: "first" }, "Where the reserved memory is"),
      ...this.told.map((text) => el("div", {}, text)),
      el("div", {}, "Point at a block to see its stack; click to keep it here."),
    );
    this.say("");
  }

  private showBlock(segment: number, block: number): void {
    const lines = this.map.lines(segment, block);
    this.detail.replaceChildren(...lines.map((line, i) => el("div", { class: i ? "" : "first" }, line)));
    this.say(lines.slice(0, 3).join(" | "));
  }

  state() {
    return { rows: this.map.rows.length, totals: this.table!.totals, chosen: this.map.chosen };
  }

  placeOfBlock(row: number, nth: number) {
    return this.map.placeOf(row, this.table!.first[this.map.rows[row]!]! + nth);
  }
}
