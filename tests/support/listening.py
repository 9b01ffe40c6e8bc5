"""A listener for tests, and a client that sends bytes as they are."""

from __future__ import annotations

import contextlib
import gzip
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpumem_otel.serve.dependencies import AppDeps, Health
from gpumem_otel.serve.listener import Listener
from gpumem_otel.settings.config import ServeConfig

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator

EXPOSITION = b"# TYPE gpumem_segments gauge\ngpumem_segments 3\n"
PPROF = gzip.compress(b"pprof", mtime=0)
WAIT = 30.0
"""Bound of every wait: reached only where a test fails."""


def until(condition: Callable[[], bool]) -> None:
    """Wait for what nothing announces."""
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def some_deps(**parts: Any) -> AppDeps:
    """Deps that answer at once, some parts replaced."""
    given: dict[str, Any] = {
        "metrics": lambda _accept: ("text/plain; version=0.0.4", EXPOSITION),
        "profile": lambda _kind, _device, _seconds, _stop: PPROF,
        "health": lambda: Health(ok=True),
        "service_name": "trainer",
    }
    return AppDeps(**{**given, **parts})


@contextlib.contextmanager
def listening(deps: AppDeps | None = None, **config: Any) -> Iterator[Listener]:
    """A bound listener on a free port."""
    extra = {name: config.pop(name) for name in ("counters", "identity") if name in config}
    listener = Listener(deps or some_deps(), ServeConfig(**{"port": 0, **config}), **extra)
    listener.start()
    try:
        assert listener.bound.wait(WAIT)
        yield listener
    finally:
        listener.stop(timeout=WAIT)


@dataclass
class Client:
    """One connection."""

    sock: socket.socket
    buffer: bytes = b""

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def request(self, path: str, *lines: str, host: str = "localhost", method: str = "GET") -> None:
        head = [f"{method} {path} HTTP/1.1", f"Host: {host}", *lines, "", ""]
        self.send("\r\n".join(head).encode("latin-1"))

    def answer(self, *, head: bool = False) -> tuple[int, dict[str, str], bytes]:
        """Read one response with a Content-Length."""
        text = self._until(b"\r\n\r\n").decode("latin-1")
        first, *rest = text.rstrip("\r\n").split("\r\n")
        headers = {k.strip().lower(): v.strip() for k, v in (line.split(":", 1) for line in rest)}
        size = 0 if head else int(headers.get("content-length", "0"))
        while len(self.buffer) < size:
            self._more()
        body, self.buffer = self.buffer[:size], self.buffer[size:]
        return int(first.split()[1]), headers, body

    def closed(self) -> bool:
        """Wait until the other side closes; whether nothing came before that."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionError:
            return True

    def _until(self, mark: bytes) -> bytes:
        while mark not in self.buffer:
            self._more()
        head, self.buffer = self.buffer.split(mark, 1)
        return head + mark

    def _more(self) -> None:
        data = self.sock.recv(65536)
        if not data:
            raise ConnectionError("closed")
        self.buffer += data


@contextlib.contextmanager
def connected(
    address: tuple[str, int] | None, tls: ssl.SSLContext | None = None, name: str = "localhost"
) -> Iterator[Client]:
    """A connection, its TLS handshake done where a context is given."""
    assert address is not None
    with socket.create_connection(address, timeout=WAIT) as sock:
        if tls is None:
            yield Client(sock)
        else:
            with tls.wrap_socket(sock, server_hostname=name) as wrapped:
                yield Client(wrapped)


def ask(
    address: tuple[str, int] | None, path: str, *lines: str, **options: Any
) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own."""
    with connected(address, options.pop("tls", None)) as client:
        client.request(path, *lines, **options)
        return client.answer(head=options.get("method") == "HEAD")
