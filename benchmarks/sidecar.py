"""The other side of a measured job, in a process of its own: takes pushes, scrapes /metrics.

Its Python work must not hold the job's interpreter lock, and it imports no torch, which would keep
a core busy for seconds.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import subprocess
import sys
import threading
import time
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRAPE_SECONDS = 1.0


@contextlib.contextmanager
def running() -> Iterator[str]:
    """Start the process; its URL, to push to."""
    child = subprocess.Popen(
        [sys.executable, __file__], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert child.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(child.stdout.readline())}"
    finally:
        child.terminate()
        child.wait()


def scrape(url: str, port: int) -> None:
    """Have this port of loopback scraped from now on; 0: none."""
    with urllib.request.urlopen(f"{url}/scrape/{port}", timeout=10) as answer:
        answer.read()


class Handler(http.server.BaseHTTPRequestHandler):
    """Takes every push at once, so that the sender's own work is what is measured."""

    protocol_version = "HTTP/1.1"
    port = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._ok()

    def do_GET(self) -> None:
        Handler.port = int(self.path.rpartition("/")[2])
        self._ok()

    def _ok(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """No line per request."""


def scrape_forever() -> None:
    while True:
        if Handler.port:
            connection = http.client.HTTPConnection("127.0.0.1", Handler.port, timeout=5)
            with contextlib.suppress(OSError):
                connection.request("GET", "/metrics")
                connection.getresponse().read()
            connection.close()
        time.sleep(SCRAPE_SECONDS)


def main() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    threading.Thread(target=scrape_forever, daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
