"""The control listener: a Unix socket of this user, and over TCP a port that asks for credentials.

Each has its own thread, event loop and limits, so that neither a flood of the port nor a mistake in
its settings blocks the socket.
"""

from __future__ import annotations

import ipaddress
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import ServeError
from gpumem_otel.serve.auth import server_context
from gpumem_otel.serve.binding import TcpBinding, UnixBinding
from gpumem_otel.serve.guard import HostNames, host_port
from gpumem_otel.serve.listener import ListenerLife
from gpumem_otel.settings import files
from gpumem_otel.yielding.control.roles import Gatekeeper

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.base.profile import Identity
    from gpumem_otel.serve.binding import Binding
    from gpumem_otel.serve.event_loop import ListenerLoop
    from gpumem_otel.serve.peers import Peer
    from gpumem_otel.settings.config import ControlConfig
    from gpumem_otel.yielding.control.roles import Principal
    from gpumem_otel.yielding.control.schema import Process
    from gpumem_otel.yielding.protocols import YieldControl

_MAX_PORT: Final = 65535

_T = TypeVar("_T")


def refuse_open_door(
    config: ControlConfig, gatekeeper: Gatekeeper, tls: ssl.SSLContext | None
) -> None:
    """Refuse unauthenticated access over TCP, and credentials without encryption.

    Raises:
        ServeError: the settings would allow that.
    """
    certificates = tls is not None and bool(config.tls_client_ca_file)
    if gatekeeper.has_client_roles and not certificates:
        raise ServeError("control_client_roles needs control_tls_client_ca_file")
    if not gatekeeper.has_tokens and not gatekeeper.has_client_roles:
        raise ServeError(
            f"control over TCP on {config.host} needs credentials: set control_token_file, or "
            "control_tls_client_ca_file with control_client_roles"
        )
    if tls is None and not config.insecure and not _is_loopback(config.host):
        raise ServeError(
            f"control on {config.host} needs TLS, or the token can be read from the traffic: set "
            "control_tls_cert_file, or control_insecure where something else encrypts it"
        )


def port_of(config: ControlConfig, local_rank: int) -> int:
    """The port of this process; 0 for any free one.

    Raises:
        ServeError: the number is too large.
    """
    port = config.port + local_rank if config.port else 0
    if not 0 <= port <= _MAX_PORT:
        raise ServeError(
            f"control port {config.port} + local rank {local_rank} is no port: take a lower base "
            "port"
        )
    return port


class Refusals(NamedTuple):
    """Why commands would not be taken, a line for each reason.

    Attributes:
        port: over TCP, where a host is set.
        socket: at the socket in the run directory.
    """

    port: list[str]
    socket: list[str]


def refusals(config: ControlConfig, *, run_dir: str, local_rank: int = 0) -> Refusals:
    """What would keep a listener with these settings from starting; binds nothing."""
    port: list[str] = []
    socket: list[str] = []

    def tried(call: Callable[[], _T], errors: list[str] = port) -> _T | None:
        try:
            return call()
        except ServeError as error:
            errors.append(str(error))
        return None

    gatekeeper = tried(lambda: Gatekeeper(config))
    if config.host:
        before = len(port)
        tls = tried(lambda: server_context(config))
        if gatekeeper is not None and len(port) == before:
            tried(lambda: refuse_open_door(config, gatekeeper, tls))
        tried(lambda: port_of(config, local_rank))
    if run_dir:
        tried(lambda: _look_into(run_dir), socket)
    elif not config.host:
        socket.append("control: there is neither a run directory nor a host to listen on")
    return Refusals(port, socket)


def _look_into(run_dir: str) -> None:
    """Check the socket's folder; the job creates one that does not exist.

    Raises:
        ServeError: it cannot be used.
    """
    try:
        with suppress(FileNotFoundError), files.opened(run_dir, "run directory", ServeError):
            pass
    except OSError as error:
        raise ServeError(f"run directory {run_dir}: {error.strerror}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_log = named_logger("gpumem_otel.serve")


class ControlListener:
    """Takes commands to yield and restore, without torch or CUDA.

    Args:
        control: executes them.
        config: address, credentials, TLS.
        run_dir: folder of the socket.
        identity: of this process; `announce` changes it.
        counters: count failures.
        limits: (commands at once, commands a second) of one sender; None for the defaults.

    Attributes:
        refusal: why there is only the socket, though a TCP host is set; else "".

    Raises:
        ServeError: a setting cannot be used or would allow unauthenticated access, and there is no
            socket either.
    """

    def __init__(
        self,
        control: YieldControl,
        config: ControlConfig,
        *,
        run_dir: str,
        identity: Identity,
        counters: Counters | None = None,
        limits: tuple[int, float] | None = None,
    ) -> None:
        self._identity = identity
        self.refusal = ""
        make = partial(
            _ControlEndpoint,
            control,
            identity=lambda: self._identity,
            counters=counters,
            limits=limits,
            disk_dirs=config.disk_dirs,
        )
        self._endpoints: list[_ControlEndpoint] = []
        self._local: _ControlEndpoint | None = None
        if run_dir:
            self._local = make(
                lambda: UnixBinding(run_dir, identity.local_rank),
                hosts=("localhost", ()),
                authenticate=lambda peer, _: Gatekeeper.local(peer),
                tls=None,
            )
            self._endpoints.append(self._local)
        self._remote: _ControlEndpoint | None = None
        try:
            self._remote = _over_tcp(config, identity.local_rank, make)
        except ServeError as error:
            self._no_port(error)
        if self._remote is not None:
            self._endpoints.append(self._remote)
        if not self._endpoints:
            raise ServeError("control: there is neither a run directory nor a host to listen on")
        self._warn_of_variable = bool(config.token) and self._remote is not None

    @property
    def socket_path(self) -> str | None:
        """Path of the Unix socket once it exists."""
        address = self._local.address if self._local is not None else None
        return None if address is None else address[0]

    @property
    def address(self) -> tuple[str, int] | None:
        """(host, port) of the TCP listener once it is bound."""
        return self._remote.address if self._remote is not None else None

    def wait(self, timeout: float) -> bool:
        """Wait until everything is bound that was not refused."""
        deadline = time.monotonic() + timeout
        endpoints = self._endpoints[:1] if self.refusal else self._endpoints
        return all(
            endpoint.bound.wait(max(0.0, deadline - time.monotonic())) for endpoint in endpoints
        )

    def start(self) -> None:
        """Start the threads; returns before anything is bound.

        Raises:
            ServeError: uvicorn or starlette cannot be imported, or no thread be started.
        """
        if self._local is not None:
            self._local.start()
        if self._remote is None:
            return
        if self._warn_of_variable:
            _log.warning(
                "the control token came as a setting: a variable is inherited by every child "
                "process; GPUMEM_OTEL_CONTROL_TOKEN_FILE keeps it in a file"
            )
        try:
            self._remote.start()
            self.refusal = ""
        except ServeError as error:
            self._no_port(error)

    def _no_port(self, error: ServeError) -> None:
        """Go on with the socket alone, where there is one."""
        if self._local is None:
            raise error
        self.refusal = f"no TCP port: {error}; the socket takes commands all the same"

    def must_have_port(self) -> None:
        """Check that commands are taken over TCP, where a host is set.

        Raises:
            ServeError: they are not.
        """
        if self.refusal:
            raise ServeError(self.refusal)

    def stop(self, timeout: float = 1.0) -> None:
        """Close everything and remove the socket; may be started again."""
        deadline = time.monotonic() + timeout
        for endpoint in self._endpoints:
            endpoint.stop(max(0.0, deadline - time.monotonic()))

    def announce(self, identity: Identity) -> None:
        """Use another identity from now on; the socket keeps its name."""
        self._identity = identity

    def close_in_child(self) -> None:
        """In a forked child: close what was inherited, without effect on the parent."""
        for endpoint in self._endpoints:
            endpoint.close_in_child()


def _over_tcp(
    config: ControlConfig, local_rank: int, make: Callable[..., _ControlEndpoint]
) -> _ControlEndpoint | None:
    """The endpoint of the port, None where no host is set; checks its settings in any case.

    Raises:
        ServeError: a setting cannot be used, or would allow unauthenticated access.
    """
    gatekeeper = Gatekeeper(config)
    if not config.host:
        return None
    tls = server_context(config)
    refuse_open_door(config, gatekeeper, tls)
    port = port_of(config, local_rank)
    return make(
        lambda: TcpBinding(config.host, port),
        hosts=(config.host, config.allowed_hosts),
        authenticate=gatekeeper.remote,
        tls=tls,
    )


class _ControlEndpoint(ListenerLife):
    """One address of the listener."""

    what = "the control listener"

    def __init__(
        self,
        control: YieldControl,
        binding: Callable[[], Binding],
        *,
        hosts: tuple[str, tuple[str, ...]],
        authenticate: Callable[[Peer, str], Principal | None],
        tls: ssl.SSLContext | None,
        identity: Callable[[], Identity],
        counters: Counters | None,
        limits: tuple[int, float] | None,
        disk_dirs: tuple[str, ...],
    ) -> None:
        super().__init__(counters)
        self._control = control
        self._make_binding = binding
        self._binding = binding()
        self._hosts = hosts
        self._authenticate = authenticate
        self._tls = tls
        self._identity = identity
        self._limits = limits
        self._disk_dirs = disk_dirs

    def _build(self) -> ListenerLoop:
        from gpumem_otel.serve.event_loop import ListenerLoop  # noqa: PLC0415
        from gpumem_otel.serve.threads import RequestThreads  # noqa: PLC0415
        from gpumem_otel.yielding.control import app as control_app  # noqa: PLC0415
        from gpumem_otel.yielding.control.audit import Audit  # noqa: PLC0415
        from gpumem_otel.yielding.control.guard import (  # noqa: PLC0415
            FULL,
            ControlGuard,
            full_answer,
        )

        burst, per_second = self._limits or (
            control_app.COMMAND_BURST,
            control_app.COMMANDS_PER_SECOND,
        )
        workers, audit = RequestThreads(), Audit()
        app = control_app.build_control_app(
            self._control,
            process=self._process,
            workers=workers,
            audit=audit,
            disk_dirs=self._disk_dirs,
            burst=burst,
            per_second=per_second,
        )
        self._binding = self._make_binding()
        return ListenerLoop(
            ControlGuard(
                app,
                hosts=HostNames(*self._hosts),
                authenticate=self._authenticate,
                audit=audit,
                workers=workers,
                counters=self._counters,
            ),
            binding=self._binding,
            tls=self._tls,
            workers=workers,
            on_bound=self._on_bound,
            on_taken=self._on_taken,
            on_cut=audit.cut,
            full=full_answer(),
            on_full=lambda origin: audit.refused(
                503, {"from": origin, "outcome": "refused", "reason": FULL}
            ),
        )

    def _process(self) -> Process:
        from gpumem_otel.yielding.control.schema import process_of  # noqa: PLC0415

        return process_of(self._identity())

    def _register(self, loop: ListenerLoop) -> None:
        host, port = loop.address
        if port == 0:
            where = f"unix://{host}"
        else:
            scheme = "http" if self._tls is None else "https"
            where = f"{scheme}://{host_port(host, port)}"
        _log.info("control: commands are taken at %s", where)

    def stop(self, timeout: float = 1.0) -> None:
        """Close everything and remove the socket, also one that was bound at this moment."""
        super().stop(timeout)
        if isinstance(self._binding, UnixBinding):
            self._binding.remove()

    def _where(self) -> str:
        return str(self._binding)
