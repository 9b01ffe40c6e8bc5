"""The only outgoing socket: one POST, one answer, one deadline over everything.

urllib3 does the HTTP, without its retries and redirects: a redirect would take the credentials
along. One deadline covers connecting (proxy and TLS included), sending and reading, also against a
server that sends or takes a byte now and then; only the look-up of the name, which the system's
resolver does, has no limit of ours.

A connection is used again only while it is fresh, and a request is sent a second time only where
the server provably did not take the first: pushes are not idempotent.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import threading
import time
import weakref
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import urllib3
from urllib3 import connection as urllib3_connection
from urllib3 import exceptions

from gpumem_otel.errors import ConfigError, PushError
from gpumem_otel.settings.files import client_context, load_authorities, load_certificate, stamp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from _typeshed import ReadableBuffer, WriteableBuffer

    from gpumem_otel.settings.config import PyroscopeConfig

MAX_ANSWER_BYTES = 64 * 1024
"""More of an answer is not read: an error message is a few hundred bytes."""

MAX_IDLE_SECONDS = 20.0
"""A connection idle for longer is not used again. Load balancers close idle connections after 60 s,
which is how often we push, and a request that meets the close may or may not have arrived."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered.

    Attributes:
        body: as sent, not decoded, at most `MAX_ANSWER_BYTES`.
        headers: names in lower case.
    """

    status: int
    body: bytes
    headers: Mapping[str, str]


# Proxies. The standard library knows neither networks nor `*.name` in NO_PROXY.


def proxy_for(url: str, explicit: str, environ: Mapping[str, str]) -> str:
    """URL of the proxy for this URL, "" for a direct connection.

    Args:
        url: where the request goes.
        explicit: a proxy named in the configuration; wins over the environment and is used
            for loopback addresses too.
        environ: `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY`; lower case wins, as with curl.
    """
    parts = urlsplit(url)
    proxy = explicit
    if not explicit:
        name = f"{parts.scheme}_proxy"
        excluded = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
        if not _excluded(parts.hostname or "", parts.port, excluded):
            proxy = environ.get(name) or environ.get(name.upper()) or ""
    proxy = proxy.strip()
    return proxy if not proxy or "://" in proxy else f"http://{proxy}"


def _excluded(host: str, port: int | None, no_proxy: str) -> bool:
    """Whether NO_PROXY names this host: `*`, a name and all below it, an address, a network."""
    host = host.lower().rstrip(".")
    entries = [entry.strip().lower() for entry in no_proxy.split(",") if entry.strip()]
    names = [name for name, _, at in (e.partition(":") for e in entries) if at in {"", str(port)}]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        names = [name.lstrip("*").strip(".") for name in names]
        below = any(name and host.endswith(f".{name}") for name in names)
        return host == "localhost" or "*" in entries or host in names or below
    covered = any(_covers(entry, address) for entry in (*entries, *names))
    return address.is_loopback or "*" in entries or covered


def _covers(entry: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    try:
        return address in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


# Sockets whose operations share one deadline. A socket's own time-out starts again with every
# operation, so a peer that sends or takes a byte now and then would hold us forever.


class SendProgress:
    """The deadline of the request under way and how far it has come.

    Attributes:
        connected: the request had a connection, proxy and TLS handshake included.
        reused: that connection had been kept from an earlier request.
        send_failed: the peer closed before it took the whole request.
        received: bytes of the answer so far.
        opened: connections of all requests, for a forked child to close.
    """

    def __init__(self) -> None:
        self.opened: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self.begin(0.0)

    def begin(self, seconds: float) -> None:
        """Start the clock of a request."""
        self._end = time.monotonic() + seconds
        self.restart()

    def restart(self) -> None:
        """Forget how far the request came, but not its deadline."""
        self.connected = self.reused = self.send_failed = False
        self.received = 0

    def left(self) -> float:
        """Seconds that are left, more than 0.

        Raises:
            TimeoutError: there are none.
        """
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("deadline passed")
        return seconds


_request: Any = threading.local()
"""`progress` of the request that this thread sends; sockets made by urllib3 get it from here."""


class _TimedSocket(socket.socket):
    """A TCP socket whose operations share the deadline of the request."""

    def send(self, data: ReadableBuffer, flags: int = 0, /) -> int:
        self.settimeout(_request.progress.left())
        try:
            return super().send(data, flags)
        except TimeoutError:
            raise
        except OSError:
            _request.progress.send_failed = True
            raise

    def sendall(self, data: ReadableBuffer, flags: int = 0, /) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[self.send(rest, flags) :]

    def recv(self, *arguments: int) -> bytes:
        self.settimeout(_request.progress.left())
        return super().recv(*arguments)

    def recv_into(self, buffer: WriteableBuffer, *arguments: int) -> int:
        self.settimeout(_request.progress.left())
        count = super().recv_into(buffer, *arguments)
        _request.progress.received += count
        return count


class _TimedTlsSocket(_TimedSocket, ssl.SSLSocket):  # type: ignore[misc]
    """The same over TLS, handshake included."""

    def do_handshake(self, block: bool = False) -> None:
        self.settimeout(_request.progress.left())
        super().do_handshake(block)


class _TimedConnection:
    """Mixed in before a connection class of urllib3."""

    def _new_conn(self: Any) -> socket.socket:
        """Connect to the first address that answers; all share the deadline."""
        problem, host = "the name has no address", self._dns_host.strip("[]")
        try:
            addresses = socket.getaddrinfo(host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConnectionError(_reason_of(error)) from None
        for family, _, protocol, _, address in addresses:
            self._tcp = sock = _TimedSocket(family, socket.SOCK_STREAM, protocol)
            try:
                for option in self.socket_options or ():
                    sock.setsockopt(*option)
                sock.settimeout(_request.progress.left())
                sock.connect(address)
            except TimeoutError:
                sock.close()
                if address is addresses[-1][4]:
                    raise
            except OSError as error:
                sock.close()
                # Without an errno: urllib3 ignores some of them once it has sent a request.
                problem = _reason_of(error)
            else:
                return sock
        raise ConnectionError(problem)

    def connect(self: Any) -> None:
        self._tcp = None
        try:
            super().connect()  # type: ignore[misc]
        except BaseException:
            # http.client of Python 3.10 leaves the socket of a refused tunnel to the collector.
            if self._tcp is not None and (descriptor := self._tcp.detach()) >= 0:
                os.close(descriptor)
            raise
        _request.progress.opened.add(self.sock)
        _request.progress.connected = True
        _request.progress.received = 0

    def request(self: Any, *args: Any, **options: Any) -> None:
        progress = _request.progress
        if not self.is_closed and not progress.connected:
            progress.connected = progress.reused = True
        super().request(*args, **options)  # type: ignore[misc]


class _HttpConnection(_TimedConnection, urllib3_connection.HTTPConnection):
    pass


class _HttpsConnection(_TimedConnection, urllib3_connection.HTTPSConnection):
    pass


class _HttpPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _HttpConnection


class _HttpsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _HttpsConnection


class Transport:
    """Sends requests, one at a time; safe to use from any thread and in a forked child.

    Args:
        config: certificates and an explicit proxy are taken from it.
        environ: the proxy variables, used where the configuration names no proxy.
    """

    def __init__(
        self, config: PyroscopeConfig, *, environ: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._config = config
        self._environ = environ
        self._inherited: list[object] = []
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._progress = SendProgress()
        self._managers: dict[tuple[str, bool], urllib3.PoolManager] = {}
        self._stamps: tuple[tuple[int, ...], ...] = ()
        self._last_used = 0.0

    def post(
        self, url: str, body: bytes, headers: Mapping[str, str], deadline_seconds: float
    ) -> Answer:
        """Send one request and read its answer, whatever its status.

        Args:
            url: absolute, without credentials.
            body: sent as it is.
            headers: sent as they are.
            deadline_seconds: for connecting, sending and reading together.

        Raises:
            PushError: no whole answer came. Retryable only where the request was not sent.
        """
        if self._pid != os.getpid():
            self.abandon_after_fork()
        where = urlsplit(url).netloc.rpartition("@")[2]
        if not self._lock.acquire(timeout=max(deadline_seconds, 0.0)):
            raise PushError(
                f"{where}: another request is under way", reason="connect", retryable=True
            )
        try:
            self._progress.begin(deadline_seconds)
            _request.progress = self._progress
            return self._post(url, where, body, headers)
        finally:
            self._lock.release()

    def abandon_after_fork(self) -> None:
        """In a forked child: close our copies of the parent's connections; nothing is sent."""
        for sock in list(self._progress.opened):
            if (descriptor := sock.detach()) >= 0:
                os.close(descriptor)
        # The parent's locks may be held forever: kept, so that no finalizer waits for one.
        self._inherited.append(self._managers)
        self._reset()

    def close(self) -> None:
        """Close kept connections; the transport can still be used."""
        if self._pid == os.getpid():
            self._close_connections()
            self._managers.clear()

    def _close_connections(self) -> None:
        for manager in self._managers.values():
            manager.clear()
        self._last_used = 0.0

    def _post(self, url: str, where: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        progress = self._progress
        manager = self._manager(url, where)
        try:
            try:
                answer = self._exchange(manager, url, body, headers)
            except (exceptions.HTTPError, OSError):
                # A kept connection that the server closed before it had the whole request, whose
                # length it knew: it cannot have acted on it.
                if not (progress.reused and progress.send_failed and not progress.received):
                    raise
                self._close_connections()
                progress.restart()
                answer = self._exchange(manager, url, body, headers)
        except (exceptions.HTTPError, OSError) as error:
            self._close_connections()
            raise _failure(error, where, connected=progress.connected) from None
        except ValueError:  # its text would show a header, which may be a credential
            self._close_connections()
            raise PushError(
                f"{where}: the URL or a header holds characters that cannot be sent",
                reason="config",
            ) from None
        self._last_used = time.monotonic()
        return answer

    def _exchange(
        self, manager: urllib3.PoolManager, url: str, body: bytes, headers: Mapping[str, str]
    ) -> Answer:
        response = manager.urlopen(
            "POST",
            url,
            body=body,
            headers=dict(headers),
            retries=False,
            redirect=False,
            timeout=self._progress.left(),
            preload_content=False,
            decode_content=False,
        )
        whole = False
        try:
            data = response.read(MAX_ANSWER_BYTES, decode_content=False)
            whole = len(data) < MAX_ANSWER_BYTES and not response.read(1, decode_content=False)
        finally:
            if not whole:
                response.close()
        response.release_conn()
        named = {name.lower(): value for name, value in response.headers.items()}
        return Answer(response.status, data, named)

    def _manager(self, url: str, where: str) -> urllib3.PoolManager:
        """The pools behind one proxy, or none; made again when a certificate was rotated."""
        config = self._config
        try:
            proxy = proxy_for(url, config.proxy.reveal(), self._environ)
        except ValueError as error:  # its port
            raise PushError(f"{where}: {error}", reason="connect") from None
        key = proxy, url.lower().startswith("https:")
        try:
            files = (config.ca_file, config.client_cert_file, config.client_key_file)
            stamps = tuple(map(stamp, files))
            if stamps != self._stamps:
                self.close()
            elif time.monotonic() - self._last_used > MAX_IDLE_SECONDS:
                self._close_connections()
            self._stamps = stamps
            if key not in self._managers:
                self._managers[key] = _new_manager(config, *key)
        except ConfigError as error:
            raise PushError(f"{where}: certificate file {error}", reason="tls") from None
        except (ValueError, exceptions.HTTPError):
            raise PushError(f"{where}: the proxy's URL cannot be used", reason="config") from None
        return self._managers[key]


def _new_manager(config: PyroscopeConfig, proxy: str, secure: bool) -> urllib3.PoolManager:
    context = _context(config.ca_file) if secure else None
    if context and config.client_cert_file:
        load_certificate(
            context,
            config.client_cert_file,
            config.client_key_file,
            key_setting="client_key_file",
        )
    options: dict[str, Any] = {"ssl_context": context, "maxsize": 1, "num_pools": 2}
    if proxy:
        parsed = urllib3.util.parse_url(proxy)
        credentials = unquote(parsed.auth) if parsed.auth else None
        if parsed.scheme == "https":
            # The proxy belongs to others: the system's authorities count too, and it gets no
            # certificate of ours.
            options["proxy_ssl_context"] = to_proxy = _context("")
            if config.ca_file:
                load_authorities(to_proxy, config.ca_file)
        manager: urllib3.PoolManager = urllib3.ProxyManager(
            parsed._replace(auth=None).url,
            proxy_headers=urllib3.make_headers(proxy_basic_auth=credentials),
            **options,
        )
    else:
        manager = urllib3.PoolManager(**options)
    manager.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}
    return manager


def _context(ca_file: str) -> ssl.SSLContext:
    context = client_context(ca_file)
    context.sslsocket_class = _TimedTlsSocket
    return context


# What went wrong, in our own words: those of urllib3 name its objects.


def _failure(error: Exception, where: str, *, connected: bool) -> PushError:
    cause = _cause(error)
    timed_out = isinstance(cause, (TimeoutError, exceptions.TimeoutError))
    why = "time-out" if timed_out else _reason_of(cause)
    if isinstance(cause, ssl.SSLEOFError):
        why = "closed" if connected else "closed during the TLS handshake"
    elif isinstance(error, exceptions.SSLError) or isinstance(cause, ssl.SSLError):
        return PushError(f"{where}: TLS: {_reason_of(cause)}", reason="tls")
    if isinstance(error, exceptions.ProxyError) and not connected:
        refused = "Tunnel connection failed: 4" in str(cause)
        return PushError(f"{where}: proxy: {why}", reason="proxy", retryable=not refused)
    if not connected:
        return PushError(f"{where}: connect: {why}", reason="connect", retryable=True)
    if timed_out:
        return PushError(f"{where}: no whole answer before the deadline", reason="timeout")
    return PushError(f"{where}: the connection was cut: {why}", reason="cut")


def _cause(error: BaseException) -> BaseException:
    """The socket's or TLS's own error inside urllib3's wrappers."""
    if isinstance(error, (exceptions.ProxyError, exceptions.SSLError, exceptions.ProtocolError)):
        for inner in reversed(error.args):
            if isinstance(inner, BaseException):
                return _cause(inner)
    return error


def _reason_of(error: BaseException) -> str:
    """Why, in a few words, without the names of objects that the texts of errors carry."""
    if isinstance(error, ssl.SSLError):
        verify = getattr(error, "verify_message", "")
        return str(verify or error.reason or error.strerror or "TLS failure")
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved ({error.strerror})"
    if isinstance(error, OSError):
        file = f": {error.filename}" if isinstance(error.filename, str) else ""
        return f"{error.strerror or str(error) or type(error).__name__}{file}"
    return type(error).__name__
