"""The listener over real sockets: routes, limits, the port, stopping and starting again."""

from __future__ import annotations

import gzip
import json
import logging
import os
import socket
import threading
from pathlib import Path

import pytest
from support.listening import EXPOSITION, PPROF, WAIT, ask, connected, listening, some_deps, until

from gpumem_otel.base.counters import Counters
from gpumem_otel.base.profile import Identity
from gpumem_otel.errors import ServeError
from gpumem_otel.serve import event_loop, protocol
from gpumem_otel.serve.discovery import targets
from gpumem_otel.serve.listener import Listener
from gpumem_otel.settings.config import Secret, ServeConfig

PPROF_PATH = "/debug/pprof/gpumem"


class WatchedCounters(Counters):
    """Counters that say when something is counted."""

    def __init__(self):
        super().__init__()
        self.counted = threading.Event()

    def add(self, name, value=1.0, **attributes):
        super().add(name, value, **attributes)
        self.counted.set()


def ours() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("gpumem-otel")]


def test_every_route_answers_on_one_connection():
    with listening() as listener, connected(listener.address) as client:
        client.request("/metrics")
        status, headers, body = client.answer()
        assert (status, body) == (200, EXPOSITION)
        assert headers["content-type"] == "text/plain; version=0.0.4"
        assert "server" not in headers
        assert headers["date"].endswith(" GMT")

        client.request(PPROF_PATH)
        status, headers, body = client.answer()
        assert (status, body) == (200, PPROF)
        assert headers["content-type"] == "application/octet-stream"

        client.request("/healthz")
        assert json.loads(client.answer()[2]) == {"ok": True, "reasons": [], "ages_seconds": {}}

        client.request("/")
        assert client.answer()[1]["content-type"] == "text/html; charset=utf-8"

        client.request(PPROF_PATH + "?device=x")
        assert client.answer()[::2] == (400, b"device must be a number from 0 to 1023\n")

        client.request("/nope")
        assert client.answer()[0] == 404

        client.request("/metrics", "Content-Length: 4", method="POST")
        client.send(b"body")
        assert client.answer()[::2] == (405, b"GET and HEAD only\n")

        client.request(PPROF_PATH + "?seconds=60", method="HEAD")
        assert client.answer(head=True)[::2] == (200, b"")

        client.request("/metrics")
        assert client.answer()[0] == 200


def test_gzip_over_the_wire():
    deps = some_deps(metrics=lambda _: ("text/plain", EXPOSITION * 50))
    with listening(deps) as listener:
        _, headers, body = ask(listener.address, "/metrics", "Accept-Encoding: gzip")
        assert headers["content-encoding"] == "gzip"
        assert gzip.decompress(body) == EXPOSITION * 50


def test_pipelined_requests_are_answered_in_turn():
    with listening() as listener, connected(listener.address) as client:
        client.send(b"GET /nope HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2)
        client.request("/metrics")
        assert [client.answer()[0] for _ in range(3)] == [404, 404, 200]


def test_http_1_0_without_a_host_is_answered_and_closed():
    with listening() as listener, connected(listener.address) as client:
        client.send(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert client.answer()[::2] == (200, EXPOSITION)
        assert client.closed()


def test_foreign_hosts_are_refused():
    with listening(allowed_hosts=("metrics.example",)) as listener:
        host, port = listener.address
        for good in ("localhost", f"{host}:{port}", "[::1]:1", "metrics.example:80"):
            assert ask(listener.address, "/metrics", host=good)[0] == 200
        for bad in (
            "evil.example",
            "169.254.1.1",
            f"evil.example:{port}",
            "localhost.evil.example",
        ):
            assert ask(listener.address, "/metrics", host=bad)[0] == 421


def test_a_wildcard_address_answers_to_the_address_that_was_dialled():
    with listening(host="0.0.0.0") as listener:
        assert listener.address[0] == "0.0.0.0"
        dialled = ("127.5.6.7", listener.address[1])
        assert ask(dialled, "/metrics", host="127.5.6.7")[0] == 200
        assert ask(dialled, "/metrics", host="10.200.200.200")[0] == 421


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_ipv6():
    with listening(host="::1") as listener:
        assert listener.address[0] == "::1"
        assert ask(listener.address, "/metrics", host=f"[::1]:{listener.address[1]}")[0] == 200
    with listening(host="::") as listener:
        assert ask(("127.0.0.1", listener.address[1]), "/metrics", host="127.0.0.1")[0] == 200
        assert ask(("::1", listener.address[1]), "/metrics", host="[::1]")[0] == 200


def test_a_host_name_is_bound():
    with listening(host="localhost") as listener:
        assert listener.address[0] in {"127.0.0.1", "::1"}
        assert ask(listener.address, "/metrics")[0] == 200


def test_a_token_is_asked_for():
    with listening(token=Secret("s3cret")) as listener:
        assert ask(listener.address, "/metrics")[0] == 401
        assert ask(listener.address, "/metrics", "Authorization: Bearer s3cret")[0] == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * protocol.MAX_HEADER_BYTES,
    ],
    ids=["tls", "no host", "two hosts", "large header"],
)
def test_what_is_no_request_is_refused(request_bytes, caplog):
    with listening() as listener:
        with connected(listener.address) as client:
            client.send(request_bytes)
            assert client._until(b"\r\n").startswith(b"HTTP/1.1 4")
        assert ask(listener.address, "/metrics")[0] == 200
    assert caplog.records == []


def test_a_long_body_is_refused():
    with listening() as listener, connected(listener.address) as client:
        client.request("/metrics", "Content-Length: 1000000", method="POST")
        assert client.answer()[0] == 413
        assert client.closed()


@pytest.mark.parametrize(
    "part",
    [b"", b"GET /met", b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"],
    ids=["nothing", "half a line", "half a head"],
)
def test_half_a_request_is_cut_off(part, monkeypatch):
    monkeypatch.setattr(protocol, "REQUEST_SECONDS", 0.2)
    with listening() as listener, connected(listener.address) as client:
        client.send(part)
        assert client.closed()


def test_dripping_bytes_gain_no_time(monkeypatch):
    monkeypatch.setattr(protocol, "REQUEST_SECONDS", 0.2)
    with listening() as listener, connected(listener.address) as client:
        client.request("/nope")
        client.answer()
        client.send(b"GET / HTTP/1.1\r\n")
        client.sock.settimeout(0.01)
        assert any(cut_off(client) for _ in range(3000))  # never, where each byte bought time


def cut_off(client) -> bool:
    """Send one more header line; whether the connection is closed by now."""
    try:
        client.send(b"X: y\r\n")
        return client.sock.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_body_that_never_comes_is_cut_off(monkeypatch):
    monkeypatch.setattr(protocol, "REQUEST_SECONDS", 0.2)
    with listening() as listener, connected(listener.address) as client:
        client.request("/metrics", "Content-Length: 10")
        assert client.answer()[0] == 200
        assert client.closed()


def test_a_slow_answer_is_not_cut_off(monkeypatch):
    monkeypatch.setattr(protocol, "REQUEST_SECONDS", 0.05)

    def profile(_kind, _device, seconds, stop):
        assert not stop.wait(seconds)
        return PPROF

    with listening(some_deps(profile=profile)) as listener:
        assert ask(listener.address, PPROF_PATH + "?seconds=0.3")[::2] == (200, PPROF)


def test_an_idle_connection_is_closed(monkeypatch):
    monkeypatch.setattr(protocol, "IDLE_SECONDS", 0.2)
    with listening() as listener, connected(listener.address) as client:
        client.request("/nope")
        assert client.answer()[0] == 404
        assert client.closed()


@pytest.mark.parametrize("requests", [1, 2])
def test_a_reader_that_never_reads_is_cut_off(monkeypatch, requests):
    """Also one that asks again, which uvicorn alone would wait for without end."""
    monkeypatch.setattr(protocol, "DRAIN_SECONDS", 0.2)
    large = b"x" * 30_000_000
    with listening(some_deps(metrics=lambda _: ("text/plain", large))) as listener:
        with connected(listener.address) as client:
            for _ in range(requests):
                client.request("/metrics")
            assert client._until(b"\r\n\r\n").startswith(b"HTTP/1.1 200")
            until(lambda: not listener._loop._clients)
        assert ask(listener.address, "/healthz")[0] == 200


def test_connections_are_bounded(monkeypatch):
    monkeypatch.setattr(event_loop, "MAX_CONNECTIONS", 2)
    with listening() as listener:
        with connected(listener.address) as first, connected(listener.address) as second:
            for client in (first, second):
                client.request("/nope")
                assert client.answer()[0] == 404
            with connected(listener.address) as third:
                assert third.closed()
            first.request("/metrics")
            assert first.answer()[0] == 200
        until(lambda: not listener._loop._clients)
        assert ask(listener.address, "/metrics")[0] == 200


def test_a_blocked_scrape_holds_up_no_other_request():
    release = threading.Event()

    def metrics(_accept):
        assert release.wait(WAIT)
        return "text/plain", EXPOSITION

    with listening(some_deps(metrics=metrics)) as listener, connected(listener.address) as client:
        client.request("/metrics")
        assert ask(listener.address, "/healthz")[0] == 200
        assert ask(listener.address, PPROF_PATH)[::2] == (200, PPROF)
        release.set()
        assert client.answer()[::2] == (200, EXPOSITION)


def test_a_client_that_hangs_up_ends_its_window():
    stops, entered = [], threading.Event()

    def profile(_kind, _device, _seconds, stop):
        stops.append(stop)
        entered.set()
        stop.wait(WAIT)
        return PPROF

    with listening(some_deps(profile=profile)) as listener:
        with connected(listener.address) as client:
            client.request(PPROF_PATH + "?seconds=300")
            assert entered.wait(WAIT)
        assert stops[0].wait(WAIT)


def test_stop_ends_windows_and_connections():
    entered = threading.Event()
    outcome = []

    def profile(_kind, _device, _seconds, stop):
        entered.set()
        outcome.append(stop.wait(WAIT))
        return PPROF

    with (
        listening(some_deps(profile=profile)) as listener,
        connected(listener.address) as client,
        connected(listener.address) as idle,
    ):
        idle.request("/metrics")
        idle.answer()
        client.request(PPROF_PATH + "?seconds=300")
        assert entered.wait(WAIT)
        listener.stop(timeout=WAIT)
        assert ours() == []
        assert client.closed()
        assert idle.closed()
    assert outcome == [True]


def test_one_thread_while_idle_and_none_after_stop():
    with listening() as listener:
        for path in ("/metrics", PPROF_PATH, "/healthz", "/"):
            assert ask(listener.address, path)[0] == 200
        until(lambda: len(ours()) == 1)
        assert ours() == ["gpumem-otel-listener"]
        (thread,) = (t for t in threading.enumerate() if t.name == "gpumem-otel-listener")
        assert thread.daemon
    assert ours() == []


def test_start_and_stop_are_idempotent_and_repeatable():
    listener = Listener(some_deps(), ServeConfig(port=0))
    listener.stop()
    assert listener.address is None
    for _ in range(3):
        listener.start()
        listener.start()
        assert listener.bound.wait(WAIT)
        address = listener.address
        assert ask(address, "/metrics")[0] == 200
        assert ours().count("gpumem-otel-listener") == 1
        listener.stop(timeout=WAIT)
        listener.stop()
        assert listener.address is None
        assert not listener.bound.is_set()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
    assert ours() == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_the_port_is_base_plus_local_rank():
    base = free_port() - 1
    listener = Listener(some_deps(), ServeConfig(port=base), local_rank=1)
    listener.start()
    try:
        assert listener.bound.wait(WAIT)
        assert listener.address == ("127.0.0.1", base + 1)
    finally:
        listener.stop(timeout=WAIT)


def test_a_taken_port_is_waited_for_and_never_left(caplog):
    counters = WatchedCounters()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        listener = Listener(some_deps(), ServeConfig(port=port), counters=counters)
        listener.start()
        try:
            for _ in range(2):
                assert counters.counted.wait(WAIT)
                counters.counted.clear()
            assert listener.address is None
            assert not listener.bound.is_set()
            other.close()
            assert listener.bound.wait(WAIT)
            assert listener.address == ("127.0.0.1", port)
            assert ask(listener.address, "/metrics")[0] == 200
        finally:
            listener.stop(timeout=WAIT)
    assert counters.get("exporter_errors", stage="listen") >= 2
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in warnings[0].message


def test_stop_while_the_port_is_taken():
    counters = WatchedCounters()
    with listening() as holder:
        listener = Listener(some_deps(), ServeConfig(port=holder.address[1]), counters=counters)
        listener.start()
        assert counters.counted.wait(WAIT)
        listener.stop(timeout=WAIT)
        assert ours() == ["gpumem-otel-listener"]


def test_the_same_port_at_once_after_a_restart():
    """Connections that the old process closed linger in TIME_WAIT, the port is free."""
    with listening() as first, connected(first.address) as client:
        address = first.address
        client.request("/metrics", "Connection: close")
        client.answer()
        assert client.closed()
    counters = Counters()
    with listening(port=address[1], counters=counters) as second:
        assert second.address == address
        assert ask(address, "/metrics")[0] == 200
    assert counters.get("exporter_errors", stage="listen") == 0


def test_descriptors_are_not_inherited():
    with listening() as listener, connected(listener.address) as client:
        client.request("/metrics")
        client.answer()
        run = listener._loop
        for sock in (run._socket, *run._clients):
            assert not os.get_inheritable(sock.fileno())


def test_answers_are_sent_without_delay():
    """Head and body are two writes: Nagle's algorithm would hold the second for 40 ms."""
    with listening() as listener, connected(listener.address) as client:
        client.request("/metrics")
        client.answer()
        (served,) = listener._loop._clients
        assert served.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_the_jobs_own_uvicorn_logging_is_left_alone():
    names = ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio")
    loggers = [logging.getLogger(name) for name in names]
    handler = logging.NullHandler()
    loggers[2].addHandler(handler)

    def state():
        return [(lg.level, lg.propagate, lg.disabled, list(lg.handlers)) for lg in loggers]

    before = state()
    try:
        with listening() as listener:
            assert ask(listener.address, "/metrics")[0] == 200
        assert state() == before
    finally:
        loggers[2].removeHandler(handler)


def test_a_run_file_lives_as_long_as_the_port(tmp_path):
    run_dir = str(tmp_path / "run")
    identities = [Identity(service_name="trainer", rank=0)]
    listener = Listener(
        some_deps(), ServeConfig(port=0, run_dir=run_dir), identity=lambda: identities[0]
    )
    listener.announce()
    listener.start()
    try:
        assert listener.bound.wait(WAIT)
        (entry,) = targets(run_dir)
        assert (entry.host, entry.port) == listener.address
        assert (entry.pid, entry.rank, entry.scheme) == (os.getpid(), 0, "http")
        identities[0] = Identity(service_name="trainer", rank=5)
        listener.announce()
        assert [entry.rank for entry in targets(run_dir)] == [5]
    finally:
        listener.stop(timeout=WAIT)
    assert targets(run_dir) == []
    assert list((tmp_path / "run").iterdir()) == []


def test_a_hostile_run_directory_does_not_stop_the_listener(tmp_path, caplog):
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "real")
    counters = Counters()
    with listening(
        run_dir=str(tmp_path / "run"),
        identity=lambda: Identity(service_name="trainer"),
        counters=counters,
    ) as listener:
        assert ask(listener.address, "/metrics")[0] == 200
    assert counters.get("exporter_errors", stage="listen") == 1
    assert "is a symlink" in caplog.text


@pytest.mark.parametrize(
    ("config", "local_rank", "message"),
    [
        ({"port": 65535}, 1, "port 65535 [+] local rank 1 is not a port"),
        ({"host": ""}, 0, "host is empty"),
        ({"token_file": "/nonexistent/token"}, 0, "token file /nonexistent/token: No such file"),
        ({"tls_cert_file": "/nonexistent/c.pem"}, 0, "/nonexistent/c.pem: No such file"),
    ],
)
def test_bad_settings_are_reported_when_it_is_built(config, local_rank, message):
    with pytest.raises(ServeError, match=message):
        Listener(some_deps(), ServeConfig(**config), local_rank=local_rank)
