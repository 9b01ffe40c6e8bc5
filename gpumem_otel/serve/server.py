"""The listener: one daemon thread with an event loop, and the only listening socket.

A shell around the app: it owns the port, the connections and their limits, and gives all of it
back. uvicorn's `Server` is not used, only its HTTP protocol: it would poll ten times a second,
exit the process when the port is taken, and allow a TLS handshake a minute.

Nothing here delays the end of the job: daemon threads only, and no executor of asyncio's (host
names are resolved by hand, since `create_server` would use it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpumem_otel.errors import ServeError
from gpumem_otel.serve import rundir
from gpumem_otel.serve.binding import TcpBinding
from gpumem_otel.serve.hosts import HostNames
from gpumem_otel.serve.life import ListenerLife
from gpumem_otel.serve.tls import server_context
from gpumem_otel.serve.tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.config import ServeConfig
    from gpumem_otel.core.counters import Counters
    from gpumem_otel.core.model import Identity
    from gpumem_otel.serve.deps import AppDeps
    from gpumem_otel.serve.loop import ListenerLoop

__all__ = ["Listener"]

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
        """Check everything that can be checked without a socket.

        Args:
            deps: where the answers come from.
            config: address, tokens, TLS, run directory.
            local_rank: added to the port.
            counters: where failures are counted.
            identity: who this process is, for its run file; without it none is written.

        Raises:
            ServeError: a port that does not exist, a token or TLS file that can not be used.
        """
        super().__init__(counters)
        self._deps = deps
        self._config = config
        self._port = config.port + local_rank if config.port else 0
        if not 0 <= self._port <= _MAX_PORT:
            raise ServeError(
                f"port {config.port} + local rank {local_rank} is no port: take a lower base port"
            )
        if not config.host:
            raise ServeError("host is empty: give 127.0.0.1, or 0.0.0.0 for all addresses")
        self._tls = server_context(config)
        self._tokens = Tokens(config.token, config.token_file)
        self._identity = identity

    @property
    def scheme(self) -> str:
        """`http` or `https`."""
        return "http" if self._tls is None else "https"

    def _build(self) -> ListenerLoop:
        # uvicorn and starlette: imported when it starts
        from gpumem_otel.serve.app import build_app  # noqa: PLC0415
        from gpumem_otel.serve.guard import Guard  # noqa: PLC0415
        from gpumem_otel.serve.loop import ListenerLoop  # noqa: PLC0415
        from gpumem_otel.serve.workers import Workers  # noqa: PLC0415

        workers = Workers()
        app = Guard(
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
            entry = rundir.entry_for(identity, address, self.scheme)
            self._run_file = rundir.register(self._config.run_dir, entry)
        except Exception as exc:
            self._failed("run file", f"this process is not listed for `gpumem-otel sd`: {exc}")
