"""`gpumem-otel demo`: everything at work, with a GPU or with the recording of one."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumem_otel.cli.common import CommandFailed, environ
from gpumem_otel.cli.demo_parts import LastProfiles, one_line_warnings, training

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpumem_otel.agent import Agent
    from gpumem_otel.capture.replay import ReplaySource
    from gpumem_otel.config import Config

__all__ = ["RECORDING", "command"]

RECORDING = Path(__file__).resolve().parent.parent / "data" / "demo-recording.gpumem"
"""The demo's own training run, recorded on an H200."""

_EPILOG = """\b
Examples:
  gpumem-otel demo
  gpumem-otel demo --duration 300 --pyroscope http://localhost:4040

With a GPU that torch sees, a small transformer trains (about 2 GiB); without, the recording of
such a run is replayed through the same code. Ctrl-C ends it early.
"""

_INTERVAL_SECONDS = 2.0
_LISTEN_SECONDS = 5.0
_FIRST_CUDA_SECONDS = 60.0
"""What a driver may take to give its first context."""


@click.command("demo", epilog=_EPILOG, short_help="Show everything at work.")
@click.option(
    "--duration", type=click.FloatRange(0.5), default=30.0, show_default=True, help="Seconds."
)
@click.option("--pyroscope", metavar="URL", help="Push profiles to this server as well.")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=9464,
    show_default=True,
    help="Where to serve; 0: any free port.",
)
@click.option("--out", default="gpumem-demo", show_default=True, help="Folder for the profiles.")
@click.option("--gpu/--replay", "gpu", default=None, help="Train, or replay (default: by itself).")
def command(
    duration: float, pyroscope: str | None, port: int, out: str, *, gpu: bool | None
) -> None:
    """Show what holds the GPU memory of a training run, live, served and as files."""
    from gpumem_otel.agent import Agent

    device = _gpu(asked=gpu)
    source = None if device else _replay()
    config = _config(port, pyroscope, allocated=source is None or source.has_windows)
    profiles = LastProfiles(_made(out))
    agent = Agent(config, source=source, on_profiles=profiles.take, environ=environ())
    said = f"training a small transformer on {device}" if device else _about(source)
    click.echo(f"gpumem-otel demo: {said}, for {duration:g} s")
    with one_line_warnings() as warnings, _stopping(agent):
        agent.start()
        with training(on=bool(device)) as failure:
            _await_listener(agent, config, cuda=bool(device), failure=failure)
            warnings.let_go()
            _show(agent, profiles, duration, failure)
    profiles.write()
    _farewell(profiles)


def _gpu(*, asked: bool | None) -> str:
    """Name of the device to train on, "" to replay.

    Raises:
        CommandFailed: a GPU was asked for, and torch sees none.
    """
    if asked is False:
        return ""
    from gpumem_otel.capture.demo_train import gpu_name

    name = gpu_name()
    if asked and not name:
        raise CommandFailed("torch sees no GPU here; gpumem-otel doctor says why, --replay goes on")
    return name


def _replay() -> ReplaySource:
    from gpumem_otel.capture.replay import ReplaySource
    from gpumem_otel.core.recording import load_recording
    from gpumem_otel.export.clock import SystemClock

    if not RECORDING.is_file():
        raise CommandFailed(f"{RECORDING}: not there; reinstall gpumem-otel")
    return ReplaySource(load_recording(RECORDING), SystemClock())


def _about(source: ReplaySource | None) -> str:
    facts = source.facts if source is not None else {}
    device = facts.get("devices") or "a GPU"
    return f"no GPU here: replaying the recording of a run on {device}"


def _config(port: int, pyroscope: str | None, *, allocated: bool) -> Config:
    from gpumem_otel.options import InstallOptions, resolve

    options: InstallOptions = {
        "interval_seconds": _INTERVAL_SECONDS,
        "max_stall_ratio": 0.05,  # a demo wants to be watched, not to be quick
        "profiles": ("live", "allocated") if allocated else ("live",),
        "allocated_window_seconds": _INTERVAL_SECONDS / 4,
        "serve": True,
        "host": "127.0.0.1",
        "port": port,
    }
    base = environ()
    if pyroscope is not None:
        options["pyroscope_url"] = pyroscope
    if not resolve(base).service_name:
        options["service_name"] = "gpumem-demo"
    return resolve(base, **options)


def _made(out: str) -> Path:
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandFailed(f"{out}: {error.strerror or type(error).__name__}") from error
    return folder


@contextlib.contextmanager
def _stopping(agent: Agent) -> Iterator[None]:
    """Ctrl-C is the usual end of a demo."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(err=True)
    finally:
        agent.stop(5.0)


def _await_listener(
    agent: Agent, config: Config, *, cuda: bool, failure: list[BaseException]
) -> None:
    """Say where it serves.

    Raises:
        CommandFailed: the port is taken, or the training failed.
    """
    deadline = time.monotonic() + (_FIRST_CUDA_SECONDS if cuda else _LISTEN_SECONDS)
    while not agent.wait_listening(0.2):
        _check_training(failure)
        if time.monotonic() > deadline:
            where = f"{config.serve.host}:{config.serve.port}"
            raise CommandFailed(f"{where} is taken; choose another with --port (0: any free one)")
    address = agent.address
    if address is None:
        raise CommandFailed("the listener ended; see the log above")
    _greet(address, config)


def _check_training(failure: list[BaseException]) -> None:
    if failure:
        raise CommandFailed(f"the training failed: {type(failure[0]).__name__}: {failure[0]}")


def _greet(address: tuple[str, int], config: Config) -> None:
    url = f"http://{address[0]}:{address[1]}"
    click.echo("  look at it while it runs:")
    click.echo(f"    go tool pprof -http=: {url}/debug/pprof/gpumem")
    click.echo(f"    curl {url}/metrics")
    click.echo(
        f"    prometheus: scrape_configs: [{{static_configs: [{{targets: ['{url[7:]}']}}]}}]"
    )
    if config.pyroscope.url:
        click.echo(f"  pushing to {config.pyroscope.url} as {config.service_name}")
    click.echo()


def _show(
    agent: Agent, profiles: LastProfiles, duration: float, failure: list[BaseException]
) -> None:
    from gpumem_otel.cli.demo_view import view

    deadline = time.monotonic() + duration
    with view() as draw:
        while True:
            _check_training(failure)
            left = deadline - time.monotonic()
            profiles.write()
            draw(profiles.live(), agent.observe(), max(left, 0.0))
            if left <= 0:
                return
            time.sleep(min(0.5, left))


def _farewell(profiles: LastProfiles) -> None:
    if not profiles.written:
        click.echo("no profile was read")
        return
    for path in profiles.written.values():
        click.echo(f"wrote {path}")
    last = profiles.written.get("live") or next(iter(profiles.written.values()))
    click.echo(f"look at it with: go tool pprof -http=: {last}")
    click.echo("or in a job of yours: gpumem-otel run --serve -- python train.py")
