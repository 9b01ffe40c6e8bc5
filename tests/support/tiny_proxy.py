"""A proxy of the two kinds: CONNECT tunnels, and requests with an absolute URI."""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import ssl


class TinyProxy:
    """Runs in threads of its own; a context manager.

    Attributes:
        seen: (method, target, Proxy-Authorization) of each request.
        targets: name -> port on loopback, so that made-up names lead somewhere.
        status: what CONNECT is answered with.
    """

    def __init__(self, *, status: int = 200) -> None:
        self.seen: list[tuple[str, str, str]] = []
        self.targets: dict[str, int] = {}
        self.status = status
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="tiny-proxy", daemon=True
        )
        self._thread.start()

    def require_tls(self, context: ssl.SSLContext) -> None:
        """Take connections over TLS only."""
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        for connection in list(self._server.open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    proxy: TinyProxy
    daemon_threads = False

    def __init__(self, *arguments) -> None:
        self.open: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request, client_address) -> None:
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request) -> None:
        self.open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request, client_address) -> None:
        """A side that goes away ends the tunnel."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def note(self) -> None:
        credentials = self.headers.get("Proxy-Authorization", "")
        self.server.proxy.seen.append((self.command, self.path, credentials))

    def do_CONNECT(self) -> None:
        self.note()
        proxy = self.server.proxy
        self.close_connection = True
        if proxy.status != 200:
            self.send_error(proxy.status)
            return
        host, _, port = self.path.rpartition(":")
        target = ("127.0.0.1", proxy.targets.get(host, int(port)))
        with socket.create_connection(target, timeout=5) as there:
            self.send_response(200)
            self.end_headers()
            pair = {self.connection: there, there: self.connection}
            while True:
                for side in select.select(list(pair), [], [], 5)[0]:
                    data = side.recv(65536)
                    if not data:
                        return
                    pair[side].sendall(data)

    def do_POST(self) -> None:
        self.note()
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        port = self.server.proxy.targets.get(parts.hostname, parts.port)
        there = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        hop = {"host", "connection", "proxy-authorization", "proxy-connection", "content-length"}
        headers = {k: v for k, v in self.headers.items() if k.lower() not in hop}
        try:
            there.request("POST", parts.path, body, headers)
            answer = there.getresponse()
            data = answer.read()
        finally:
            there.close()
        self.send_response(answer.status)
        for name in ("Content-Type", "Content-Encoding"):
            if answer.headers[name]:
                self.send_header(name, answer.headers[name])
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
