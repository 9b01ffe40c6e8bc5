// Reads what is in the page, and starts it.

import { App } from "./app";
import { decode } from "./data";
import { el } from "./dom";
import { Probe } from "./probe";

async function start(): Promise<Probe> {
  const payload = document.getElementById("payload")!;
  const page = await decode(payload.textContent!);
  payload.remove();
  const app = new App(page);
  document.getElementById("app")!.replaceWith(app.element);
  app.start();
  return new Probe(app);
}

const ready = start();
ready.catch((error: unknown) => {
  const place = document.getElementById("app") ?? document.body;
  const reason = error instanceof Error ? error.message : String(error);
  const text = `This page could not be read: ${reason}`;
  place.append(el("p", { class: "empty", role: "alert" }, text));
});
Object.assign(window, { gpumem: { ready, app: ready } });
