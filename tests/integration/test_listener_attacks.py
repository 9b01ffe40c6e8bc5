"""Hostile clients of the listener: each is refused or cut off, and none reaches the job's log."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading

import pytest
from support.listening import EXPOSITION, WAIT, ask, connected, listening, some_deps, until

from gpumem_otel.base.counters import Counters
from gpumem_otel.serve import event_loop, guard, protocol

HOST = b"Host: localhost\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


@pytest.fixture
def attacked(caplog):
    """A listener that still serves afterwards, has counted no failure and logged nothing."""
    counters = Counters()
    with listening(counters=counters) as listener:
        yield listener
        until(lambda: not listener._loop._clients)
        assert ask(listener.address, "/metrics")[::2] == (200, EXPOSITION)
    assert counters.get("exporter_errors", stage="scrape") == 0
    assert caplog.records == []


def read_all(client) -> bytes:
    """What comes until the other side closes."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := client.sock.recv(65536):
            data += piece
    return data


def is_cut_off(client, data: bytes) -> bool:
    """Send a byte every 10 ms; whether the connection is closed before the last."""
    client.sock.settimeout(0.01)
    return any(_closed_after(client, bytes([byte])) for byte in data)


def _closed_after(client, data: bytes) -> bool:
    try:
        client.send(data)
        return client.sock.recv(1000) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\n", 413),
        (b"GET /metrics HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\n5\r\nabc", 413),
        (b"POST /metrics HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\n" + b"f" * 16 + b"\r\n", 413),
        (b"POST /metrics HTTP/1.1\r\n" + HOST + CHUNKED + b"Content-Length: 3\r\n\r\nabc", 413),
        (b"POST /metrics HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\nno number\r\n", 400),
        (b"POST /metrics HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\n0\r\nX : y\r\n\r\n", 400),
        (b"POST /metrics HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 400),
        (b"POST /metrics HTTP/1.1\r\n" + HOST + b"Content-Length: 99999\r\n\r\nabc", 413),
        (b"POST /metrics HTTP/1.1\r\n" + HOST + b"Content-Length: -1\r\n\r\n", 400),
        (b"POST /metrics HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
         400),
        (b"POST /metrics HTTP/1.0\r\n\r\nabc", 405),
    ],
    ids=["no chunk", "half a chunk", "huge chunk", "two lengths", "bad chunk", "bad trailer",
         "gzip", "too long", "negative", "two different lengths", "HTTP/1.0 without a length"],
)  # fmt: skip
def test_bodies_are_refused_and_the_connection_closed(attacked, head, status):
    with connected(attacked.address) as client:
        client.send(head)
        assert read_all(client).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(
    ("line", "host", "status"),
    [
        (b"GET http://localhost/metrics", b"localhost", 404),
        (b"GET http://evil.example/metrics", b"localhost", 404),
        (b"GET http://localhost/metrics", b"evil.example", 421),
        (b"GET //evil.example/metrics", b"localhost", 404),
        (b"CONNECT evil.example:443", b"localhost", 404),
        (b"OPTIONS *", b"localhost", 404),
        (b"GET /metrics", b"localhost@evil.example", 421),
        (b"GET /metrics", b"localhost, evil.example", 421),
        (b"GET /metrics", b"", 421),
        (b"GET /metr\x00ics", b"localhost", 400),
        (b"GET /metrics", b"local\x00host", 400),
    ],
)
def test_targets_and_hosts_that_belong_to_others(attacked, line, host, status):
    with connected(attacked.address) as client:
        client.send(line + b" HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
        answer = read_all(client)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert EXPOSITION not in answer


@pytest.mark.parametrize(
    "lines",
    [
        b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAA\r\n",
        b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
    ],
    ids=["websocket", "h2c"],
)
def test_an_upgrade_is_not_taken(attacked, lines):
    with connected(attacked.address) as client:
        client.send(b"GET /metrics HTTP/1.1\r\n" + HOST + b"Connection: Upgrade, close\r\n" + lines
                    + b"\r\n")  # fmt: skip
        assert read_all(client).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "data",
    [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\n" + HOST + b"\r\n"],
    ids=["nothing", "half a line", "a request"],
)
def test_a_half_closed_connection_is_closed(attacked, data):
    with connected(attacked.address) as client:
        client.send(data)
        client.sock.shutdown(socket.SHUT_WR)
        read_all(client)


def test_a_head_without_end_is_not_collected(attacked):
    with connected(attacked.address) as client, contextlib.suppress(ConnectionError):
        client.send(b"GET /metrics HTTP/1.1\r\n")
        for _ in range(1000):  # 64 MB
            client.send(b"X: " + b"y" * 65536)
        pytest.fail("64 MB of one header were taken")


def test_a_head_that_comes_a_byte_at_a_time_is_cut_off(attacked, monkeypatch):
    monkeypatch.setattr(protocol, "REQUEST_SECONDS", 0.2)
    with connected(attacked.address) as client:
        assert is_cut_off(client, b"G" * 3000)


def test_pipelined_requests_are_not_collected():
    """While one request is at work, what follows on its connection is not read."""
    release = threading.Event()

    def metrics(_accept):
        release.wait(WAIT)
        return "text/plain", EXPOSITION

    with listening(some_deps(metrics=metrics)) as listener, connected(listener.address) as client:
        client.sock.settimeout(1.0)
        with pytest.raises(TimeoutError):
            client.send((b"GET /metrics HTTP/1.1\r\n" + HOST + b"\r\n") * 2_000_000)  # 86 MB
        release.set()
        assert ask(listener.address, "/metrics")[0] == 200


def test_too_many_requests_at_once_get_a_retry_after(monkeypatch):
    monkeypatch.setattr(guard, "MAX_REQUESTS", 2)
    release = threading.Event()

    def metrics(_accept):
        release.wait(WAIT)
        return "text/plain", EXPOSITION

    with listening(some_deps(metrics=metrics)) as listener, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(listener.address)) for _ in range(2)]
        for client in clients:
            client.request("/metrics")
        until(lambda: ask(listener.address, "/healthz")[0] == 503)
        assert ask(listener.address, "/healthz")[1]["retry-after"] == "1"
        release.set()
        assert [client.answer()[0] for client in clients] == [200, 200]
        assert ask(listener.address, "/healthz")[0] == 200


def test_a_flood_of_connections_is_closed_and_leaves_room(attacked):
    """200 connections that say nothing: 64 are held, the others closed at once."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(attacked.address)) for _ in range(200)]
        assert all(client.closed() for client in clients[event_loop.MAX_CONNECTIONS :])
        assert len(attacked._loop._clients) <= event_loop.MAX_CONNECTIONS


# TLS ------------------------------------------------------------------------------------------


def client_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    context = ssl.create_default_context()
    session = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        session.do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("part", ["half", "whole"])
def test_a_handshake_that_stalls_is_cut_off(files, monkeypatch, part, caplog):
    monkeypatch.setattr(event_loop, "HANDSHAKE_SECONDS", 0.2)
    hello = client_hello()
    with listening(**files) as listener:
        with connected(listener.address) as client:
            client.send(hello[: len(hello) // 2] if part == "half" else hello)
            read_all(client)
        until(lambda: not listener._loop._clients)
    assert caplog.records == []


def test_a_handshake_that_comes_a_byte_at_a_time_is_cut_off(files, monkeypatch):
    monkeypatch.setattr(event_loop, "HANDSHAKE_SECONDS", 0.2)
    with listening(**files) as listener, connected(listener.address) as client:
        assert is_cut_off(client, client_hello() * 10)


def test_a_client_that_never_agrees_to_a_close_of_tls_loses_its_place(files, ca, monkeypatch):
    monkeypatch.setattr(protocol, "DRAIN_SECONDS", 0.2)
    trust = ssl.create_default_context(cafile=str(ca.cert_file))
    with listening(**files) as listener, connected(listener.address, trust) as client:
        client.request("/metrics", "Connection: close")
        assert client.answer()[0] == 200
        until(lambda: not listener._loop._clients)
