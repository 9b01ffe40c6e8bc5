// The flame graph: drawn on a canvas, and only what is in view and wide enough to be seen.

import type { Painter } from "./colors";
import type { Page } from "./data";
import { cssColor, ScrolledCanvas, type Tooltip } from "./dom";
import { count, humanBytes, percent, shortName, signedBytes } from "./format";
import type { Match } from "./search";
import { nameOf, pathTo, type Tree } from "./tree";

const ROW = 19;
const NARROWEST = 0.6;
const LABEL_FROM = 26;
const ZOOM_MS = 140;

export interface FlameEvents {
  /** The node that the view is zoomed to, 0 for everything. */
  zoomed(node: number): void;
  /** The node under the pointer or chosen by keys, -1 for none. */
  looked(node: number): void;
}

export class Flame {
  tree: Tree | null = null;
  zoomedTo = 0;
  /** Root at the bottom. */
  flipped = false;
  private readonly area: ScrolledCanvas;
  private paint: Painter = () => "#888";
  private match: Match | null = null;
  private from = 0;
  private to = 1;
  private hovered = -1;
  private chosen = -1;
  private animation = 0;
  /** No zoom is under way. */
  atRest = true;
  private colors: Record<string, string> = {};

  constructor(
    host: HTMLElement,
    private readonly page: Page,
    private readonly tooltip: Tooltip,
    private readonly events: FlameEvents,
    label: string,
  ) {
    this.area = new ScrolledCanvas(host, label, () => this.draw(), () => this.sized());
    const { canvas } = this.area;
    canvas.addEventListener("mousemove", (event) => this.moved(event));
    canvas.addEventListener("mouseleave", () => this.look(-1));
    canvas.addEventListener("click", (event) => {
      const node = this.at(event.offsetX, event.offsetY);
      if (node >= 0) this.choose(node), this.zoom(node);
    });
    canvas.addEventListener("wheel", (event) => this.wheeled(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.pressed(event));
  }

  setTree(tree: Tree, paint: Painter): void {
    const path = this.tree ? pathTo(this.tree, this.zoomedTo).map((n) => this.tree!.name[n]!) : [];
    this.tree = tree;
    this.paint = paint;
    this.match = null;
    this.hovered = this.chosen = -1;
    this.zoomedTo = this.follow(path);
    cancelAnimationFrame(this.animation);
    this.atRest = true;
    [this.from, this.to] = this.range(this.zoomedTo);
    this.sized();
    this.area.scroller.scrollTop = this.flipped ? this.area.scroller.scrollHeight : 0;
    this.events.zoomed(this.zoomedTo);
  }

  setPaint(paint: Painter): void {
    this.paint = paint;
    this.colors = {};
    this.area.redraw();
  }

  setMatch(match: Match | null): void {
    this.match = match;
    this.area.redraw();
  }

  /** The same place in another tree, as far as it is there. */
  private follow(path: number[]): number {
    const tree = this.tree!;
    let at = 0;
    for (const name of path.slice(1)) {
      const first = tree.firstChild[at]!;
      let next = -1;
      for (let i = first; i < first + tree.children[at]!; i++) if (tree.name[i] === name) next = i;
      if (next < 0) break;
      at = next;
    }
    return at;
  }

  private range(node: number): [number, number] {
    const tree = this.tree!;
    const from = tree.x[node]!;
    return [from, from + (tree.width[node]! || 1)];
  }

  private sized(): void {
    if (!this.tree) return;
    this.area.setContentHeight((this.tree.levels.length - 1) * ROW + 6);
    this.area.redraw();
  }

  zoom(node: number): void {
    if (!this.tree) return;
    this.zoomedTo = node;
    const [from, to] = this.range(node);
    const [oldFrom, oldTo] = [this.from, this.to];
    cancelAnimationFrame(this.animation);
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const begin = performance.now();
    const step = (now: number) => {
      const t = still ? 1 : Math.min(1, Math.max(0, (now - begin) / ZOOM_MS));
      const eased = 1 - (1 - t) ** 3;
      this.from = t === 1 ? from : oldFrom + (from - oldFrom) * eased;
      this.to = t === 1 ? to : oldTo + (to - oldTo) * eased;
      this.draw();
      this.atRest = t === 1;
      if (t < 1) this.animation = requestAnimationFrame(step);
    };
    this.atRest = false;
    this.animation = requestAnimationFrame(step);
    this.events.zoomed(node);
  }

  reset(): void {
    this.choose(-1);
    this.zoom(0);
  }

  /** Where a row is, in pixels below the canvas's upper edge. */
  private y(depth: number): number {
    const place = depth * ROW;
    if (!this.flipped) return place - this.area.top;
    const height = Math.max((this.tree!.levels.length - 1) * ROW + 6, this.area.height);
    return height - place - ROW - this.area.top;
  }

  private at(x: number, y: number): number {
    const tree = this.tree;
    if (!tree) return -1;
    const depth = this.flipped
      ? Math.floor((this.y(0) + ROW - y) / ROW)
      : Math.floor((y + this.area.top) / ROW);
    if (depth < 0 || depth >= tree.levels.length - 1) return -1;
    const value = this.from + (x / this.area.width) * (this.to - this.from);
    let low = tree.levels[depth]!;
    let high = tree.levels[depth + 1]! - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (tree.x[middle]! <= value) low = middle;
      else high = middle - 1;
    }
    // nodes of no width share their place with the next
    while (low > tree.levels[depth]! && tree.width[low] === 0) low -= 1;
    return value >= tree.x[low]! && value < tree.x[low]! + tree.width[low]! ? low : -1;
  }

  /** Middle of a node in the window, for tests and for keys; null where it is out of view. */
  placeOf(node: number): { x: number; y: number } | null {
    const tree = this.tree!;
    const scale = this.area.width / (this.to - this.from);
    const left = Math.max(0, (tree.x[node]! - this.from) * scale);
    const right = Math.min(
      this.area.width,
      (tree.x[node]! + tree.width[node]! - this.from) * scale,
    );
    const y = this.y(tree.depth[node]!) + ROW / 2;
    if (right - left < 1 || y < 0 || y > this.area.height) return null;
    const box = this.area.canvas.getBoundingClientRect();
    return { x: box.left + (left + right) / 2, y: box.top + y };
  }

  draw(): void {
    const { context: g, width, height } = this.area;
    this.colors = {
      back: cssColor("back"),
      text: cssColor("frame-text"),
      edge: cssColor("frame-edge"),
      hit: cssColor("hit"),
      hitText: cssColor("hit-text"),
      focus: cssColor("focus"),
    };
    g.globalAlpha = 1;
    g.fillStyle = this.colors.back!;
    g.fillRect(0, 0, width, height);
    const tree = this.tree;
    if (!tree) return;
    g.font = `12px ${cssColor("font")}`;
    g.textBaseline = "middle";
    const searching = this.match !== null;
    const zoomDepth = tree.depth[this.zoomedTo]!;
    const scale = width / (this.to - this.from);
    const todo = [0];
    while (todo.length) {
      const node = todo.pop()!;
      const left = (tree.x[node]! - this.from) * scale;
      const right = left + tree.width[node]! * scale;
      if (right <= 0 || left >= width) continue;
      const x = Math.max(0, left);
      const w = Math.min(width, right) - x;
      const y = this.y(tree.depth[node]!);
      if (y > -ROW && y < height) {
        const above = tree.depth[node]! < zoomDepth;
        const hit = searching && this.match!.hit[node] === 1;
        g.globalAlpha = above ? 0.45 : searching && !hit ? 0.4 : 1;
        g.fillStyle = hit ? this.colors.hit! : this.paint(node);
        g.fillRect(x, y, w > 2 ? w - 1 : w, ROW - 1);
        if (w > LABEL_FROM) this.label(g, node, x, y, w, hit);
        if (node === this.hovered || node === this.chosen) {
          g.globalAlpha = 1;
          g.strokeStyle = node === this.chosen ? this.colors.focus! : this.colors.edge!;
          g.lineWidth = node === this.chosen ? 2 : 1;
          g.strokeRect(x + 1, y + 1, Math.max(1, w - 3), ROW - 3);
        }
      }
      // rows that are out of view above still have children in view, on the far side none are
      const further = this.flipped ? y > -ROW : y < height;
      if (!further) continue;
      const first = tree.firstChild[node]!;
      let narrow = -1;
      let drawnTo = 0;
      for (let i = first; i < first + tree.children[node]!; i++) {
        if (tree.width[i]! * scale >= NARROWEST) todo.push(i);
        else if (narrow < 0) {
          // the widest come first: from here on they are one thin bar
          narrow = i;
          drawnTo = left + tree.width[node]! * scale;
          break;
        }
      }
      if (narrow >= 0) this.rest(g, narrow, first + tree.children[node]!, scale, drawnTo);
    }
    g.globalAlpha = 1;
  }

  private rest(g: CanvasRenderingContext2D, from: number, end: number, scale: number, right: number) {
    const tree = this.tree!;
    const last = end - 1;
    const x = Math.max(0, (tree.x[from]! - this.from) * scale);
    const to = Math.min(
      this.area.width,
      right,
      (tree.x[last]! + tree.width[last]! - this.from) * scale,
    );
    if (to - x < 0.3) return;
    g.globalAlpha = 0.35;
    g.fillStyle = this.paint(from);
    g.fillRect(x, this.y(tree.depth[from]!), Math.max(0.5, to - x - 0.5), ROW - 1);
  }

  private label(
    g: CanvasRenderingContext2D,
    node: number,
    x: number,
    y: number,
    w: number,
    hit: boolean,
  ): void {
    const tree = this.tree!;
    let text = nameOf(this.page, tree, node);
    const room = w - 8;
    if (text.length > room / 6) text = shortName(text);
    // 12 px letters are at least 3 px wide: no need to measure what cannot fit
    if (text.length > room / 3) text = text.slice(0, Math.ceil(room / 3));
    let wide = g.measureText(text).width;
    if (wide > room) {
      let fits = Math.floor((text.length * room) / wide);
      while (fits > 0 && g.measureText(`${text.slice(0, fits)}...`).width > room) fits -= 1;
      if (fits < 2) return;
      text = `${text.slice(0, fits)}...`;
      wide = room;
    } else if (room - wide > 90) {
      text += `  ${this.worth(node)}`;
    }
    g.globalAlpha = Math.max(g.globalAlpha, 0.75);
    g.fillStyle = hit ? this.colors.hitText! : this.colors.text!;
    g.fillText(text, x + 4, y + ROW / 2);
  }

  private worth(node: number): string {
    const { total, before } = this.tree!;
    return before ? signedBytes(total[node]! - before[node]!) : humanBytes(total[node]!);
  }

  private moved(event: MouseEvent): void {
    const node = this.at(event.offsetX, event.offsetY);
    this.look(node);
    if (node >= 0) this.tooltip.show(event.clientX, event.clientY, this.lines(node));
  }

  private look(node: number): void {
    if (node < 0) this.tooltip.hide();
    if (node === this.hovered) return;
    this.hovered = node;
    this.area.canvas.style.cursor = node >= 0 ? "pointer" : "default";
    this.area.redraw();
    this.events.looked(node);
  }

  choose(node: number): void {
    this.chosen = node;
    this.area.redraw();
    this.events.looked(node);
  }

  /** What there is to say about a node. */
  lines(node: number): string[] {
    const { page } = this;
    const tree = this.tree!;
    const frame = tree.frame[node]!;
    const lines = [nameOf(page, tree, node)];
    if (frame >= 0) {
      const file = page.strings[page.frames.file[frame]!]!;
      const line = page.frames.line[frame]!;
      if (file) lines.push(tree.lines[node] ? `${file}, several lines` : line ? `${file}:${line}` : file);
    }
    const total = tree.total[node]!;
    if (tree.before) {
      const before = tree.before[node]!;
      const change = total - before;
      const grown = before ? ` (${change > 0 ? "+" : ""}${((100 * change) / before).toFixed(1)} %)` : " (new)";
      lines.push(
        `before ${humanBytes(before)} in ${count(tree.beforeObjects![node]!)}, ` +
          `after ${humanBytes(total)} in ${count(tree.objects[node]!)}`,
        change ? `change ${signedBytes(change)}, ${count(change)} bytes${total ? grown : " (gone)"}` : "no change",
      );
      return lines;
    }
    lines.push(
      `${humanBytes(total)} (${count(total)} bytes), ${percent(total, tree.total[0]!)} of all` +
        (this.zoomedTo ? `, ${percent(total, tree.total[this.zoomedTo]!)} of what is shown` : ""),
      `${count(tree.objects[node]!)} allocations` +
        (tree.self[node]! && tree.children[node]
          ? `, ${humanBytes(tree.self[node]!)} right here`
          : ""),
    );
    return lines;
  }

  private wheeled(event: WheelEvent): void {
    if (!this.tree || !(event.ctrlKey || event.metaKey || event.shiftKey)) return;
    event.preventDefault();
    const all = this.tree.width[0] || 1;
    const range = this.to - this.from;
    if (event.shiftKey) {
      const moved = ((event.deltaY || event.deltaX) / this.area.width) * range;
      this.from = Math.min(Math.max(0, this.from + moved), all - range);
      this.to = this.from + range;
    } else {
      const middle = this.from + (event.offsetX / this.area.width) * range;
      const next = Math.min(all, Math.max(all / 1e9, range * 1.0018 ** event.deltaY));
      const part = (middle - this.from) / range;
      this.from = Math.min(Math.max(0, middle - part * next), all - next);
      this.to = this.from + next;
    }
    cancelAnimationFrame(this.animation);
    this.atRest = true;
    this.area.redraw();
  }

  private pressed(event: KeyboardEvent): void {
    const tree = this.tree;
    if (!tree || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = this.chosen >= 0 ? this.chosen : this.zoomedTo;
    const [toLeaf, toRoot] = this.flipped ? ["ArrowUp", "ArrowDown"] : ["ArrowDown", "ArrowUp"];
    let next = -1;
    if (event.key === toLeaf) next = tree.children[at] ? tree.firstChild[at]! : -1;
    else if (event.key === toRoot) next = tree.parent[at]!;
    else if (event.key === "ArrowLeft") next = at - 1;
    else if (event.key === "ArrowRight") next = at + 1;
    else if (event.key === "Enter") return event.preventDefault(), this.zoom(at);
    else if (event.key === "Backspace") {
      event.preventDefault();
      const up = Math.max(0, tree.parent[this.zoomedTo]!);
      this.choose(up);
      return this.zoom(up);
    } else return;
    event.preventDefault();
    const sideways = event.key === "ArrowLeft" || event.key === "ArrowRight";
    if (next < 0 || next >= tree.size || (sideways && tree.depth[next] !== tree.depth[at])) return;
    this.choose(next);
    this.reveal(next);
  }

  private reveal(node: number): void {
    const y = this.y(this.tree!.depth[node]!);
    if (y < 0) this.area.scroller.scrollTop += y;
    else if (y + ROW > this.area.height) this.area.scroller.scrollTop += y + ROW - this.area.height;
  }
}
