"""Pieces of the demo: the training thread, its profiles as files, warnings as lines."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from gpumem_otel.cli.common import CommandFailed, warn, write_output
from gpumem_otel.serve.guard import host_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from gpumem_otel.base.profile import DeviceTotals, HeapProfile, ProfileKind
    from gpumem_otel.runtime.agent import Agent
    from gpumem_otel.settings.config import Config

# Where the demo serves: the wait for its listener, and what can be done with the address.

_WAIT_SECONDS = 0.05
_OF_THIS_MACHINE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (it is replaced)
"""An address to ask, where all are listened on."""


def await_listener(agent: Agent, check: Callable[[], None], patience_seconds: float) -> None:
    """Wait until the port is bound.

    Args:
        agent: started.
        check: called again and again; raises where there is nothing to wait for any more.
        patience_seconds: for reasons that nobody knows of.

    Raises:
        CommandFailed: it does not listen, and why.
    """
    deadline = time.monotonic() + patience_seconds
    while not agent.wait_listening(_WAIT_SECONDS):
        check()
        error = agent.listen_error
        if isinstance(error, OSError):
            raise CommandFailed(_no_port(agent, error)) from error
        if error is not None:
            raise CommandFailed(error)
        if time.monotonic() > deadline:
            raise CommandFailed(
                f"nothing listens after {patience_seconds:g} s; gpumem-otel doctor may know why"
            )
        time.sleep(_WAIT_SECONDS)  # without a listener `wait_listening` does not wait


def _no_port(agent: Agent, error: OSError) -> str:
    serve = agent.config.serve
    rank = agent.queries.identity().local_rank if agent.queries is not None else 0
    where = host_port(serve.host, serve.port + rank if serve.port else 0)
    if error.errno == errno.EADDRINUSE:
        return f"{where} is taken; choose another with --port (0: any free one)"
    reason = error.strerror or type(error).__name__
    return f"can not listen on {where}: {reason}; choose another with --host or --port"


def greet(address: tuple[str, int], config: Config) -> None:
    """Say what can be looked at meanwhile."""
    url = base_url(address, tls=bool(config.serve.tls_cert_file))
    click.echo("  look at it while it runs:")
    click.echo(f"    go tool pprof -http=: {url}/debug/pprof/gpumem")
    click.echo(f"    curl {url}/metrics")
    click.echo(f"    {scrape_config(url)}  # in prometheus.yml")
    if config.pyroscope.url:
        click.echo(f"  pushing to {config.pyroscope.url} as {config.service_name}")
    click.echo()


def base_url(address: tuple[str, int], *, tls: bool) -> str:
    """The URL to ask on this machine."""
    host, port = address
    return f"{'https' if tls else 'http'}://{host_port(_OF_THIS_MACHINE.get(host, host), port)}"


def scrape_config(url: str) -> str:
    """A line of YAML that makes a Prometheus scrape this URL."""
    scheme, _, target = url.partition("://")
    tls = "" if scheme == "http" else f"scheme: {scheme}, "
    job = f"job_name: gpumem, {tls}static_configs: [{{targets: ['{target}']}}]"
    return f"scrape_configs: [{{{job}}}]"


@dataclass(frozen=True, slots=True)
class Moment:
    """Live profiles of one reading, one per device, and what was known beside them."""

    profiles: tuple[HeapProfile, ...]
    books: Mapping[int, DeviceTotals]
    steps: int

    @property
    def size_bytes(self) -> int:
        """All that was held."""
        return sum(profile.total_bytes for profile in self.profiles)

    def reserved_bytes(self, profile: HeapProfile) -> int | None:
        """Reserved on the profile's device; None where the books are of another reading."""
        books = self.books.get(profile.device)
        if books is None or books.allocated_bytes != profile.total_bytes:
            return None
        return books.reserved_bytes


class LastProfiles:
    """Keeps what was read last, and the fullest; the main thread writes them to files.

    `live.pb.gz` is the last moment, `fullest.pb.gz` the one at which most was held, and
    `allocated.pb.gz` what was allocated of late.

    Attributes:
        fullest: the moment in `fullest.pb.gz`.
        written: the files by their names' stems.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for stem in ("live", "fullest", "allocated"):  # what a demo before this one left
            (folder / f"{stem}.pb.gz").unlink(missing_ok=True)
        self.written: dict[str, Path] = {}
        self.fullest: Moment | None = None
        self._lock = threading.Lock()
        self._live: Moment | None = None
        self._new: dict[str, tuple[HeapProfile, ...]] = {}
        self._over = False

    def take(
        self,
        kind: ProfileKind,
        profiles: tuple[HeapProfile, ...],
        books: Mapping[int, DeviceTotals],
        steps: int,
    ) -> None:
        """Called on the agent's thread, right after the reading."""
        from gpumem_otel.base.profile import ProfileKind

        with self._lock:
            if self._over or not profiles:
                return
            self._new[kind.value] = profiles
            if kind is not ProfileKind.LIVE:
                return
            self._live = now = Moment(profiles, books, steps)
            if self.fullest is None or now.size_bytes > self.fullest.size_bytes:
                self.fullest = now
                self._new["fullest"] = profiles

    def write(self, *, last: bool = False) -> Moment | None:
        """Write what is new; returns what `live.pb.gz` holds now, None before the first.

        Ctrl-C may come at any moment of it: what was not written then is written the next time.

        Args:
            last: nothing is taken from now on, so that the file stays what was shown.

        Raises:
            CommandFailed: the folder can not be written.
        """
        from gpumem_otel.profiles import pprof

        with self._lock:
            self._over |= last
            new, live = sorted(self._new.items()), self._live
        for name, profiles in new:
            path = self.folder / f"{name}.pb.gz"
            data = pprof.encode(profiles, device_labels={}, kind=profiles[0].kind)
            write_output(str(path), pprof.gzip_bytes(data))
            self.written[name] = path
            with self._lock:
                if self._new.get(name) is profiles:  # else there is a newer one
                    del self._new[name]
        return live


def forget_stdout() -> None:
    """Nobody reads it any more: what is still written to it goes nowhere."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


class OneLiners(logging.Handler):
    """The agent's warnings as lines of ours, without tracebacks; held until it listens.

    What is held is dropped if it never does: the error then says the same.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._held: list[str] | None = []

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        message = record.getMessage()
        if self._held is None:
            warn(message)
        else:
            self._held.append(message)

    def let_go(self) -> None:
        """Say what was held, and from now on everything at once."""
        held, self._held = self._held or [], None
        for line in held:
            warn(line)


@contextlib.contextmanager
def one_line_warnings() -> Iterator[OneLiners]:
    """Meanwhile warnings of the parts come as lines of ours."""
    logger = logging.getLogger("gpumem_otel")
    handler = OneLiners()
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def training(*, on: bool) -> Iterator[list[BaseException]]:
    """Train in a thread meanwhile; what went wrong there is appended to what is yielded."""
    failure: list[BaseException] = []
    if not on:
        yield failure
        return
    from gpumem_otel.cli.demo import demo_train

    stop = threading.Event()

    def work() -> None:
        try:
            demo_train.train(stop)
        except BaseException as error:  # the main thread says it
            failure.append(error)

    thread = threading.Thread(target=work, name="gpumem-demo-train", daemon=True)
    thread.start()
    try:
        yield failure
    finally:
        stop.set()
        thread.join(10.0)
