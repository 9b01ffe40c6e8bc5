// Elements without markup: text is only ever set as text, so no name can become an element.

type Child = Node | string;
type Props = Record<string, string | number | boolean | ((event: any) => void)>;

export function el<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  props: Props = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false) made.setAttribute(name, String(value));
  }
  made.append(...children);
  return made;
}

export interface Choice {
  value: string;
  label: string;
  key?: string;
  title?: string;
  disabled?: boolean;
}

/** A row of buttons of which one is pressed. */
export class Choices {
  readonly element: HTMLElement;
  private readonly buttons = new Map<string, HTMLButtonElement>();

  constructor(label: string, choices: Choice[], pick: (value: string) => void) {
    this.element = el("div", { class: "choices", role: "group", "aria-label": label });
    for (const choice of choices) {
      const button = el(
        "button",
        {
          type: "button",
          "aria-pressed": "false",
          title: choice.title ?? (choice.key ? `key ${choice.key}` : choice.label),
          disabled: choice.disabled ?? false,
          click: () => pick(choice.value),
        },
        choice.label,
      );
      this.buttons.set(choice.value, button);
      this.element.append(button);
    }
  }

  show(value: string): void {
    for (const [name, button] of this.buttons)
      button.setAttribute("aria-pressed", String(name === value));
  }

  allow(value: string, allowed: boolean, title: string): void {
    const button = this.buttons.get(value);
    if (!button) return;
    button.disabled = !allowed;
    button.title = title;
  }
}

/** A control with a word before it. */
export function field(text: string, control: HTMLElement): HTMLElement {
  return el("label", { class: "field" }, text, control);
}

export function select(
  label: string,
  options: [string, string][],
  change: (value: string) => void,
): HTMLSelectElement {
  const made = el(
    "select",
    { "aria-label": label, title: label, change: () => change(made.value) },
    ...options.map(([value, text]) => el("option", { value }, text)),
  );
  return made;
}

export function toggle(label: string, title: string, change: (on: boolean) => void) {
  const button = el(
    "button",
    { type: "button", class: "toggle", "aria-pressed": "false", title },
    label,
  );
  const show = (on: boolean) => button.setAttribute("aria-pressed", String(on));
  button.addEventListener("click", () => change(button.getAttribute("aria-pressed") !== "true"));
  return { element: button, show };
}

/** What is shown beside the pointer. */
export class Tooltip {
  readonly element = el("div", { class: "tooltip", role: "tooltip", hidden: true });

  show(x: number, y: number, lines: string[]): void {
    this.element.replaceChildren(
      ...lines.map((line, i) => el("div", { class: i ? "" : "first" }, line)),
    );
    this.element.hidden = false;
    const { offsetWidth, offsetHeight } = this.element;
    const left = x + 14 + offsetWidth > innerWidth ? x - 10 - offsetWidth : x + 14;
    const top = y + 18 + offsetHeight > innerHeight ? y - 8 - offsetHeight : y + 18;
    this.element.style.left = `${Math.max(4, left)}px`;
    this.element.style.top = `${Math.max(4, top)}px`;
  }

  hide(): void {
    this.element.hidden = true;
  }
}

/** A canvas that stays in view while a taller space beside it is scrolled. */
export class ScrolledCanvas {
  readonly scroller: HTMLElement;
  readonly canvas: HTMLCanvasElement;
  readonly context: CanvasRenderingContext2D;
  width = 0;
  height = 0;
  private readonly space: HTMLElement;
  private waiting = 0;

  constructor(
    host: HTMLElement,
    label: string,
    private readonly draw: () => void,
    resized: () => void,
  ) {
    this.canvas = el("canvas", { tabindex: 0, role: "application", "aria-label": label });
    this.space = el("div", { class: "space" });
    this.scroller = el("div", { class: "scroller" }, this.canvas, this.space);
    host.append(this.scroller);
    this.context = this.canvas.getContext("2d", { alpha: false })!;
    this.scroller.addEventListener("scroll", () => this.redraw());
    new ResizeObserver(() => {
      this.fit();
      resized();
    }).observe(this.scroller);
  }

  get top(): number {
    return this.scroller.scrollTop;
  }

  setContentHeight(height: number): void {
    // the canvas takes part in the layout: the space is what is left below it
    this.space.style.height = `${Math.max(0, height - this.height)}px`;
  }

  redraw(): void {
    if (!this.waiting)
      this.waiting = requestAnimationFrame(() => {
        this.waiting = 0;
        if (this.width > 0 && this.height > 0) this.draw();
      });
  }

  private fit(): void {
    const ratio = devicePixelRatio || 1;
    this.width = this.scroller.clientWidth;
    this.height = this.scroller.clientHeight;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.redraw();
  }
}

/** A variable of the style sheet. */
export function cssColor(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
