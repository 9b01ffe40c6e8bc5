// Bundles the unit tests and runs them with node's own runner.

import { spawnSync } from "node:child_process";
import { mkdtempSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = mkdtempSync(join(tmpdir(), "gpumem-page-"));
try {
  const entryPoints = readdirSync(join(here, "test"))
    .filter((name) => name.endsWith(".test.ts"))
    .map((name) => join(here, "test", name));
  await build({
    entryPoints,
    bundle: true,
    outdir: out,
    outExtension: { ".js": ".mjs" },
    platform: "node",
    format: "esm",
    target: "node18",
    sourcemap: "inline",
    logLevel: "warning",
  });
  const files = readdirSync(out).map((name) => join(out, name));
  const done = spawnSync(process.execPath, ["--enable-source-maps", "--test", ...files], {
    stdio: "inherit",
  });
  process.exitCode = done.status ?? 1;
} finally {
  rmSync(out, { recursive: true, force: true });
}
