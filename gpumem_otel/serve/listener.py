"""The read listener: one daemon thread with an event loop that owns the port and connections.

Of uvicorn only the HTTP protocol is used: its `Server` would poll ten times a second, exit the
process when the port is taken, and allow a TLS handshake a minute.

Nothing here delays the end of the job: only daemon threads, and not asyncio's executor, which
`create_server` would use to resolve host names.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from gpumem_otel.base.counters import Counters
from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import ServeError
from gpumem_otel.serve import discovery
from gpumem_otel.serve.auth import Tokens, server_context
from gpumem_otel.serve.binding import TcpBinding
from gpumem_otel.serve.guard import HostNames

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.base.profile import Identity
    from gpumem_otel.serve.dependencies import AppDeps
    from gpumem_otel.serve.discovery import RunFile
    from gpumem_otel.serve.event_loop import ListenerLoop
    from gpumem_otel.settings.config import ServeConfig

_log = named_logger("gpumem_otel.serve")


class ListenerLife:
    """Starts, stops and forks one `ListenerLoop` at a time; the subclass defines what it serves.

    Attributes:
        bound: set while the address is held.
        last_error: why it could not be bound at the last attempt, None once it is.
    """

    what = "the listener"
    """For messages."""

    def __init__(self, counters: Counters | None = None) -> None:
        self._counters = counters or Counters()
        self._logged: set[str] = set()
        self._lock = threading.Lock()
        self._loop: ListenerLoop | None = None
        self._run_file: RunFile | None = None
        self._left_to_parent: ListenerLoop | None = None
        self.bound = threading.Event()
        self.last_error: OSError | None = None

    @property
    def address(self) -> tuple[str, int] | None:
        """(host, port), or (path, 0), once bound, else None."""
        loop = self._loop
        return loop.address if loop is not None and self.bound.is_set() else None

    def start(self) -> None:
        """Start the thread; returns before the port is bound. Does nothing where it runs.

        The imports happen here, on the caller's thread: in the background they would hold module
        locks that a forked child then inherits.

        Raises:
            ServeError: uvicorn or starlette cannot be imported, or no thread be started.
        """
        with self._lock:
            if self._loop is not None:
                return
            try:
                self._loop = self._build()
                self._loop.start()
            except Exception as exc:
                self._loop = None
                raise ServeError(f"{self.what} cannot be started: {exc}") from exc

    def _build(self) -> ListenerLoop:
        """A loop that is not started yet."""
        raise NotImplementedError

    def _register(self, loop: ListenerLoop) -> None:
        """Let others find what is bound. From the thread of the loop; must not raise."""
        raise NotImplementedError

    def _where(self) -> str:
        """The address, for messages."""
        raise NotImplementedError

    def stop(self, timeout: float = 1.0) -> None:
        """Close the port, every connection and every request; may be started again.

        Args:
            timeout: seconds to wait for the threads, which are daemons in any case.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            loop, self._loop = self._loop, None
            if loop is None:
                return
            loop.stop(deadline)
            self.bound.clear()
            run_file, self._run_file = self._run_file, None
        if run_file is not None:
            run_file.remove()

    def close_in_child(self) -> None:
        """In a forked child: close the inherited descriptors, leave the parent's loop alone.

        A child that outlives its parent would otherwise hold the port. Safe at any moment, also
        where the parent held a lock; the listener can then be started again.
        """
        loop, self._loop = self._loop, None
        self._lock = threading.Lock()
        self.bound = threading.Event()
        self._run_file = None  # it is the parent's
        if loop is not None:
            loop.abandon()
            self._left_to_parent = loop  # kept, so that no finalizer touches what is shared

    def _on_bound(self, loop: ListenerLoop) -> None:
        """From the thread of the loop, once."""
        if self._loop is not loop:
            return  # stopped meanwhile
        self._register(loop)
        self.last_error = None
        self.bound.set()

    def _on_taken(self, exc: OSError) -> None:
        """From the thread of the loop, at each attempt that failed."""
        self.last_error = exc.with_traceback(None)
        self._failed(
            "listen", f"cannot listen on {self._where()} ({exc}): trying again until it is free"
        )

    def _failed(self, kind: str, message: str) -> None:
        self._counters.add("exporter_errors", stage="listen")
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning("%s", message)


_MAX_PORT: Final = 65535


class Listener(ListenerLife):
    """Serves `/metrics` and `/debug/pprof/gpumem` from a thread of its own.

    The port is `config.port` + local rank (0: any free one) and never another: while it is taken
    the thread tries again with back-off and counts `exporter_errors{stage="listen"}`.
    """

    def __init__(
        self,
        deps: AppDeps,
        config: ServeConfig,
        *,
        local_rank: int = 0,
        counters: Counters | None = None,
        identity: Callable[[], Identity] | None = None,
    ) -> None:
        """Check all settings that need no socket.

        Args:
            deps: where the answers come from.
            config: address, tokens, TLS, run directory.
            local_rank: added to the port.
            counters: where failures are counted.
            identity: of this process, for its run file; without it none is written.

        Raises:
            ServeError: a port that does not exist, a token or TLS file that cannot be used.
        """
        super().__init__(counters)
        self._deps = deps
        self._config = config
        self._port = config.port + local_rank if config.port else 0
        if not 0 <= self._port <= _MAX_PORT:
            raise ServeError(
                f"port {config.port} + local rank {local_rank} is not a port: set a lower base port"
            )
        if not config.host:
            raise ServeError("host is empty: set 127.0.0.1, or 0.0.0.0 for all addresses")
        self._tls = server_context(config)
        self._tokens = Tokens(config.token, config.token_file)
        self._identity = identity

    @property
    def scheme(self) -> str:
        """`http` or `https`."""
        return "http" if self._tls is None else "https"

    def _build(self) -> ListenerLoop:
        # uvicorn and starlette: imported when it starts
        from gpumem_otel.serve.event_loop import ListenerLoop  # noqa: PLC0415
        from gpumem_otel.serve.guard import RequestGuard  # noqa: PLC0415
        from gpumem_otel.serve.read_api import build_app  # noqa: PLC0415
        from gpumem_otel.serve.threads import RequestThreads  # noqa: PLC0415

        workers = RequestThreads()
        app = RequestGuard(
            build_app(self._deps, workers),
            hosts=HostNames(self._config.host, self._config.allowed_hosts),
            tokens=self._tokens,
            workers=workers,
            counters=self._counters,
        )
        return ListenerLoop(
            app,
            binding=TcpBinding(self._config.host, self._port),
            tls=self._tls,
            workers=workers,
            on_bound=self._on_bound,
            on_taken=self._on_taken,
        )

    def announce(self) -> None:
        """Write the run file again, where the identity has changed."""
        with self._lock:
            loop = self._loop
            if loop is not None and self.bound.is_set():
                self._write_run_file(loop.address)

    def _register(self, loop: ListenerLoop) -> None:
        self._write_run_file(loop.address)

    def _where(self) -> str:
        return f"{self._config.host}:{self._port}"

    def _write_run_file(self, address: tuple[str, int]) -> None:
        if self._identity is None or not self._config.run_dir:
            return
        try:
            identity = self._identity()
            entry = discovery.entry_for(identity, address, self.scheme)
            self._run_file = discovery.register(self._config.run_dir, entry)
        except Exception as exc:
            self._failed("run file", f"this process is not listed for `gpumem-otel sd`: {exc}")
