"""Write the table of docs/internals/checked.md from what tools reported in a test run, or check it.

    python tools/said.py FILE            write; FILE is what the tests recorded
    python tools/said.py FILE --check    exit 1 if the page differs

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
    """The pinned version, as its project writes it."""
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


def table(answers: list[str]) -> str:
    """The rows in the order of the tools, sorted for each tool."""
    rows = [json.loads(answer) for answer in answers]
    lines = ["", "| tool | question | answer |", "| --- | --- | --- |"]
    for tool in TOOLS:
        mine = {(row["asked"], row["answer"]) for row in rows if row["tool"] == tool}
        lines += [
            f"| {tool} {version(tool)} | {asked} | {answer} |" for asked, answer in sorted(mine)
        ]
    return "\n".join([*lines, "", ""])


def main() -> int:
    """0 if the page is current."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    before = PAGE.read_text(encoding="utf-8")
    rows = table(options.file.read_text(encoding="utf-8").splitlines())
    after = BLOCK.sub(lambda _: rows, before)
    if options.check and after != before:
        new, old = set(after.splitlines()), set(before.splitlines())
        for line in sorted(new ^ old):
            sys.stderr.write(f"{'now' if line in new else 'page'}: {line}\n")
        sys.stderr.write("docs/internals/checked.md is not current: run `make checked`\n")
        return 1
    if not options.check:
        PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
