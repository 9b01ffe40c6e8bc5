// The segments map: every reserved range with its blocks, to scale.

import type { Page, SegmentTable } from "./data";
import { cssColor, ScrolledCanvas, type Tooltip } from "./dom";
import { hex, humanBytes, percent, shortName } from "./format";

const ROW = 22;
const BAR = 16;
const LABEL = 292;

export const STATES = ["allocated", "waiting for a stream", "free"];

export type SortBy = "size" | "address" | "free";
export type Scale = "size" | "full";

export class SegmentsMap {
  rows: number[] = [];
  private table: SegmentTable | null = null;
  private readonly area: ScrolledCanvas;
  private scale: Scale = "size";
  private largest = 1;
  private allocated: Float64Array = new Float64Array();
  private free: Float64Array = new Float64Array();
  private hovered: [number, number] = [-1, -1];
  chosen: [number, number] = [-1, -1];

  constructor(
    host: HTMLElement,
    private readonly page: Page,
    private readonly tooltip: Tooltip,
    private readonly pick: (segment: number, block: number) => void,
  ) {
    this.area = new ScrolledCanvas(
      host,
      "Segments and their blocks. Up and down choose a segment, left and right a block.",
      () => this.draw(),
      () => this.sized(),
    );
    const { canvas } = this.area;
    canvas.addEventListener("mousemove", (event) => this.moved(event));
    canvas.addEventListener("mouseleave", () => this.look([-1, -1]));
    canvas.addEventListener("click", (event) => {
      const [row, block] = this.at(event.offsetX, event.offsetY);
      if (row >= 0) this.choose(row, block);
    });
    canvas.addEventListener("keydown", (event) => this.pressed(event));
  }

  setTable(table: SegmentTable, sort: SortBy, pool: string, scale: Scale): void {
    this.table = table;
    this.scale = scale;
    this.allocated = new Float64Array(table.bytes.length);
    this.free = new Float64Array(table.bytes.length);
    for (let s = 0; s < this.allocated.length; s++)
      for (let b = table.first[s]!; b < table.first[s + 1]!; b++)
        if (table.block.state[b] === 0) this.allocated[s]! += table.block.bytes[b]!;
        else if (table.block.state[b] === 2) this.free[s]! += table.block.bytes[b]!;
    const rows = Array.from(table.bytes.keys()).filter(
      (s) => pool === "all" || table.pools[table.pool[s]!] === pool,
    );
    const byAddress = (a: number, b: number) =>
      table.address[a]! < table.address[b]! ? -1 : table.address[a]! > table.address[b]! ? 1 : a - b;
    const free = (s: number) => this.free[s]!;
    rows.sort(
      sort === "address"
        ? byAddress
        : sort === "free"
          ? (a, b) => free(b) - free(a) || byAddress(a, b)
          : (a, b) => table.bytes[b]! - table.bytes[a]! || byAddress(a, b),
    );
    this.rows = rows;
    this.largest = rows.reduce((most, s) => Math.max(most, table.bytes[s]!), 1);
    this.chosen = this.hovered = [-1, -1];
    this.sized();
  }

  repaint(): void {
    this.area.redraw();
  }

  choose(row: number, block: number): void {
    this.chosen = [row, block];
    this.area.redraw();
    this.pick(this.rows[row]!, block);
  }

  private sized(): void {
    this.area.setContentHeight(this.rows.length * ROW + 8);
    this.area.redraw();
  }

  private extent(row: number): [number, number] {
    const room = this.area.width - LABEL - 12;
    const bytes = this.table!.bytes[this.rows[row]!]!;
    const wide = this.scale === "full" ? room : Math.max(2, (room * bytes) / this.largest);
    return [LABEL, wide];
  }

  /** Row and block at a place of the canvas. */
  private at(x: number, y: number): [number, number] {
    const row = Math.floor((y + this.area.top - 4) / ROW);
    if (!this.table || row < 0 || row >= this.rows.length) return [-1, -1];
    const segment = this.rows[row]!;
    const [left, wide] = this.extent(row);
    const bytes = ((x - left) / wide) * this.table.bytes[segment]!;
    let end = 0;
    if (bytes >= 0)
      for (let b = this.table.first[segment]!; b < this.table.first[segment + 1]!; b++) {
        end += this.table.block.bytes[b]!;
        if (bytes < end) return [row, b];
      }
    return [row, -1];
  }

  placeOf(row: number, block: number): { x: number; y: number } {
    const { table } = this;
    const segment = this.rows[row]!;
    const [left, wide] = this.extent(row);
    const scale = wide / table!.bytes[segment]!;
    let from = 0;
    for (let b = table!.first[segment]!; b < block; b++) from += table!.block.bytes[b]!;
    const box = this.area.canvas.getBoundingClientRect();
    return {
      x: box.left + left + (from + table!.block.bytes[block]! / 2) * scale,
      y: box.top + row * ROW + 4 + BAR / 2 - this.area.top,
    };
  }

  segmentText(segment: number): string {
    const t = this.table!;
    return (
      `${humanBytes(t.bytes[segment]!)} ${this.page.strings[t.kind[segment]!]}` +
      `${t.expandable[segment] ? " expandable" : ""}, ${t.pools[t.pool[segment]!]}`
    );
  }

  private draw(): void {
    const { context: g, width, height, top } = this.area;
    g.globalAlpha = 1;
    g.fillStyle = cssColor("back");
    g.fillRect(0, 0, width, height);
    const t = this.table;
    if (!t) return;
    const colors = ["state-allocated", "state-pending", "state-inactive"].map(cssColor);
    const [text, faint, focus, edge] = ["text", "faint", "focus", "frame-edge"].map(cssColor);
    const [mono, font] = [`11px ${cssColor("mono")}`, `12px ${cssColor("font")}`];
    g.textBaseline = "middle";
    const from = Math.max(0, Math.floor((top - 4) / ROW));
    const to = Math.min(this.rows.length, Math.ceil((top + height) / ROW));
    for (let row = from; row < to; row++) {
      const segment = this.rows[row]!;
      const y = row * ROW + 4 - top;
      const size = t.bytes[segment]!;
      const used = percent(this.allocated[segment]!, size);
      g.font = mono;
      g.fillStyle = faint!;
      g.fillText(hex(t.address[segment]!), 8, y + BAR / 2);
      g.font = font;
      g.fillStyle = text!;
      g.textAlign = "right";
      g.fillText(humanBytes(size), 184, y + BAR / 2);
      g.fillText(used, 240, y + BAR / 2);
      g.textAlign = "left";
      g.fillStyle = faint!;
      const pool = t.pools[t.pool[segment]!]!;
      g.fillText(pool === "default pool" ? this.page.strings[t.kind[segment]!]!.slice(0, 6) : "pool", 248, y + BAR / 2);
      const [left, wide] = this.extent(row);
      const scale = wide / (size || 1);
      g.fillStyle = colors[2]!;
      g.fillRect(left, y, wide, BAR);
      let at = 0;
      let pixel = -1;
      for (let b = t.first[segment]!; b < t.first[segment + 1]!; b++) {
        const bytes = t.block.bytes[b]!;
        const state = t.block.state[b]!;
        const x = left + at * scale;
        const w = bytes * scale;
        at += bytes;
        if (state === 2) {
          // a free remainder has an edge, so that fragments can be counted
          if (w >= 4) {
            g.strokeStyle = edge!;
            g.globalAlpha = 0.35;
            g.lineWidth = 1;
            g.strokeRect(x + 0.5, y + 0.5, w - 1, BAR - 1);
            g.globalAlpha = 1;
          }
          continue;
        }
        // blocks narrower than a pixel: one in each pixel is enough to see
        if (w < 1 && Math.floor(x) === pixel) continue;
        pixel = Math.floor(x);
        g.fillStyle = colors[state]!;
        g.fillRect(x, y, Math.max(w > 3 ? w - 1 : w, 0.8), BAR);
      }
      for (const [[r, block], color, thick] of [
        [this.hovered, edge, 1],
        [this.chosen, focus, 2],
      ] as [[number, number], string, number][]) {
        if (r !== row) continue;
        let x = left;
        let w = wide;
        if (block >= 0) {
          for (let b = t.first[segment]!; b < block; b++) x += t.block.bytes[b]! * scale;
          w = Math.max(3, t.block.bytes[block]! * scale);
        }
        g.strokeStyle = color;
        g.lineWidth = thick;
        g.strokeRect(x - 0.5, y - 0.5, w + 1, BAR + 1);
      }
    }
  }

  /** What there is to say about a block, its stack leaf first. */
  lines(segment: number, block: number, frames = Infinity): string[] {
    const t = this.table!;
    const lines: string[] = [];
    if (block >= 0) {
      const state = t.block.state[block]!;
      const bytes = t.block.bytes[block]!;
      const asked = t.block.requested[block]!;
      lines.push(`${humanBytes(bytes)} ${STATES[state]}`);
      lines.push(
        `at ${hex(t.block.address[block]!)}` +
          (state === 2 || asked === bytes ? "" : `, ${humanBytes(asked)} asked for`),
      );
      const stack = this.stack(t.block.node[block]!, frames < Infinity);
      lines.push(...stack.slice(0, frames));
      if (stack.length > frames) lines.push(`... ${stack.length - frames} more frames`);
    }
    lines.push(
      `segment ${hex(t.address[segment]!)}: ${this.segmentText(segment)}, ` +
        `${percent(this.allocated[segment]!, t.bytes[segment]!)} allocated, stream ${t.stream[segment]}`,
    );
    return lines;
  }

  private stack(node: number, short: boolean): string[] {
    const { trie, frames, strings } = this.page;
    const found: string[] = [];
    for (let up = node; up !== 0; up = trie.parent[up]!) {
      const frame = trie.frame[up]!;
      const line = frames.line[frame]!;
      const name = strings[frames.name[frame]!]!;
      found.push((short ? shortName(name) : name) + (line ? `:${line}` : ""));
    }
    return found;
  }

  private moved(event: MouseEvent): void {
    const found = this.at(event.offsetX, event.offsetY);
    this.look(found);
    if (found[0] >= 0)
      this.tooltip.show(event.clientX, event.clientY, this.lines(this.rows[found[0]]!, found[1], 10));
  }

  private look(found: [number, number]): void {
    if (found[0] < 0) this.tooltip.hide();
    if (found[0] === this.hovered[0] && found[1] === this.hovered[1]) return;
    this.hovered = found;
    this.area.redraw();
  }

  private pressed(event: KeyboardEvent): void {
    if (!this.table || !this.rows.length || event.ctrlKey || event.metaKey || event.altKey) return;
    let [row, block] = this.chosen;
    const key = event.key;
    if (key === "ArrowDown" || key === "ArrowUp") {
      row = Math.min(this.rows.length - 1, Math.max(0, row + (key === "ArrowDown" ? 1 : -1)));
      block = -1;
    } else if ((key === "ArrowLeft" || key === "ArrowRight") && row >= 0) {
      const segment = this.rows[row]!;
      const [first, end] = [this.table.first[segment]!, this.table.first[segment + 1]!];
      if (first === end) return;
      block = block < 0 ? first : block + (key === "ArrowRight" ? 1 : -1);
      block = Math.min(end - 1, Math.max(first, block));
    } else return;
    event.preventDefault();
    this.choose(row, block);
    const y = row * ROW - this.area.top;
    if (y < 0) this.area.scroller.scrollTop += y;
    else if (y + 2 * ROW > this.area.height)
      this.area.scroller.scrollTop += y + 2 * ROW - this.area.height;
  }
}
