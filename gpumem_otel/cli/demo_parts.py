"""Pieces of the demo: the training thread, the last profiles as files, warnings as lines."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

from gpumem_otel.cli.common import warn, write_output

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpumem_otel.core.model import HeapProfile, ProfileKind

__all__ = ["LastProfiles", "OneLiners", "one_line_warnings", "training"]


class LastProfiles:
    """Keeps the last profiles of each kind and writes them to files on the main thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: dict[str, Path] = {}
        self._lock = threading.Lock()
        self._last: dict[ProfileKind, tuple[HeapProfile, ...]] = {}
        self._new: set[ProfileKind] = set()

    def take(self, kind: ProfileKind, profiles: tuple[HeapProfile, ...]) -> None:
        """Called on the agent's thread."""
        with self._lock:
            self._last[kind] = profiles
            self._new.add(kind)

    def live(self) -> tuple[HeapProfile, ...]:
        """The last live profiles, () before the first."""
        from gpumem_otel.core.model import ProfileKind

        with self._lock:
            return self._last.get(ProfileKind.LIVE, ())

    def write(self) -> None:
        """Write what is new.

        Raises:
            CommandFailed: the folder can not be written.
        """
        from gpumem_otel.core import pprof

        with self._lock:
            new, self._new = self._new, set()
            due = [(kind, self._last[kind]) for kind in sorted(new)]
        for kind, profiles in due:
            path = self.folder / f"{kind.value}.pb.gz"
            data = pprof.encode(profiles, device_labels={}, kind=kind)
            write_output(str(path), pprof.gzip_bytes(data))
            self.written[kind.value] = path


class OneLiners(logging.Handler):
    """The agent's warnings as lines of ours, without tracebacks; held until it listens.

    What is held is dropped if it never does: the error then says the same.
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
    from gpumem_otel.capture import demo_train

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
