"""`gpumem-otel demo`: everything at work, with a GPU or with the recording of one."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumem_otel.base.text import human_bytes
from gpumem_otel.cli.common import CommandFailed, environ
from gpumem_otel.cli.demo.parts import (
    LastProfiles,
    await_listener,
    forget_stdout,
    greet,
    one_line_warnings,
    training,
)
from gpumem_otel.errors import GpumemError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from gpumem_otel.base.profile import DeviceTotals
    from gpumem_otel.recording.source import ReplaySource
    from gpumem_otel.runtime.agent import Agent
    from gpumem_otel.settings.config import Config
    from gpumem_otel.settings.options import InstallOptions

RECORDING = Path(__file__).resolve().parents[2] / "data" / "demo-recording.gpumem"
"""The demo's own training run, recorded on an H200."""

_EPILOG = """\b
Examples:
  gpumem-otel demo
  gpumem-otel demo --duration 300 --pyroscope http://localhost:4040
  gpumem-otel demo --recording run.gpumem

With a GPU that torch sees, a small transformer trains (about 2 GiB); without, the recording of
such a run is replayed through the same code. Ctrl-C ends it early.
"""

_INTERVAL_SECONDS = 2.0
_LISTEN_SECONDS = 5.0
_FIRST_CUDA_SECONDS = 60.0
"""What a driver may take to give its first context."""
_ABOUT = {"live": "the last moment", "allocated": "what was allocated of late"}


@click.command("demo", epilog=_EPILOG, short_help="Show everything at work.")
@click.option(
    "--duration", type=click.FloatRange(0.5), default=30.0, show_default=True, help="Seconds."
)
@click.option("--pyroscope", metavar="URL", help="Push profiles to this server as well.")
@click.option("--host", help="Address to serve on [default: GPUMEM_OTEL_HOST, or 127.0.0.1].")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    help="0: any free port [default: GPUMEM_OTEL_PORT, or 9464].",
)
@click.option("--out", default="gpumem-demo", show_default=True, help="Folder for the profiles.")
@click.option("--gpu/--replay", "gpu", default=None, help="Train, or replay (default: by itself).")
@click.option("--recording", metavar="FILE", help="Replay this one, of gpumem-otel record.")
def command(
    duration: float,
    pyroscope: str | None,
    host: str | None,
    port: int | None,
    out: str,
    *,
    gpu: bool | None,
    recording: str | None,
) -> None:
    """Show what holds the GPU memory of a training run, live, served and as files."""
    from gpumem_otel.runtime.agent import Agent

    given = _options(pyroscope, host, port)
    if recording and gpu:
        raise click.UsageError("--recording replays, --gpu trains: give one of them")
    device = _gpu(asked=False if recording else gpu)
    source = None if device else _replay(recording)
    config = _config(given, allocated=source is None or source.has_windows)
    profiles = LastProfiles(_made(out))
    agent = Agent(
        config,
        source=source,
        on_profiles=lambda kind, read: profiles.take(kind, read, *_beside(agent)),
        environ=environ(),
    )
    said = f"training a small transformer on {device}" if device else _about(source, recording)
    try:
        click.echo(f"gpumem-otel demo: {said}, for {duration:g} s")
        with one_line_warnings() as warnings, _stopping(agent):
            agent.start()
            with training(on=bool(device)) as failure:
                check = partial(_check_training, failure)
                await_listener(agent, check, _FIRST_CUDA_SECONDS if device else _LISTEN_SECONDS)
                _greet(agent, config)
                warnings.let_go()
                _show(agent, profiles, duration, check)
        _farewell(profiles)
    except BrokenPipeError:
        forget_stdout()  # `| head` had enough: an end like any other


def _gpu(*, asked: bool | None) -> str:
    """Name of the device to train on, "" to replay.

    Raises:
        CommandFailed: a GPU was asked for, and torch sees none.
    """
    if asked is False:
        return ""
    from gpumem_otel.cli.demo.demo_train import gpu_name

    name = gpu_name()
    if asked and not name:
        raise CommandFailed("torch sees no GPU here; gpumem-otel doctor says why, --replay goes on")
    return name


def _replay(recording: str | None) -> ReplaySource:
    from gpumem_otel.base.clock import SystemClock
    from gpumem_otel.recording.reader import load_recording
    from gpumem_otel.recording.source import ReplaySource

    if recording:
        return ReplaySource(load_recording(recording), SystemClock())
    if not RECORDING.is_file():
        raise CommandFailed(f"{RECORDING}: not there; reinstall gpumem-otel")
    return ReplaySource(load_recording(RECORDING), SystemClock())


def _about(source: ReplaySource | None, recording: str | None) -> str:
    facts = source.facts if source is not None else {}
    device = facts.get("devices") or "a GPU"
    if recording:
        return f"replaying {recording} ({device})"
    return f"no GPU here: replaying the recording of a run on {device}"


def _options(pyroscope: str | None, host: str | None, port: int | None) -> InstallOptions:
    """What the command line says.

    Raises:
        CommandFailed: the environment switches everything off.
    """
    from gpumem_otel.settings.options import InstallOptions, resolve

    if not resolve(environ()).enabled:
        raise CommandFailed(
            "GPUMEM_OTEL_DISABLED is set, so nothing would be read; unset it for the demo"
        )
    options = InstallOptions()
    if pyroscope is not None:
        options["pyroscope_url"] = pyroscope
    if host is not None:
        options["host"] = host
    if port is not None:
        options["port"] = port
    return options


def _config(given: InstallOptions, *, allocated: bool) -> Config:
    from gpumem_otel.settings.options import resolve

    base = environ()
    asked = resolve(base)
    options: InstallOptions = {
        "max_stall_ratio": 0.05,  # a demo wants to be watched, not to be quick
        "profiles": ("live", "allocated") if allocated else ("live",),
        "serve": True,
        **given,
    }
    interval = asked.profiles.interval_seconds
    if "GPUMEM_OTEL_INTERVAL" not in base:
        interval = options["interval_seconds"] = _INTERVAL_SECONDS
    if "GPUMEM_OTEL_ALLOCATED_WINDOW" not in base:
        options["allocated_window_seconds"] = min(_INTERVAL_SECONDS, interval) / 4
    if not asked.service_name:
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


def _beside(agent: Agent) -> tuple[Mapping[int, DeviceTotals], int]:
    """What is told beside the profiles that were read just now: the books, and steps so far."""
    books = agent.reader.books() if agent.reader is not None else {}
    return books, agent.queries.step_stats().steps if agent.queries is not None else 0


def _check_training(failure: list[BaseException]) -> None:
    if failure:
        raise CommandFailed(f"the training failed: {type(failure[0]).__name__}: {failure[0]}")


def _greet(agent: Agent, config: Config) -> None:
    address = agent.address
    if address is None:
        raise CommandFailed("the listener ended; see the log above")
    greet(address, config)


def _show(agent: Agent, profiles: LastProfiles, duration: float, check: Callable[[], None]) -> None:
    """Draw what is written, until the time is over or Ctrl-C; the last table is the last file."""
    from gpumem_otel.base.profile import ProfileKind
    from gpumem_otel.cli.demo.view import view

    deadline = time.monotonic() + duration
    with view() as draw:
        try:
            while (left := deadline - time.monotonic()) > 0:
                check()
                draw(profiles.write(), left)
                time.sleep(min(0.5, left))
        except KeyboardInterrupt:
            click.echo(err=True)
        with contextlib.suppress(GpumemError):  # then the reading before is the last
            if agent.reader is not None:
                profiles.take(ProfileKind.LIVE, agent.reader.live(), *_beside(agent))
        draw(profiles.write(last=True), 0.0)


def _farewell(profiles: LastProfiles) -> None:
    written, fullest = profiles.written, profiles.fullest
    if fullest is None:
        click.echo("no profile was read")
        return
    held = human_bytes(fullest.size_bytes)
    click.echo(f"wrote {written['fullest']} (the moment at which most was held: {held})")
    for name in ("live", "allocated"):
        if name in written:
            click.echo(f"wrote {written[name]} ({_ABOUT[name]})")
    click.echo(f"look at it with: go tool pprof -http=: {written['fullest']}")
    click.echo("or in a job of yours: gpumem-otel run --serve -- python train.py")
