// What the keys do, and what the file said about itself.

import type { Page } from "./data";
import { el } from "./dom";
import { KEYS } from "./keys";

export function dialogs() {
  const help = el(
    "dialog",
    { "aria-label": "keys" },
    el("h2", {}, "Keys"),
    el(
      "table",
      {},
      el(
        "tbody",
        {},
        ...KEYS.map(({ keys, shown, what }) =>
          el(
            "tr",
            {},
            el("th", { scope: "row" }, ...keys.map((key) => el("kbd", {}, shown ?? key))),
            el("td", {}, what),
          ),
        ),
      ),
    ),
    el("form", { method: "dialog" }, el("button", {}, "Close")),
  );
  const notes = el("dialog", { "aria-label": "notes" });
  const showNotes = (page: Page, comments: string[]) => {
    const lists = page.sources.flatMap((source) =>
      source.warnings.length
        ? [el("h2", {}, source.name), el("ul", {}, ...source.warnings.map((w) => el("li", {}, w)))]
        : [],
    );
    if (comments.length)
      lists.push(el("h2", {}, "About what is shown"), el("ul", {}, ...comments.map((c) => el("li", {}, c))));
    notes.replaceChildren(...lists, el("form", { method: "dialog" }, el("button", {}, "Close")));
    notes.showModal();
  };
  return { help, notes, showNotes };
}
