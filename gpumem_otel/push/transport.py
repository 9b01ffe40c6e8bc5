"""The only outgoing socket: one POST, one answer, one deadline over everything.

urllib3 does the HTTP; what it does by default is switched off: it would try three times and
follow redirects with the credentials. One deadline holds for connecting (proxy and TLS included),
sending and reading together, also against a server that trickles bytes; only the name look-up,
which the system's resolver does, has no limit of ours.

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
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote, urlsplit

import urllib3
from urllib3 import connection as urllib3_connection
from urllib3 import exceptions

from gpumem_otel.errors import ConfigError, PushError
from gpumem_otel.settings.files import client_context, load_authorities, load_certificate, stamp

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from _typeshed import ReadableBuffer, WriteableBuffer

    from gpumem_otel.settings.config import PyroscopeConfig

# Which proxy, if any, stands between us and a URL.


def proxy_for(url: str, explicit: str, environ: Mapping[str, str]) -> str:
    """URL of the proxy for this URL, "" for a direct connection.

    Args:
        url: where the request goes.
        explicit: a proxy named in the configuration; wins over the environment and is used
            for loopback addresses too.
        environ: variables as they were handed in: `HTTPS_PROXY`, `HTTP_PROXY`, `NO_PROXY`;
            lower case wins, as with curl.
    """
    parts = urlsplit(url)
    if explicit:
        return _with_scheme(explicit)
    name = f"{parts.scheme}_proxy"
    proxy = environ.get(name) or environ.get(name.upper()) or ""
    excluded = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    if not proxy or _excluded(parts.hostname or "", parts.port, excluded):
        return ""
    return _with_scheme(proxy)


def _with_scheme(proxy: str) -> str:
    proxy = proxy.strip()
    return proxy if "://" in proxy else f"http://{proxy}"


def _excluded(host: str, port: int | None, excluded: str) -> bool:
    """Whether NO_PROXY names this host: `*`, a name and all below it, an address, a network."""
    host = host.lower().rstrip(".")
    address = _address(host)
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    return any(
        _names(entry, host, port, address)
        for entry in (raw.strip().lower() for raw in excluded.split(","))
        if entry
    )


def _names(
    entry: str,
    host: str,
    port: int | None,
    address: ipaddress.IPv4Address | ipaddress.IPv6Address | None,
) -> bool:
    if entry == "*":
        return True
    if address is not None and _covers(entry, address):
        return True
    entry, _, entry_port = entry.partition(":")
    if entry_port and entry_port != str(port):
        return False
    if address is not None:
        return _covers(entry, address)
    entry = entry.lstrip("*").strip(".")
    return host == entry or host.endswith(f".{entry}")


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _covers(entry: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    try:
        return address in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


# Sockets whose operations share one deadline; only the transport makes any.
#
# A time-out of a socket is one per operation, so that a peer which sends or takes a byte now and
# then holds its client for ever. These ask a `SendProgress` before each operation what is left.


class SendProgress:
    """The deadline of the request under way and how far it came.

    Attributes:
        connected: the request had a connection, proxy and TLS handshake included.
        reused: that connection had been kept from an earlier request.
        send_failed: the peer closed before it took the whole request.
        received: bytes of the answer seen so far.
    """

    __slots__ = ("_end", "connected", "received", "reused", "send_failed")

    def __init__(self) -> None:
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


class TimedSocket(socket.socket):
    """A TCP socket; subclasses bind `progress`."""

    progress: ClassVar[SendProgress]

    def sendall(self, data: ReadableBuffer, flags: int = 0, /) -> None:
        """Send everything, within what is left."""
        self.settimeout(self.progress.left())
        try:
            super().sendall(data, flags)
        except TimeoutError:
            raise
        except OSError:
            self.progress.send_failed = True
            raise

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0) -> int:
        """Read what is there, within what is left."""
        self.settimeout(self.progress.left())
        count = super().recv_into(buffer, nbytes, flags)
        self.progress.received += count
        return count


class TimedTlsSocket(ssl.SSLSocket):
    """The same over TLS, handshake included."""

    progress: ClassVar[SendProgress]

    def do_handshake(self, block: bool = False) -> None:
        """Shake hands, within what is left."""
        self.settimeout(self.progress.left())
        super().do_handshake(block)

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        """Send a part, within what is left; `sendall` is made of these."""
        self.settimeout(self.progress.left())
        try:
            return super().send(data, flags)
        except TimeoutError:
            raise
        except OSError:
            self.progress.send_failed = True
            raise

    def recv_into(self, buffer: WriteableBuffer, nbytes: int | None = None, flags: int = 0) -> int:
        """Read what is there, within what is left."""
        self.settimeout(self.progress.left())
        count = super().recv_into(buffer, nbytes, flags)
        self.progress.received += count
        return count


def connect(
    kind: type[TimedSocket], host: str, port: int, options: Iterable[tuple[Any, ...]]
) -> TimedSocket:
    """Connect to the first address of a name that answers; all share the deadline.

    Raises:
        TimeoutError: the deadline passed.
        ConnectionError: no address could be reached, or the name has none.
    """
    name = host[1:-1] if host.startswith("[") else host
    problem = "the name has no address"
    try:
        addresses = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConnectionError(reason_of(error)) from None
    for family, _, protocol, _, address in addresses:
        sock = kind(family, socket.SOCK_STREAM, protocol)
        try:
            for option in options:
                sock.setsockopt(*option)
            sock.settimeout(kind.progress.left())
            sock.connect(address)
        except TimeoutError:
            sock.close()
            if address is addresses[-1][4]:
                raise
        except OSError as error:
            sock.close()
            # Without an errno: urllib3 passes over some of them when it has sent a request.
            problem = reason_of(error)
        else:
            return sock
    raise ConnectionError(problem)


def reason_of(error: BaseException) -> str:
    """Why, in a few words, without the names of objects that the texts of errors carry."""
    if isinstance(error, ssl.SSLError):
        verify = getattr(error, "verify_message", "")
        return str(verify or error.reason or error.strerror or "TLS failure")
    if isinstance(error, socket.gaierror):
        return f"the name can not be resolved ({error.strerror})"
    if isinstance(error, OSError):
        file = f": {error.filename}" if isinstance(error.filename, str) else ""
        return f"{error.strerror or str(error) or type(error).__name__}{file}"
    return type(error).__name__


MAX_ANSWER_BYTES = 64 * 1024
"""More of an answer is not read: an error message is a few hundred bytes."""

MAX_IDLE_SECONDS = 20.0
"""A connection idle for longer is not used again. Load balancers close idle connections after 60 s,
the very cadence of pushes, and of a request that meets the closing nobody knows whether it
arrived."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said.

    Attributes:
        body: as sent, not decoded, at most `MAX_ANSWER_BYTES`.
        headers: names in lower case.
    """

    status: int
    body: bytes
    headers: Mapping[str, str]


class Transport:
    """Sends requests, one at a time; safe to use from any thread and in a forked child.

    Args:
        config: certificates and an explicit proxy are taken from it.
        environ: the proxy variables (`HTTPS_PROXY`, `HTTP_PROXY`, `NO_PROXY`), used where the
            configuration names no proxy.
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
        self._opened: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._pool_classes, self._tls_socket = _pool_classes(self._progress, self._opened)
        self._managers: dict[str, urllib3.PoolManager] = {}
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
            return self._post(url, where, body, headers)
        finally:
            self._lock.release()

    def abandon_after_fork(self) -> None:
        """In a forked child: let go of the parent's connections without a word on them."""
        for sock in list(self._opened):
            # Only this process's copies of the descriptors: nothing is sent, no lock is taken.
            if (descriptor := sock.detach()) >= 0:
                os.close(descriptor)
        # The parent's locks may be held for ever: kept, so that no finalizer waits for one.
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
        proxy = proxy_for(url, self._config.proxy.reveal(), self._environ)
        manager = self._manager(url, where, proxy)
        try:
            try:
                answer = self._exchange(manager, url, body, headers)
            except (exceptions.HTTPError, OSError):
                # A kept connection that the server closed before it had the whole request: with
                # the length announced it can not have acted upon it.
                if not (progress.reused and progress.send_failed and not progress.received):
                    raise
                self._close_connections()
                progress.restart()
                answer = self._exchange(manager, url, body, headers)
        except (exceptions.HTTPError, OSError) as error:
            self._close_connections()
            raise self._failure(error, where) from None
        except ValueError:  # UnicodeError too: their texts would show a header, so a credential
            self._close_connections()
            raise PushError(
                f"{where}: the URL or a header holds characters that can not be sent",
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
        try:
            data = response.read(MAX_ANSWER_BYTES, decode_content=False)
            whole = len(data) < MAX_ANSWER_BYTES and not response.read(1, decode_content=False)
        except BaseException:
            response.close()
            raise
        if whole:
            response.release_conn()
        else:
            response.close()
        named = {name.lower(): value for name, value in response.headers.items()}
        return Answer(response.status, data, named)

    def _manager(self, url: str, where: str, proxy: str) -> urllib3.PoolManager:
        """The pools behind one proxy, or none; made anew when a certificate was rotated."""
        secure = url.lower().startswith("https:")
        key = f"{proxy} {secure}"
        config = self._config
        files = (config.ca_file, config.client_cert_file, config.client_key_file)
        try:
            stamps = tuple(map(stamp, files))
            if stamps != self._stamps:
                self.close()
            elif time.monotonic() - self._last_used > MAX_IDLE_SECONDS:
                self._close_connections()
            self._stamps = stamps
            if key not in self._managers:
                self._managers[key] = self._new_manager(proxy, secure)
        except ConfigError as error:
            raise PushError(f"{where}: certificate file {error}", reason="tls") from None
        except (ValueError, exceptions.HTTPError):
            raise PushError(f"{where}: the proxy's URL can not be used", reason="config") from None
        return self._managers[key]

    def _new_manager(self, proxy: str, secure: bool) -> urllib3.PoolManager:
        config = self._config
        context = self._context(config.ca_file) if secure else None
        if context and config.client_cert_file:
            load_certificate(
                context,
                config.client_cert_file,
                config.client_key_file,
                key_setting="client_key_file",
            )
        if proxy:
            parsed = urllib3.util.parse_url(proxy)
            credentials = unquote(parsed.auth) if parsed.auth else None
            to_proxy = None
            if parsed.scheme == "https":
                # The proxy is somebody else: the system's authorities count too, and it is shown
                # no certificate of ours.
                to_proxy = self._context("")
                if config.ca_file:
                    load_authorities(to_proxy, config.ca_file)
            manager: urllib3.PoolManager = urllib3.ProxyManager(
                parsed._replace(auth=None).url,
                proxy_headers=urllib3.make_headers(proxy_basic_auth=credentials),
                proxy_ssl_context=to_proxy,
                ssl_context=context,
                maxsize=1,
                num_pools=2,
            )
        else:
            manager = urllib3.PoolManager(ssl_context=context, maxsize=1, num_pools=2)
        manager.pool_classes_by_scheme = self._pool_classes
        return manager

    def _context(self, ca_file: str) -> ssl.SSLContext:
        context = client_context(ca_file)
        context.sslsocket_class = self._tls_socket
        return context

    def _failure(self, error: Exception, where: str) -> PushError:
        """Say what went wrong in our own words: urllib3's name its objects."""
        connected = self._progress.connected
        cause = _cause(error)
        why = reason_of(cause)
        timed_out = isinstance(cause, (TimeoutError, exceptions.TimeoutError))
        if isinstance(cause, ssl.SSLEOFError):
            why = "closed during the TLS handshake" if not connected else "closed"
        elif isinstance(error, exceptions.SSLError) or isinstance(cause, ssl.SSLError):
            return PushError(f"{where}: TLS: {why}", reason="tls")
        if isinstance(error, exceptions.ProxyError) and not connected:
            refused = "Tunnel connection failed: 4" in str(cause)
            return PushError(
                f"{where}: proxy: {'time-out' if timed_out else why}",
                reason="proxy",
                retryable=not refused,
            )
        if not connected:
            why = "time-out" if timed_out else why
            return PushError(f"{where}: connect: {why}", reason="connect", retryable=True)
        if timed_out:
            return PushError(f"{where}: no whole answer before the deadline", reason="timeout")
        return PushError(f"{where}: the connection was cut: {why}", reason="cut")


def _pool_classes(
    progress: SendProgress, opened: weakref.WeakSet[socket.socket]
) -> tuple[dict[str, Any], type[TimedTlsSocket]]:
    """urllib3's pools and connections, with sockets that obey one `progress`."""

    class Tcp(TimedSocket):
        pass

    class Tls(TimedTlsSocket):
        pass

    Tcp.progress = Tls.progress = progress

    class Watched:
        """Mixed in before a connection class of urllib3."""

        def _new_conn(self: Any) -> socket.socket:
            sock = connect(Tcp, self._dns_host, self.port, self.socket_options or ())
            self._tcp = sock
            return sock

        def connect(self: Any) -> None:
            self._tcp = None
            try:
                super().connect()  # type: ignore[misc]
            except BaseException:
                # http.client of Python 3.10 leaves that of a refused tunnel to the collector.
                if self._tcp is not None and (descriptor := self._tcp.detach()) >= 0:
                    os.close(descriptor)
                raise
            opened.add(self.sock)
            progress.connected = True
            progress.received = 0

        def request(self: Any, *args: Any, **options: Any) -> None:
            if not self.is_closed and not progress.connected:
                progress.connected = progress.reused = True
            super().request(*args, **options)  # type: ignore[misc]

    class HttpConnection(Watched, urllib3_connection.HTTPConnection):
        pass

    class HttpsConnection(Watched, urllib3_connection.HTTPSConnection):
        pass

    class HttpPool(urllib3.HTTPConnectionPool):
        ConnectionCls = HttpConnection

    class HttpsPool(urllib3.HTTPSConnectionPool):
        ConnectionCls = HttpsConnection

    return {"http": HttpPool, "https": HttpsPool}, Tls


def _cause(error: BaseException) -> BaseException:
    """The socket's or TLS's own error inside urllib3's wrappers."""
    if isinstance(error, (exceptions.ProxyError, exceptions.SSLError, exceptions.ProtocolError)):
        for inner in reversed(error.args):
            if isinstance(inner, BaseException):
                return _cause(inner)
    return error
