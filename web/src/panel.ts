// A flame graph with its way back and its table of functions.

import { type ColorBy, differencePainter, painter, type Theme } from "./colors";
import type { Page } from "./data";
import { el, type Tooltip } from "./dom";
import { Flame } from "./flame";
import { count, humanBytes, percent, shortName, signedBytes } from "./format";
import { functions, type FunctionRow } from "./functions";
import { type Match, search } from "./search";
import { nameOf, pathTo, type Tree } from "./tree";

const MOST_ROWS = 300;

type Order = "self" | "total" | "name";

export interface Look {
  colorBy: ColorBy;
  theme: Theme;
  inverted: boolean;
}

export class FlamePanel {
  readonly element = el("div", { class: "view" });
  readonly side = el("div", { class: "side", role: "region", "aria-label": "functions" });
  readonly flame: Flame;
  tree: Tree | null = null;
  match: Match | null = null;
  private readonly crumbs = el("nav", { class: "crumbs", "aria-label": "zoom" });
  private rows: FunctionRow[] = [];
  private order: Order = "self";
  private text = "";
  private exact = false;
  private look: Look = { colorBy: "package", theme: "light", inverted: false };

  constructor(
    private readonly page: Page,
    tooltip: Tooltip,
    label: string,
    private readonly events: {
      /** What is to be said about where one is. */
      said(text: string): void;
      /** The table asks to search for a name. */
      searched(name: string): void;
    },
  ) {
    const pane = el("div", { class: "pane" });
    this.element.append(this.crumbs, pane);
    this.flame = new Flame(
      pane,
      page,
      tooltip,
      {
        zoomed: (node) => this.showCrumbs(node),
        looked: (node) => this.events.said(node >= 0 ? this.flame.lines(node).join(" | ") : ""),
      },
      label,
    );
  }

  show(tree: Tree, look: Look): void {
    this.tree = tree;
    this.look = look;
    this.flame.setTree(tree, this.paint());
    this.rows = functions(tree, look.inverted);
    this.search(this.text, this.exact);
  }

  restyle(look: Look): void {
    this.look = look;
    if (this.tree) this.flame.setPaint(this.paint());
  }

  search(text: string, exact: boolean): void {
    this.text = text;
    this.exact = exact;
    this.match = this.tree && text ? search(this.page, this.tree, text, exact) : null;
    this.flame.setMatch(this.match);
    this.showTable();
  }

  /** What a search found, in words. */
  found(): string {
    if (!this.match || !this.tree) return "";
    const { matches, bytes, beforeBytes } = this.match;
    const nodes = `${count(matches)} ${matches === 1 ? "frame" : "frames"}`;
    if (this.tree.before)
      return `${nodes}: ${humanBytes(beforeBytes)} before, ${humanBytes(bytes)} after`;
    return `${nodes}: ${humanBytes(bytes)}, ${percent(bytes, this.tree.total[0]!)}`;
  }

  private paint() {
    const { colorBy, theme, inverted } = this.look;
    const tree = this.tree!;
    return tree.before
      ? differencePainter(tree, theme)
      : painter(this.page, tree, colorBy, theme, inverted);
  }

  private showCrumbs(node: number): void {
    const tree = this.flame.tree!;
    const path = pathTo(tree, node);
    const shown = path.length > 7 ? [...path.slice(0, 2), -1, ...path.slice(-4)] : path;
    const parts: Node[] = [];
    for (const at of shown) {
      if (parts.length) parts.push(el("span", { "aria-hidden": "true" }, ">"));
      if (at < 0) parts.push(el("span", {}, `${path.length - 6} more`));
      else {
        const name = nameOf(this.page, tree, at);
        parts.push(
          at === node
            ? el("span", { class: "here", title: name }, name)
            : el("button", { type: "button", title: name, click: () => this.flame.zoom(at) }, name),
        );
      }
    }
    const total = tree.total[node]!;
    const text = tree.before
      ? `${humanBytes(tree.before[node]!)} before, ${humanBytes(total)} after (${signedBytes(total - tree.before[node]!)})`
      : `${humanBytes(total)}, ${percent(total, tree.total[0]!)}`;
    parts.push(el("span", {}, `- ${text}`));
    this.crumbs.replaceChildren(...parts);
  }

  private showTable(): void {
    if (!this.tree) return;
    const difference = this.tree.before !== null;
    const value = (row: FunctionRow, order: "self" | "total") =>
      difference
        ? order === "self"
          ? row.self - row.beforeSelf
          : row.total - row.beforeTotal
        : row[order];
    const { strings } = this.page;
    const wanted = this.text && !this.exact ? this.text.toLowerCase() : "";
    const rows = this.rows.filter(
      (row) =>
        (!difference || value(row, "self") !== 0 || value(row, "total") !== 0) &&
        (!wanted || wanted.startsWith("/") || strings[row.name]!.toLowerCase().includes(wanted)),
    );
    const { order } = this;
    rows.sort(
      order === "name"
        ? (a, b) => (strings[a.name]! < strings[b.name]! ? -1 : 1)
        : (a, b) => Math.abs(value(b, order)) - Math.abs(value(a, order)) || b.total - a.total,
    );
    const shown = rows.slice(0, MOST_ROWS);
    const head = (by: Order, label: string) =>
      el(
        "th",
        { scope: "col", "aria-sort": order === by ? "descending" : "none" },
        el("button", { type: "button", click: () => ((this.order = by), this.showTable()) }, order === by ? `${label} \u25be` : label),
      );
    const cell = (row: FunctionRow, by: "self" | "total") => {
      const bytes = value(row, by);
      if (!difference) return el("td", { title: `${count(bytes)} bytes` }, humanBytes(bytes));
      const color = bytes > 0 ? "red" : bytes < 0 ? "blue" : "";
      return el("td", { title: `${count(bytes)} bytes`, class: color }, signedBytes(bytes));
    };
    const body = shown.map((row) => {
      const name = strings[row.name]!;
      const chosen = this.exact && this.text === name;
      return el(
        "tr",
        { "aria-selected": String(chosen), click: () => this.events.searched(chosen ? "" : name) },
        el("td", { title: name }, el("button", { type: "button" }, shortName(name))),
        cell(row, "self"),
        cell(row, "total"),
      );
    });
    const more = rows.length - shown.length;
    if (more > 0)
      body.push(el("tr", {}, el("td", { colspan: 3 }, el("small", {}, `${count(more)} more functions: search for one`))));
    this.side.replaceChildren(
      el(
        "table",
        { class: difference ? "changes" : "" },
        el("thead", {}, el("tr", {}, head("name", "function"), head("self", difference ? "self +/-" : "self"), head("total", difference ? "total +/-" : "total"))),
        el("tbody", {}, ...body),
      ),
    );
  }
}
