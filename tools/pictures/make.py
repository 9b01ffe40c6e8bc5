"""Make the pictures of docs/img that show us at work: `make pictures`.

A real Prometheus with the shipped configuration scrapes the replayed jobs for some minutes; then
the demo's output and the dashboards are drawn and taken by Chromium. Needs chromium, and
prometheus from `make servers` in the folder that GPUMEM_SERVERS_BIN names.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
IMAGES = ROOT / "docs" / "img"
JOBS = ROOT / "tests" / "data" / "jobs"
SECONDS = 180
DRAWN = (
    ("dashboard-job", "gpumem-job", {"job": "batch-finder"}, 4),
    ("dashboard-fleet", "gpumem-fleet", {}, 4),
    ("dashboard-exporter", "gpumem-exporter", {}, 3),
)
CHROMIUM = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")


def taken(page: Path, image: Path, width: int, height: int) -> None:
    """A picture of a page."""
    size = f"--window-size={width},{height}"
    subprocess.run(  # noqa: S603
        [*CHROMIUM, size, f"--screenshot={image}", page.as_uri()], check=True, capture_output=True
    )
    sys.stdout.write(f"{image.relative_to(ROOT)}\n")


def height_of(page: str) -> int:
    """What a page of our scripts says of itself."""
    return int(re.search(r"data-height=\"?(\d+)", page)[1])  # type: ignore[index]


def printed(program: str, *arguments: str) -> str:
    """What one of our scripts prints."""
    command = [sys.executable, str(HERE / program), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603


def prometheus(folder: Path, targets: Path) -> tuple[list[str], str]:
    """The command that starts it with our configuration, a scrape a second; and its address."""
    text = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text(encoding="utf-8")
    text = re.sub(r"scrape_interval: \w+", "scrape_interval: 2s", text)
    text = re.sub(r"scrape_timeout: \w+", "scrape_timeout: 2s", text)
    text = text.replace("targets/*.json", str(targets))
    rules = (ROOT / "deploy" / "prometheus" / "rules" / "gpumem.yaml").read_text(encoding="utf-8")
    (folder / "rules").mkdir()
    (folder / "rules" / "gpumem.yaml").write_text(rules.replace("interval: 1m", "interval: 5s"))
    config = folder / "prometheus.yml"
    config.write_text(text, encoding="utf-8")
    binary = str(Path(os.environ["GPUMEM_SERVERS_BIN"]) / "prometheus")
    listen = "127.0.0.1:19090"
    options = (f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={listen}")
    return [binary, f"--config.file={config}", *options], f"http://{listen}"


def main() -> None:
    """See the module."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        demo = [str(Path(sys.executable).with_name("gpumem-otel")), "demo", "--replay"]
        text = printed("terminal.py", *demo, "--duration", "12", "--port", "0")
        (folder / "demo.html").write_text(text, encoding="utf-8")
        taken(folder / "demo.html", IMAGES / "demo.png", 1010, height_of(text))
        targets = folder / "jobs.json"
        command, url = prometheus(folder, targets)
        jobs = {name: JOBS / f"{name}.gpumem" for name in ("leak", "server")}
        jobs["batch-finder"] = JOBS / "oom.gpumem"
        jobs["llm-train"] = JOBS / "healthy.gpumem"
        for job, recording in jobs.items():
            given = ["--recording", str(recording)]
            environ = {
                **os.environ,
                "OTEL_SERVICE_NAME": job,
                "POD_NAMESPACE": "training",
                "GPUMEM_OTEL_METRICS_LEVEL": "full",
                "GPUMEM_OTEL_RUN_DIR": str(folder / "run"),
            }
            running = stack.enter_context(
                subprocess.Popen(  # noqa: S603
                    [
                        *demo,
                        *given,
                        "--port",
                        "0",
                        "--duration",
                        "3600",
                        "--out",
                        str(folder / job),
                    ],
                    env=environ,
                    stdout=subprocess.DEVNULL,
                )
            )
            stack.callback(running.terminate)
        time.sleep(10)
        sd = [demo[0], "sd", "-o", str(targets)]
        environ = {**os.environ, "GPUMEM_OTEL_RUN_DIR": str(folder / "run")}
        subprocess.run(sd, env=environ, check=True)  # noqa: S603
        if len(json.loads(targets.read_text())) != len(jobs):
            raise SystemExit("not all jobs are there: see the output above")
        server = stack.enter_context(
            subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=folder)  # noqa: S603
        )
        stack.callback(server.terminate)
        time.sleep(SECONDS)
        for name, board, given, rows in DRAWN:
            text = printed(
                "boards.py", url, board, f"--seconds={SECONDS}", f"--rows={rows}",
                *(f"--var={key}={value}" for key, value in given.items()),
            )  # fmt: skip
            (folder / f"{name}.html").write_text(text, encoding="utf-8")
            taken(folder / f"{name}.html", IMAGES / f"{name}.png", 1302, height_of(text))


if __name__ == "__main__":
    main()
