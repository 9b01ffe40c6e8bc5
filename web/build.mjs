// Builds the page: one HTML file with its script and style inside, and a policy that allows these
// two and nothing else. What the page shows is put in later, by gpumem_otel/page/html.py.
//
//     node build.mjs [OUT.html] [--sources HASH]

import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { sources: { type: "string", default: "" } },
});
const target = positionals[0] ?? join(here, "..", "gpumem_otel", "web", "page.html");

async function bundled(entry) {
  const result = await build({
    absWorkingDir: here,
    entryPoints: [entry],
    bundle: true,
    minify: true,
    write: false,
    format: "iife",
    target: "es2022",
    charset: "ascii",
    legalComments: "none",
    logLevel: "warning",
  });
  // an end tag inside the text would end the element
  return result.outputFiles[0].text.trim().replaceAll("</", "<\\/");
}

const hash = (text) => `'sha256-${createHash("sha256").update(text, "utf8").digest("base64")}'`;

const script = await bundled("src/main.ts");
const style = await bundled("src/style.css");
const policy = [
  "default-src 'none'",
  `script-src ${hash(script)}`,
  `style-src ${hash(style)}`,
  "base-uri 'none'",
  "form-action 'none'",
].join("; ");
const parts = { policy, sources: values.sources, style, script };
const page = readFileSync(join(here, "src", "page.html"), "utf8").replace(
  /@@(policy|sources|style|script)@@/g,
  (_, name) => parts[name],
);
mkdirSync(dirname(target), { recursive: true });
const temporary = `${target}.${process.pid}`;
writeFileSync(temporary, page);
renameSync(temporary, target);
console.log(`${target}: ${page.length} bytes`);
