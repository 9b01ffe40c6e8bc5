"""The checks that every request passes before a handler sees it: number, Host, token, body.

Pure ASGI, so that they also hold for paths that no route has.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import sys
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from gpumem_otel.base.logs import named_logger
from gpumem_otel.serve.threads import StoppedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.serve.auth import Tokens
    from gpumem_otel.serve.threads import RequestThreads

    Message: TypeAlias = MutableMapping[str, Any]
    Scope: TypeAlias = MutableMapping[str, Any]
    Receive: TypeAlias = Callable[[], Awaitable[Message]]
    Send: TypeAlias = Callable[[Message], Awaitable[None]]
    App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = named_logger("gpumem_otel.serve")

MAX_REQUESTS: Final = 16
"""Requests under way at once; the next is answered 503."""

MAX_BODY_BYTES: Final = 4096
"""No route reads a body, but some clients send a small one."""

CHALLENGE: Final = (b"www-authenticate", b'Bearer realm="gpumem-otel"')

CLOSE: Final = (b"connection", b"close")

ALWAYS: Final = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
)
"""Headers of every answer."""

Refusal: TypeAlias = "tuple[int, str, tuple[tuple[bytes, bytes], ...]]"
"""Status, one line, further headers."""

_LENGTH_DIGITS: Final = 12

_RESOLVE_SECONDS: Final = 2.0

# Host headers. A page in a browser can point a name of its own at 127.0.0.1 and read what answers
# there (DNS rebinding). The browser then sends that foreign name as Host, so it is refused.

_NAME_AND_PORT = re.compile(r"(?:\[(?P<v6>[0-9a-f:.%]+)\]|(?P<name>[^\[\]:/@?#\s]+))(?::\d{0,5})?")


def host_name(header: str) -> str:
    """The name or address in a Host header, in one spelling, "" where there is none.

    Lower case, without port, brackets and final dot; an IPv4 address inside IPv6 as IPv4.
    """
    match = _NAME_AND_PORT.fullmatch(header.strip().lower())
    return "" if match is None else _one_spelling(match["v6"] or match["name"])


def _one_spelling(name: str) -> str:
    name = name.strip().lower().rstrip(".")
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def machine_names() -> frozenset[str]:
    """Host name, full name and addresses of this machine; asks the resolver, so it may block."""
    name = socket.gethostname()
    names = {name}
    try:
        # Bytes, since str would import the idna codec on a thread of ours.
        entries = socket.getaddrinfo(
            name.encode("ascii", "ignore"), None, type=socket.SOCK_STREAM, flags=socket.AI_CANONNAME
        )
    except OSError:
        entries = []
    for _, _, _, canonical, address in entries:
        names.update((canonical, str(address[0])))
    return frozenset(filter(None, map(_one_spelling, names)))


class HostNames:
    """The names that a request may call us by: loopback, bound address, machine, configured ones.

    `learn` adds what only the resolver knows (`machine_names`).
    """

    def __init__(self, bound: str, allowed: tuple[str, ...]) -> None:
        configured = {host_name(entry) or _one_spelling(entry) for entry in allowed}
        own = {"localhost", _one_spelling(bound), _one_spelling(socket.gethostname())}
        self.any = "*" in allowed
        self.learned = False
        self._names = frozenset(filter(None, own | configured))

    def learn(self, names: frozenset[str]) -> None:
        """Add the names that had to be looked up."""
        self._names |= names
        self.learned = True

    def allows(self, name: str, connected_to: str) -> bool:
        """Whether a request may name this host.

        Args:
            name: as `host_name` gave it.
            connected_to: local address of the connection; a pod that binds 0.0.0.0 learns its
                own address from nothing else.
        """
        if self.any:
            return True
        if not name:
            return False
        if name in self._names or name == _one_spelling(connected_to):
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


def host_port(host: str, port: object) -> str:
    """As in a URL: brackets around an address of IPv6 (RFC 3986, 3.2.2)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class RequestGuard:
    """ASGI middleware of the read listener; the control listener's guard replaces some steps."""

    stage = "scrape"
    """Where failures are counted."""

    hosts_variable = "GPUMEM_OTEL_ALLOWED_HOSTS"
    """The variable that allows further names."""

    def __init__(
        self,
        app: App,
        *,
        hosts: HostNames,
        tokens: Tokens | None,
        workers: RequestThreads,
        counters: Counters,
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._tokens = tokens
        self._workers = workers
        self._counters = counters
        self._running = 0
        self._logged: set[str] = set()
        self._resolving: asyncio.Future[frozenset[str]] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; lifespan and websocket events are not served."""
        if scope["type"] != "http":
            return
        started = False

        async def send_on(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                own = [(b"date", formatdate(usegmt=True).encode()), *ALWAYS]
                message["headers"] = own + list(message.get("headers", ()))
            await send(message)

        self._running += 1
        try:
            refusal = await self._refusal(scope)
            if refusal is None:
                await self._app(scope, receive, send_on)
            else:
                await self._answer(send_on, scope, *refusal)
        except StoppedError as exc:  # the process ends: no failure, and nothing to log
            if not started:
                await self._answer(send_on, scope, 503, str(exc), ())
        except Exception as exc:
            self._failed(exc)
            if not started:
                await self._answer(send_on, scope, 500, "internal error", ())
        finally:
            self._running -= 1

    async def _refusal(self, scope: Scope) -> Refusal | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self._running > MAX_REQUESTS:
            return 503, "too many requests at once", ((b"retry-after", b"1"),)
        host = headers.get(b"host")
        # Only HTTP/1.0 comes without a Host, and no browser uses it.
        if host is not None and not await self._allows(host.decode("latin-1"), scope):
            line = f"this Host is not served here: {self.hosts_variable} lists further ones"
            return 421, line, ()
        return self._authorize(scope, headers) or self._body_refusal(headers)

    def _authorize(self, _scope: Scope, headers: dict[bytes, bytes]) -> Refusal | None:
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        if self._tokens is None or self._tokens.accept(authorization):
            return None
        return 401, "a bearer token is needed", (CHALLENGE,)

    def _body_refusal(self, headers: dict[bytes, bytes]) -> Refusal | None:
        if b"transfer-encoding" in headers or body_length(headers) > MAX_BODY_BYTES:
            return 413, "no body is read here", (CLOSE,)
        return None

    async def _allows(self, header: str, scope: Scope) -> bool:
        connected_to = (scope.get("server") or ("",))[0]
        name = host_name(header)
        if name and not self._hosts.learned and not self._hosts.allows(name, connected_to):
            await self._learn()
        return self._hosts.allows(name, connected_to)

    async def _learn(self) -> None:
        """Ask the resolver for our names, once; a slow one is not waited for."""
        if self._resolving is None:
            self._resolving = self._workers.start(machine_names)
        await asyncio.wait({self._resolving}, timeout=_RESOLVE_SECONDS)
        if self._resolving.done() and not self._hosts.learned:
            self._hosts.learn(self._resolving.result())

    async def _answer(
        self,
        send: Send,
        scope: Scope,
        status: int,
        line: str,
        extra: tuple[tuple[bytes, bytes], ...],
    ) -> None:
        kind, body = self._render(status, line)
        length = str(len(body)).encode()
        headers = [(b"content-type", kind), (b"content-length", length), *extra]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        sent = b"" if scope["method"] == "HEAD" else body
        await send({"type": "http.response.body", "body": sent})

    def _render(self, _status: int, line: str) -> tuple[bytes, bytes]:
        """Content type and body of an error."""
        return b"text/plain; charset=utf-8", f"{line}\n".encode()

    def _failed(self, exc: Exception) -> None:
        self._counters.add("exporter_errors", stage=self.stage)
        kind = type(exc).__name__
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning("a request failed (further ones are only counted)", exc_info=exc)


def body_length(headers: dict[bytes, bytes]) -> int:
    """Content-Length; more than any limit where it is no number, or a long one."""
    value = headers.get(b"content-length", b"0").strip()
    short = value.isdigit() and len(value) <= _LENGTH_DIGITS
    return int(value) if short else sys.maxsize
