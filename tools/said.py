"""Write the table of docs/internals/checked.md from what the tools said in a run of the tests, or check it.

    python tools/said.py FILE            write; FILE is what the tests noted
    python tools/said.py FILE --check    exit 1 where the page says something else

`make check-deploy` runs the second, `make checked` the first.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "internals" / "checked.md"
BLOCK = re.compile(r"(?<=<!-- generated: said -->\n).*?(?=<!-- end -->)", re.DOTALL)

TOOLS = {
    "promtool": ("servers", "github.com/prometheus/prometheus"),
    "Prometheus": ("servers", "github.com/prometheus/prometheus"),
    "Alertmanager": ("servers/alertmanager", "github.com/prometheus/alertmanager"),
    "OpenTelemetry Collector": ("servers", "go.opentelemetry.io/collector/cmd/builder"),
    "Helm": ("k8s", "helm.sh/helm/v3"),
    "kube-apiserver": ("k8s", "k8s.io/kubernetes"),
    "prometheus-operator": ("k8s", "github.com/prometheus-operator/prometheus-operator"),
}
"""Name -> the folder of the go.mod that pins it, and its module; the order of the table."""


def version(tool: str) -> str:
    """The pinned one, as its project writes it."""
    folder, module = TOOLS[tool]
    text = (ROOT / "tools" / folder / "go.mod").read_text(encoding="utf-8")
    found = re.search(rf"^\s+{re.escape(module)} v(\S+)", text, re.MULTILINE)
    if found is None:
        raise SystemExit(f"said.py: tools/{folder}/go.mod does not pin {module}")
    pinned = found[1]
    if module == "github.com/prometheus/prometheus":  # the module v0.316.0 is Prometheus 3.16.0
        _, minor, patch = pinned.split(".")
        pinned = f"{int(minor) // 100}.{int(minor) % 100}.{patch}"
    return pinned


def table(lines: list[str]) -> str:
    """The rows in the order of the tools, and within one as they came."""
    rows = [json.loads(line) for line in lines]
    told = ["", "| tool | question | answer |", "| --- | --- | --- |"]
    for tool in TOOLS:
        mine = {(row["asked"], row["answer"]) for row in rows if row["tool"] == tool}
        told += [
            f"| {tool} {version(tool)} | {asked} | {answer} |" for asked, answer in sorted(mine)
        ]
    return "\n".join([*told, "", ""])


def main() -> int:
    """0 where all is well."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    before = PAGE.read_text(encoding="utf-8")
    told = table(options.file.read_text(encoding="utf-8").splitlines())
    after = BLOCK.sub(lambda _: told, before)
    if options.check and after != before:
        new, old = set(after.splitlines()), set(before.splitlines())
        for line in sorted(new ^ old):
            sys.stderr.write(f"{'now' if line in new else 'page'}: {line}\n")
        sys.stderr.write("docs/internals/checked.md says something else: run `make checked`\n")
        return 1
    if not options.check:
        PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
