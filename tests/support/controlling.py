"""A control listener for tests, and requests to it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.listening import WAIT, Client, connected

from gpumem_otel.base.profile import Identity
from gpumem_otel.serve.binding import TcpBinding
from gpumem_otel.serve.event_loop import ListenerLoop
from gpumem_otel.settings.config import ControlConfig
from gpumem_otel.yielding.control.listener import ControlListener

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest
    from support.yield_double import YieldDouble

IDENTITY = Identity(
    service_name="trainer",
    namespace="",
    run_id="r1",
    rank=0,
    local_rank=0,
    world_size=1,
    node="n1",
    pid=7,
)
OTHER_JOB = Identity(service_name="server", run_id="r2", local_rank=2, pid=9)
TOKEN = "operator-token-0123456789"
READER = "reader-token-0123456789"
MANY = (10_000, 10_000.0)
"""Limits that no test reaches."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    json: Any = field(default=None)

    @property
    def detail(self) -> str:
        """Of a problem; that it is one as RFC 9457 has it."""
        assert self.headers["content-type"] == "application/problem+json"
        assert self.json["status"] == self.status
        assert "\n" not in self.json["detail"]
        return str(self.json["detail"])


@contextlib.contextmanager
def controlling(double: YieldDouble, run_dir: Any = "", **config: Any) -> Iterator[ControlListener]:
    """A bound control listener; a port of its own where there is a host."""
    extra = {name: config.pop(name) for name in ("counters", "identity") if name in config}
    limits = config.pop("limits", MANY)
    listener = ControlListener(
        double,
        ControlConfig(**{"enabled": True, "port": 0, **config}),
        run_dir=str(run_dir),
        identity=extra.pop("identity", IDENTITY),
        limits=limits,
        **extra,
    )
    listener.start()
    try:
        assert listener.wait(WAIT)
        yield listener
    finally:
        listener.stop(timeout=WAIT)


def no_thread_for_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread can be started for a socket, and for no TCP port."""
    begun = ListenerLoop.start

    def start(loop: ListenerLoop) -> None:
        if isinstance(loop._binding, TcpBinding):
            loop._loop.close()
            raise RuntimeError("can't start new thread")  # noqa: TRY004 - as threading does
        begun(loop)

    monkeypatch.setattr(ListenerLoop, "start", start)


@contextlib.contextmanager
def reaching(where: str | tuple[str, int] | None, tls: Any = None) -> Iterator[Client]:
    """A connection to a Unix socket or a port."""
    if not isinstance(where, str):
        with connected(where, tls) as client:
            yield client
        return
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WAIT)
        with short(where) as address:
            sock.connect(address)
        yield Client(sock)


@contextlib.contextmanager
def short(path: str | Path) -> Iterator[str]:
    """The address of a Unix socket: it has 108 bytes, the path of a test's folder may have more."""
    path = Path(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def call(
    where: str | tuple[str, int] | None,
    method: str,
    path: str,
    *lines: str,
    body: Any = None,
    tls: Any = None,
    host: str = "localhost",
) -> Answer:
    """One request; a body that is no bytes is sent as JSON."""
    if body is not None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        if not any(line.lower().startswith("content-type") for line in lines):
            lines = (*lines, "Content-Type: application/json")
        lines = (*lines, f"Content-Length: {len(data)}")
    with reaching(where, tls) as client:
        client.request(path, *lines, method=method, host=host)
        if body is not None:
            # one that refuses by the head closes before it has all of a large body
            with contextlib.suppress(ConnectionError):
                client.send(data)
        status, headers, answer = client.answer(head=method == "HEAD")
    is_json = "json" in headers.get("content-type", "") and answer
    return Answer(status, headers, answer, json.loads(answer) if is_json else None)


def bearer(token: str) -> str:
    """The header."""
    return f"Authorization: Bearer {token}"
