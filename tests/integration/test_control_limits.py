"""What the control listener bounds: commands of one sender, and connections."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time

import pytest
from support.controlling import TOKEN, bearer, call, controlling, reaching
from support.listening import WAIT, until
from support.yield_double import YieldDouble

from gpumem_otel.cli.main import main
from gpumem_otel.serve import event_loop, protocol


def test_commands_of_one_sender_are_limited(tmp_path, tokens, audit):
    double = YieldDouble()
    options = {"host": "127.0.0.1", "token_file": tokens, "limits": (3, 0.001)}
    with controlling(double, tmp_path, **options) as listener:
        statuses = [call(listener.socket_path, "POST", "/v1/yield").status for _ in range(4)]
        assert statuses[0] == 202
        assert statuses[3] == 429
        limited = call(listener.socket_path, "POST", "/v1/yield")
        assert (limited.status, limited.headers["retry-after"]) == (429, "1000")
        assert "again in 1000 s" in limited.detail
        restore = call(listener.socket_path, "POST", "/v1/restore")
        assert restore.detail == "operation op-1 runs: wait for it"  # it was let in
        assert call(listener.socket_path, "GET", "/v1/state").status == 200
        assert call(listener.address, "POST", "/v1/yield", bearer(TOKEN)).status == 200
    assert len(double.submitted) == 5
    assert sum("status=429" in line for line in audit()) == 2


FULL = "too many connections at once: again in 1 s"


@contextlib.contextmanager
def holding(where, count):
    """Connections that are served, one after the other, and stay."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(reaching(where))
            client.request("/nowhere", bearer(TOKEN))
            assert client.answer()[0] == 404
        yield


@pytest.fixture
def full(tmp_path, tokens, monkeypatch):
    """Where to reach a listener, of the socket or of the port, that has all it takes."""
    monkeypatch.setattr(event_loop, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(protocol, "IDLE_SECONDS", 10 * WAIT)
    with contextlib.ExitStack() as stack:

        def make(*, tcp):
            options = {"host": "127.0.0.1", "token_file": tokens} if tcp else {}
            run_dir = "" if tcp else tmp_path / "run"
            listener = stack.enter_context(controlling(YieldDouble(), run_dir, **options))
            where = listener.address if tcp else listener.socket_path
            stack.enter_context(holding(where, 2))
            return where, listener._endpoints[0]._loop

        yield make


@pytest.mark.parametrize("tcp", [False, True], ids=["socket", "port"])
def test_a_connection_beyond_the_maximum_is_told_so(full, tcp, audit):
    where, running = full(tcp=tcp)
    for body in ({}, b"x" * 60_000, None):
        method = "GET" if body is None else "POST"
        answer = call(where, method, "/v1/yield", bearer(TOKEN), body=body)
        assert (answer.status, answer.detail) == (503, FULL)
        assert answer.headers == {
            "content-type": "application/problem+json",
            "content-length": str(len(answer.body)),
            "retry-after": "1",
            "connection": "close",
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",
        }
    line = audit()[-1]
    assert line.startswith('control: from="127.0.0.1 port ' if tcp else 'control: from="pid ')
    assert line.endswith(f'outcome="refused" reason="{FULL}" status=503')
    with reaching(where) as client:
        client.request("/v1/state")
        assert client.answer()[0] == 503
        assert client.sock.recv(1) == b""  # closed, not reset
    until(lambda: not running._overflow._leaving)
    assert len(running._clients) == 2


def test_there_is_room_again_once_one_has_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(event_loop, "MAX_CONNECTIONS", 2)
    with controlling(YieldDouble(), tmp_path) as listener:
        where = listener.socket_path
        with holding(where, 2):
            assert call(where, "GET", "/v1/state").status == 503
        until(lambda: call(where, "GET", "/v1/state").status == 200)


def test_other_clients_understand_it(full, capsys):
    """The standard library's, which sends all before it reads, and `ctl`."""
    where, _ = full(tcp=True)
    connection = http.client.HTTPConnection(*where, timeout=WAIT)
    connection.request("POST", "/v1/yield", body=b"x" * 60_000)
    answer = connection.getresponse()
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert json.loads(answer.read())["detail"] == FULL
    connection.close()
    url = f"http://127.0.0.1:{where[1]}"
    assert main(["ctl", "state", "--target", url]) == 1
    assert capsys.readouterr().err.endswith(f"{url}: {FULL} (HTTP 503)\n")


def test_a_flood_beyond_the_maximum_holds_little(full, monkeypatch):
    monkeypatch.setattr(event_loop, "MAX_LEAVING", 3)
    where, running = full(tcp=True)
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            client = stack.enter_context(reaching(where))
            assert client._until(b"\r\n").startswith(b"HTTP/1.1 503")  # without a request
            assert len(running._overflow._leaving) <= 3
        assert len(running._clients) == 2
        assert threading.active_count() == threads
        # nor do those keep their place who never close
        until(lambda: not running._overflow._leaving)
        # watched: the loop's own pipe, the listening socket, and the two that are served
        assert len(running._selector.get_map()) == 4


def test_one_who_sends_without_end_is_cut(full, monkeypatch):
    monkeypatch.setattr(event_loop, "LINGER_SECONDS", 10 * WAIT)
    where, running = full(tcp=False)
    with reaching(where) as client:
        with pytest.raises(ConnectionError):
            client.send(b"x" * (10_000 * 4096))
        assert not running._overflow._leaving


def test_over_tls_it_is_closed_before_any_handshake(files, tokens, monkeypatch):
    monkeypatch.setattr(event_loop, "MAX_CONNECTIONS", 1)
    options = {"host": "127.0.0.1", "token_file": tokens, **files}
    with controlling(YieldDouble(), **options) as listener:
        (endpoint,) = listener._endpoints
        with socket.create_connection(listener.address):
            until(lambda: len(endpoint._loop._clients) == 1)
            with reaching(listener.address) as client:
                assert client.sock.recv(1) == b""
                assert not endpoint._loop._overflow._leaving


def test_stop_and_fork_while_some_are_turned_away(full, monkeypatch):
    monkeypatch.setattr(event_loop, "LINGER_SECONDS", 10 * WAIT)
    where, running = full(tcp=True)
    with reaching(where) as client:
        assert client.answer()[0] == 503
        until(lambda: len(running._overflow._leaving) == 1)
        (held,) = running._overflow._leaving
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                running.abandon()
                code = int(held.fileno() != -1)
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert held.fileno() != -1
        running.stop(time.monotonic() + WAIT)
        assert held.fileno() == -1
