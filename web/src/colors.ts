// What a frame belongs to, and the colour for that.

import type { Page } from "./data";
import type { Tree } from "./tree";

export type ColorBy = "package" | "origin" | "root";
export type Theme = "light" | "dark";

export const ORIGINS = ["your code", "torch", "other packages", "standard library", "native", "no stack"];

/** Package of a frame: the folder below site-packages, else what its name begins with. */
export function packageOf(name: string, file: string): string {
  if (name.startsWith("[")) return "no stack";
  const path = file.replaceAll("\\", "/");
  const installed = /\/(?:site|dist)-packages\/([^/]+)/.exec(path);
  if (installed) return installed[1]!.replace(/\.py$/, "");
  if (/\/torchinductor_[^/]*\//.test(path)) return "inductor";
  if (/\/python3(?:\.\d+)?\//.test(path) || /[/\\]Lib[/\\][a-z_]+(?:\.py|[/\\])/.test(file))
    return "standard library";
  if (isNative(name, file)) return nativePackage(name);
  const written = file ? /^([^/]+\.pyx?):/.exec(name) : null; // file.py:function, of plain snapshots
  if (!written) {
    const module = /^([A-Za-z_]\w*)\.[A-Za-z_<]/.exec(name);
    if (module && !path.endsWith(`/${module[1]}.py`) && KNOWN.has(module[1]!)) return module[1]!;
  }
  return path.slice(path.lastIndexOf("/") + 1) || "your code";
}

const KNOWN = new Set(["torch", "torchvision", "torchaudio", "transformers", "numpy", "triton"]);
const NATIVE_FILE = /\.(?:c|cc|cpp|cxx|cu|cuh|h|hh|hpp|inl|so|so\.[\d.]+)$/;

function isNative(name: string, file: string): boolean {
  return name.includes("::") || !file || file === "??" || NATIVE_FILE.test(file);
}

function nativePackage(name: string): string {
  const found = /\b(at|c10|c10d|torch|nccl|cudnn|cublas|cutlass|triton)(?:::|_)/.exec(name);
  return found ? `${found[1]} (native)` : "native";
}

/** Index into ORIGINS. */
export function originOf(name: string, file: string): number {
  const owner = packageOf(name, file);
  if (owner === "no stack") return 5;
  if (owner === "torch" || owner === "inductor" || owner === "functorch") return 1;
  if (owner === "standard library") return 3;
  if (owner.endsWith("native") || owner.endsWith("(native)")) return 4;
  return /\/(?:site|dist)-packages\//.test(file.replaceAll("\\", "/")) || KNOWN.has(owner) ? 2 : 0;
}

const ORIGIN_HUES = [28, 212, 160, 268, 330, -1];
// apart from one another also for people who tell red and green badly
const HUES = [28, 150, 48, 8, 300, 92, 176, 72];
// what is in nearly every graph always has the same
const FIXED: Record<string, number> = {
  torch: 212,
  inductor: 240,
  "torch (native)": 330,
  native: 330,
  "at (native)": 330,
  "c10 (native)": 330,
  "standard library": 268,
};

function hue(text: string): number {
  const fixed = FIXED[text];
  if (fixed !== undefined) return fixed;
  let hash = 2166136261;
  for (let i = 0; i < text.length; i++) hash = Math.imul(hash ^ text.charCodeAt(i), 16777619);
  return HUES[(hash >>> 7) % HUES.length]!;
}

/** A little lighter or darker by name, so that neighbours of one colour can be told apart. */
function shade(text: string): number {
  let hash = 5381;
  for (let i = 0; i < text.length; i++) hash = (Math.imul(hash, 33) + text.charCodeAt(i)) | 0;
  return ((hash >>> 3) % 9) - 4;
}

function paint(hueOf: number, theme: Theme, light: number): string {
  const grey = hueOf < 0;
  if (theme === "dark") return `hsl(${Math.max(hueOf, 0)} ${grey ? 4 : 42}% ${33 + light}%)`;
  return `hsl(${Math.max(hueOf, 0)} ${grey ? 6 : 68}% ${76 + light}%)`;
}

export type Painter = (node: number) => string;

/** Colours of a tree's nodes. */
export function painter(page: Page, tree: Tree, by: ColorBy, theme: Theme, inverted: boolean): Painter {
  const known = new Map<number, string>();
  const root = paint(-1, theme, 0);
  const named = (node: number): string => {
    const name = page.strings[tree.name[node]!]!;
    const frame = tree.frame[node]!;
    const file = frame >= 0 ? page.strings[page.frames.file[frame]!]! : "";
    if (frame < 0) return paint(-1, theme, 2 * shade(name)); // segments and states of blocks
    if (by === "origin") return paint(ORIGIN_HUES[originOf(name, file)]!, theme, shade(name));
    const owner = packageOf(name, file);
    return paint(owner === "no stack" ? -1 : hue(owner), theme, shade(name));
  };
  const tower = (node: number): string => {
    let at = node;
    while (tree.depth[at]! > 1) at = tree.parent[at]!;
    const first = page.strings[tree.name[at]!]!;
    const light = shade(page.strings[tree.name[node]!]!);
    return paint(first.startsWith("[") ? -1 : hue(first), theme, light);
  };
  const byTower = by === "root" && !inverted;
  return (node) => {
    if (node === 0) return root;
    const key = byTower ? node : tree.name[node]! * 2 + Number(tree.frame[node]! < 0);
    let color = known.get(key);
    if (color === undefined) known.set(key, (color = byTower ? tower(node) : named(node)));
    return color;
  };
}

/** Red where there is more than before, blue where there is less, the stronger the larger the part
 * of the node that changed. */
export function differencePainter(tree: Tree, theme: Theme): Painter {
  return (node) => {
    const before = tree.before![node]!;
    const change = tree.total[node]! - before;
    if (change === 0) return paint(-1, theme, theme === "dark" ? -3 : 6);
    const part = Math.abs(change) / Math.max(before, tree.total[node]!);
    const strength = 0.2 + 0.8 * Math.sqrt(part);
    const shown = change > 0 ? 4 : 214;
    if (theme === "dark") return `hsl(${shown} ${20 + 45 * strength}% ${28 + 10 * strength}%)`;
    return `hsl(${shown} ${30 + 55 * strength}% ${90 - 24 * strength}%)`;
  };
}
