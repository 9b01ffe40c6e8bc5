"""The control listener started, stopped and forked: what it leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest
from support.controlling import (
    IDENTITY,
    MANY,
    READER,
    bearer,
    call,
    controlling,
    no_thread_for_ports,
)
from support.listening import WAIT, until
from support.yield_double import YieldDouble

from gpumem_otel.base.counters import Counters
from gpumem_otel.errors import ServeError
from gpumem_otel.serve import discovery
from gpumem_otel.settings.config import ControlConfig
from gpumem_otel.yielding.control.listener import ControlListener


def test_a_socket_that_appears_while_it_stops_goes_too(tmp_path, monkeypatch):
    bound, goes_on, bind = threading.Event(), threading.Event(), discovery.bind_socket

    def late(*arguments):
        made = bind(*arguments)
        bound.set()
        assert goes_on.wait(WAIT)
        return made

    monkeypatch.setattr(discovery, "bind_socket", late)
    listener = ControlListener(
        YieldDouble(), ControlConfig(enabled=True), run_dir=str(tmp_path), identity=IDENTITY
    )
    listener.start()
    assert bound.wait(WAIT)
    assert len(discovery.control_sockets(str(tmp_path))) == 1
    stopping = threading.Thread(target=listener.stop, args=(WAIT,))
    stopping.start()
    (endpoint,) = listener._endpoints
    until(lambda: endpoint._loop is None)
    goes_on.set()
    stopping.join(WAIT)
    assert list(tmp_path.iterdir()) == []


def test_started_again_it_has_the_same_name(tmp_path):
    with controlling(YieldDouble(), tmp_path) as listener:
        first = listener.socket_path
        listener.stop(WAIT)
        assert not Path(first).exists()
        assert listener.socket_path is None
        listener.start()
        assert listener.wait(WAIT)
        assert listener.socket_path == first
        assert call(first, "GET", "/v1/state").status == 200


def test_a_port_that_could_not_be_had_is_there_when_it_starts_anew(tmp_path, tokens, monkeypatch):
    config = ControlConfig(enabled=True, host="127.0.0.1", port=0, token_file=tokens)
    listener = ControlListener(
        YieldDouble(), config, run_dir=str(tmp_path / "run"), identity=IDENTITY
    )
    try:
        with monkeypatch.context() as full:
            no_thread_for_ports(full)
            listener.start()
        assert listener.wait(WAIT)
        assert listener.address is None
        with pytest.raises(ServeError, match=r"no TCP port: .* can't start new thread"):
            listener.must_have_port()
        listener.stop(WAIT)
        listener.start()
        listener.must_have_port()
        assert listener.wait(WAIT)
        assert call(listener.address, "GET", "/v1/state", bearer(READER)).status == 200
    finally:
        listener.stop(WAIT)


def test_a_forked_child_leaves_the_parents_socket_alone(tmp_path, tokens):
    double = YieldDouble()
    with controlling(double, tmp_path / "run", host="127.0.0.1", token_file=tokens) as listener:
        path, address = listener.socket_path, listener.address
        held, release = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(release)
                listener.close_in_child()
                listener.stop(0.1)
                os.read(held, 1)
                code = int(listener.socket_path is not None)
            finally:
                os._exit(code)
        os.close(held)
        try:
            assert call(path, "POST", "/v1/yield").status == 202
            assert call(address, "GET", "/v1/state", bearer(READER)).status == 200
            listener.stop(WAIT)
            assert not Path(path).exists()
            # the child lives and holds no port
            with socket.socket() as sock:
                sock.bind(address)
        finally:
            os.close(release)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_who_asks_while_it_stops_is_told_so(tmp_path, caplog):
    counters = Counters()
    with controlling(YieldDouble(), tmp_path, counters=counters) as listener:
        (endpoint,) = listener._endpoints
        endpoint._loop._workers.stop()
        for method, path in (("GET", "/v1/state"), ("POST", "/v1/yield")):
            answer = call(listener.socket_path, method, path)
            assert (answer.status, answer.detail) == (503, "the listener stops")
    assert counters.snapshot() == {}
    assert "Traceback" not in caplog.text


def test_no_signal_handler_is_touched(tmp_path):
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with controlling(YieldDouble(), tmp_path, limits=MANY):
        assert {n: signal.getsignal(n) for n in signal.valid_signals()} == before
