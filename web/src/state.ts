// What the page is asked to show, and all that can be asked of it by button and by key.

import type { ColorBy, Theme } from "./colors";
import type { Kind, View } from "./data";
import type { Asked } from "./select";

export type Widths = "max" | "after";

export interface State extends Asked {
  theme: Theme;
  colorBy: ColorBy;
  /** Leaf first. */
  inverted: boolean;
  /** Root at the bottom. */
  flipped: boolean;
  /** Lines of one function apart. */
  lines: boolean;
  widths: Widths;
  /** What is searched for, and whether a name has to be just that. */
  text: string;
  exact: boolean;
}

export interface Actions {
  readonly state: Readonly<State>;
  /** Of all files. */
  readonly devices: readonly number[];
  setView(view: View): void;
  setKind(kind: Kind): void;
  setDevice(device: number): void;
  setTheme(theme: Theme): void;
  setColor(by: ColorBy): void;
  setInverted(on: boolean): void;
  setFlipped(on: boolean): void;
  setLines(on: boolean): void;
  setWidths(widths: Widths): void;
  search(text: string, exact: boolean): void;
  focusSearch(): void;
  /** Everything of the flame graph again. */
  reset(): void;
  /** Zooms the timeline; null: all of it. */
  zoomTime(factor: number | null): void;
  showHelp(): void;
}

export const COLORS: readonly ColorBy[] = ["package", "origin", "root"];

export function other(theme: Theme): Theme {
  return theme === "dark" ? "light" : "dark";
}
