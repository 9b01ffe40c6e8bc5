"""A strict stand-in for a Pyroscope 2.x: push, queries, and the faults a network has.

    python tests/support/fake_pyroscope.py --port 4040

It answers what a real server of default settings answered to the same requests; the integration
tests hold both to the same cases.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import socket
import ssl
import struct
import sys
import threading
import zlib
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support.fake_pprof import RefusedError, invalid
from support.fake_store import Store, flamegraph

PUSH = "/push.v1.PusherService/Push"
QUERIER = "/querier.v1.QuerierService/"
CODES = {400: "invalid_argument", 401: "unauthenticated", 429: "resource_exhausted"}
FAULTS = (
    "hang", "silent", "trickle", "trickle_body", "cut", "cut_body", "redirect",
    "400", "401", "403", "404", "413", "429", "500", "502", "503", "504",
)  # fmt: skip


@dataclass
class Request:
    """A push as it came in."""

    path: str
    headers: dict[str, str]
    body: bytes
    peer: tuple
    certificate: dict = field(default_factory=dict)


class FakePyroscope:
    """The server in threads of its own; a context manager.

    Attributes:
        fault: one of `FAULTS` for all following pushes, "" for none.
        retry_after: header of refusals, "" for none.
        authorization: if set, pushes with another `Authorization` get 401.
        prefix: path before all others.
        requests: pushes, whatever became of them.
        connections: how many were accepted.
    """

    def __init__(self, *, port: int = 0, tls: ssl.SSLContext | None = None, prefix: str = ""):
        self.store = Store()
        self.fault = ""
        self.retry_after = ""
        self.authorization = ""
        self.prefix = prefix
        self.requests: list[Request] = []
        self.connections = 0
        self.tls = tls
        self.port = port
        self.released = threading.Event()
        self.pushed = threading.Semaphore(0)
        self.up()

    def up(self) -> None:
        self.released.clear()
        self._server = _Server(("127.0.0.1", self.port), _Handler)
        self._server.fake = self
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="fake-pyroscope", daemon=True
        )
        self._thread.start()

    def down(self) -> None:
        """Stop listening and cut what is open; connections are refused until `up`."""
        self.released.set()
        self._server.shutdown()
        self._server.cut()
        self._server.server_close()
        self._thread.join()

    def close(self) -> None:
        self.down()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}{self.prefix}"

    def wait_for_pushes(self, count: int, timeout: float = 10.0) -> None:
        """Wait until so many more pushes have come in, answered or not."""
        for _ in range(count):
            assert self.pushed.acquire(timeout=timeout), "no push came"


class _Server(ThreadingHTTPServer):
    fake: FakePyroscope
    daemon_threads = False  # joined by server_close
    request_queue_size = 64

    def __init__(self, *arguments) -> None:
        self.open: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request, client_address) -> None:
        self.fake.connections += 1
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request) -> None:
        self.open.discard(request)
        super().shutdown_request(request)

    def cut(self) -> None:
        for connection in list(self.open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request, client_address) -> None:
        """Clients that go away are what the faults are for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        if self.server.fake.tls:
            raw = self.request
            self.server.open.discard(raw)
            try:
                self.request = self.server.fake.tls.wrap_socket(raw, server_side=True)
            except (OSError, ssl.SSLError):
                raw.close()
                raise
            self.server.open.add(self.request)
        super().setup()

    def finish(self) -> None:
        super().finish()
        if self.server.fake.tls:
            self.server.open.discard(self.request)
            self.request.close()

    def log_message(self, *_: object) -> None:
        pass

    # answers -------------------------------------------------------------------------------------

    def answer(
        self, status: int, body: bytes, content_type: str = "application/json", zipped=False
    ) -> None:
        if zipped:
            body = gzip.compress(body, mtime=0)
        self.send_response(status)
        if body or content_type:
            self.send_header("Content-Type", content_type)
        if zipped:
            self.send_header("Content-Encoding", "gzip")
        if self.server.fake.retry_after and status >= 300:
            self.send_header("Retry-After", self.server.fake.retry_after)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, error: RefusedError) -> None:
        body = json.dumps({"code": error.code, "message": error.message}).encode()
        # Errors of the push itself are plain; a layer above zips them on request.
        self.answer(error.status, body, zipped="gzip" in self.headers.get("Accept-Encoding", ""))

    # requests ------------------------------------------------------------------------------------

    def do_GET(self) -> None:
        fake, parts = self.server.fake, urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        try:
            if parts.path == fake.prefix + "/ready":
                self.answer(200, b"ready\n", "text/plain")
            elif parts.path == fake.prefix + "/pyroscope/render":
                self.answer(200, json.dumps(render(fake.store, query)).encode())
            elif parts.path == fake.prefix + "/pyroscope/label-values":
                self.answer(200, json.dumps(fake.store.types()).encode())
            elif PUSH in parts.path or QUERIER in parts.path:
                self.answer(405, b"", "")
            else:
                self.answer(404, b"404 page not reply\n", "text/plain")
        except RefusedError as error:
            self.refuse(error)

    def do_POST(self) -> None:
        fake, path = self.server.fake, urlsplit(self.path).path
        pushing = path == fake.prefix + PUSH
        if not pushing and not path.startswith(fake.prefix + QUERIER):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.answer(404, b"404 page not reply\n", "text/plain")
            return
        if pushing and fake.fault == "silent":
            fake.pushed.release()
            fake.released.wait()  # and nothing of the body is read
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if pushing:
            self.note(path, body)
            if fake.fault:
                self.misbehave(fake.fault)
                return
        content_type = self.headers.get("Content-Type", "").partition(";")[0]
        if content_type not in ("application/proto", "application/json"):
            self.answer(415, b"", "")
            return
        try:
            if pushing:
                self.authorize()
            zipped = self.headers.get("Content-Encoding") == "gzip"
            reply = self.act(path, content_type, unzipped(body) if zipped else body)
        except RefusedError as error:
            self.refuse(error)
        else:
            self.answer(200, reply, content_type, zipped)

    def authorize(self) -> None:
        if self.server.fake.authorization not in ("", self.headers.get("Authorization")):
            raise RefusedError(401, "unauthenticated", "no or wrong credentials")

    def note(self, path: str, body: bytes) -> None:
        fake = self.server.fake
        certificate = self.request.getpeercert() if fake.tls else None
        headers = {name.lower(): value for name, value in self.headers.items()}
        fake.requests.append(Request(path, headers, body, self.client_address, certificate or {}))
        fake.pushed.release()

    def act(self, path: str, content_type: str, body: bytes) -> bytes:
        """The answer to a push or a query."""
        store = self.server.fake.store
        if path.endswith(PUSH) and content_type == "application/proto":
            store.push_proto(body)
            return b""
        try:
            parsed = json.loads(body)
        except ValueError:
            raise invalid("unmarshal message: proto: syntax error") from None
        if path.endswith(PUSH):
            store.push_json(parsed)
            return b"{}"
        return json.dumps(self.query(path.rpartition("/")[2], parsed)).encode()

    def query(self, method: str, query: dict) -> dict:
        store = self.server.fake.store
        if method == "SelectMergeStacktraces":
            graph = flamegraph(store.merged(query), int(query.get("maxNodes") or 0))
            return {"flamegraph": as_json(graph)}
        if method == "SelectSeries":
            return {"series": store.series(query)}
        if method == "Diff":
            sides = [flamegraph(store.merged(query[side])) for side in ("left", "right")]
            return {"flamegraph": {f"{side}Ticks": str(graph["total"])
                    for side, graph in zip(("left", "right"), sides, strict=True)}}  # fmt: skip
        if method == "ProfileTypes":
            names = ("name", "sampleType", "sampleUnit", "periodType", "periodUnit")
            return {"profileTypes": [
                {"ID": kind, **dict(zip(names, kind.split(":"), strict=False))}
                for kind in store.types()
            ]}  # fmt: skip
        every = store.label_sets(
            {**query, "labelNames": query.get("labelNames") if method == "Series" else None},
            "allow-utf8-labelnames=true" in self.headers.get("Accept", ""),
        )
        if method == "Series":
            return {"labelsSet": [
                {"labels": [{"name": k, "value": v} for k, v in sorted(labels.items())]}
                for labels in every
            ]}  # fmt: skip
        if method == "LabelNames":
            return {"names": sorted({name for labels in every for name in labels})}
        if method == "LabelValues":
            wanted = query.get("name", "")
            return {"names": sorted({labels[wanted] for labels in every if wanted in labels})}
        raise RefusedError(404, "unimplemented", f"no method {method}")

    # faults --------------------------------------------------------------------------------------

    def misbehave(self, fault: str) -> None:
        fake = self.server.fake
        self.close_connection = True
        if fault == "hang":
            fake.released.wait()
        elif fault == "trickle":
            self.trickle(b"HTTP/1.1 200 OK\r\nX-Slow: " + b"x" * 10_000)
        elif fault == "trickle_body":
            self.wfile.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 10000\r\n\r\n")
            self.trickle(b"y" * 10_000)
        elif fault == "cut":
            # A reset, not an orderly end.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif fault == "cut_body":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nshort")
        elif fault == "redirect":
            self.send_response(307)
            self.send_header("Location", f"http://127.0.0.1:{fake.port}/elsewhere{PUSH}")
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            status = int(fault)
            code = CODES.get(status, "unavailable" if status > 500 else "unknown")
            self.close_connection = False
            self.refuse(RefusedError(status, code, f"made to answer {status}"))

    def trickle(self, data: bytes) -> None:
        for byte in data:
            if self.server.fake.released.wait(0.02):
                return
            self.wfile.write(bytes((byte,)))


def unzipped(body: bytes) -> bytes:
    try:
        return gzip.decompress(body)
    except (OSError, EOFError, zlib.error):
        raise invalid("decompress: gzip: invalid header") from None


def as_json(graph: dict) -> dict:
    """int64 values are strings in Connect's JSON."""
    return {
        "names": graph["names"],
        "levels": [{"values": [str(value) for value in level]} for level in graph["levels"]],
        "total": str(graph["total"]),
        "maxSelf": str(graph["maxSelf"]),
    }


def render(store: Store, query: dict[str, str]) -> dict:
    """The older query form: a flame graph of `<type>{selector}`; times in ms only."""
    kind, brace, rest = query.get("query", "").partition("{")
    graph = flamegraph(
        store.merged({
            "profileTypeID": kind, "labelSelector": brace + rest or "{}",
            "start": query.get("from"), "end": query.get("until"),
        })
    )  # fmt: skip
    return {
        "flamebearer": {
            "names": graph["names"], "levels": graph["levels"],
            "numTicks": graph["total"], "maxSelf": graph["maxSelf"],
        },
        "metadata": {"format": "single", "units": kind.split(":")[2], "name": kind.split(":")[1]},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=4040, help="0: any free port")
    parser.add_argument("--fault", default="", choices=("", *FAULTS))
    arguments = parser.parse_args()
    with FakePyroscope(port=arguments.port) as fake:
        fake.fault = arguments.fault
        print(f"listening on {fake.url}", flush=True)  # noqa: T201
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
