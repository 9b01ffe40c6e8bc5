"""`gpumem-otel demo`: everything at work, with a GPU or with a recording."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumem_otel.base.text import human_bytes
from gpumem_otel.cli.demo.profile_files import LastProfiles
from gpumem_otel.cli.inputs import environ
from gpumem_otel.cli.output import CommandFailed, forget_stdout, warn
from gpumem_otel.errors import GpumemError
from gpumem_otel.serve.guard import host_port

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
"""Time that a driver may need for its first context."""
_WAIT_SECONDS = 0.05
_LOCAL_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (it is replaced)
"""What to connect to where the listener has all addresses."""
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
    profiles = LastProfiles(_created(out))
    agent = Agent(
        config,
        source=source,
        on_profiles=lambda kind, read: profiles.take(kind, read, *_totals_and_steps(agent)),
        environ=environ(),
    )
    title = f"training a small transformer on {device}" if device else _about(source, recording)
    try:
        click.echo(f"gpumem-otel demo: {title}, for {duration:g} s")
        with one_line_warnings() as warnings, _stopping(agent):
            agent.start()
            with _training(on=bool(device)) as check:
                _await_listener(agent, check, _FIRST_CUDA_SECONDS if device else _LISTEN_SECONDS)
                _greet(agent, config)
                warnings.print_held()
                _show(agent, profiles, duration, check)
        _farewell(profiles)
    except BrokenPipeError:
        forget_stdout()  # the reader closed it (`| head`), which is no failure


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
        raise CommandFailed(
            "torch sees no GPU here; gpumem-otel doctor says why, --replay needs none"
        )
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


def _created(out: str) -> Path:
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


def _totals_and_steps(agent: Agent) -> tuple[Mapping[int, DeviceTotals], int]:
    """Of the reading that was made just now."""
    totals = agent.reader.totals() if agent.reader is not None else {}
    return totals, agent.queries.step_stats().steps if agent.queries is not None else 0


@contextlib.contextmanager
def _training(*, on: bool) -> Iterator[Callable[[], None]]:
    """Train in a thread meanwhile; yields a check that raises `CommandFailed` where that failed."""
    failures: list[BaseException] = []

    def check() -> None:
        for error in failures:
            raise CommandFailed(f"the training failed: {type(error).__name__}: {error}")

    if not on:
        yield check
        return
    from gpumem_otel.cli.demo import demo_train

    stop = threading.Event()

    def work() -> None:
        try:
            demo_train.train(stop)
        except BaseException as error:  # the main thread reports it
            failures.append(error)

    thread = threading.Thread(target=work, name="gpumem-demo-train", daemon=True)
    thread.start()
    try:
        yield check
    finally:
        stop.set()
        thread.join(10.0)


class OneLineWarnings(logging.Handler):
    """The agent's warnings as single lines, without tracebacks; held until it listens.

    Where it never does, they are dropped: the error has the same reason.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._held: list[str] | None = []

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        if self._held is None:
            warn(record.getMessage())
        else:
            self._held.append(record.getMessage())

    def print_held(self) -> None:
        """Print what was held, and from now on each warning at once."""
        held, self._held = self._held or [], None
        for line in held:
            warn(line)


@contextlib.contextmanager
def one_line_warnings() -> Iterator[OneLineWarnings]:
    """Print our loggers' warnings as single lines meanwhile."""
    logger = logging.getLogger("gpumem_otel")
    handler = OneLineWarnings()
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


def _await_listener(agent: Agent, check: Callable[[], None], limit_seconds: float) -> None:
    """Wait until the port is bound.

    Raises:
        CommandFailed: it does not listen, or the check failed.
    """
    deadline = time.monotonic() + limit_seconds
    while not agent.wait_listening(_WAIT_SECONDS):
        check()
        error = agent.listen_error
        if isinstance(error, OSError):
            raise CommandFailed(_no_port(agent, error)) from error
        if error is not None:
            raise CommandFailed(error)
        if time.monotonic() > deadline:
            raise CommandFailed(
                f"nothing listens after {limit_seconds:g} s; gpumem-otel doctor may know why"
            )
        time.sleep(_WAIT_SECONDS)  # without a listener `wait_listening` does not wait


def _no_port(agent: Agent, error: OSError) -> str:
    serve = agent.config.serve
    rank = agent.queries.identity().local_rank if agent.queries is not None else 0
    where = host_port(serve.host, serve.port + rank if serve.port else 0)
    if error.errno == errno.EADDRINUSE:
        return f"{where} is taken; choose another with --port (0: any free one)"
    reason = error.strerror or type(error).__name__
    return f"cannot listen on {where}: {reason}; choose another with --host or --port"


def _greet(agent: Agent, config: Config) -> None:
    if agent.address is None:
        raise CommandFailed("the listener ended; see the log above")
    url = base_url(agent.address, tls=bool(config.serve.tls_cert_file))
    click.echo("  look at it while it runs:")
    click.echo(f"    go tool pprof -http=: {url}/debug/pprof/gpumem")
    click.echo(f"    curl {url}/metrics")
    click.echo(f"    {scrape_config(url)}  # in prometheus.yml")
    if config.pyroscope.url:
        click.echo(f"  pushing to {config.pyroscope.url} as {config.service_name}")
    click.echo()


def base_url(address: tuple[str, int], *, tls: bool) -> str:
    """The URL of the listener on this machine."""
    host, port = address
    return f"{'https' if tls else 'http'}://{host_port(_LOCAL_ADDRESS.get(host, host), port)}"


def scrape_config(url: str) -> str:
    """A line of YAML that makes a Prometheus scrape this URL."""
    scheme, _, target = url.partition("://")
    tls = "" if scheme == "http" else f"scheme: {scheme}, "
    job = f"job_name: gpumem, {tls}static_configs: [{{targets: ['{target}']}}]"
    return f"scrape_configs: [{{{job}}}]"


def _show(agent: Agent, profiles: LastProfiles, duration: float, check: Callable[[], None]) -> None:
    """Draw what is written, until the time ends or Ctrl-C; the last table shows the last file."""
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
        with contextlib.suppress(GpumemError):  # then the earlier reading is the last
            if agent.reader is not None:
                profiles.take(ProfileKind.LIVE, agent.reader.live(), *_totals_and_steps(agent))
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
