"""Who waits at the control API for a change: long polls, streams of events, dry runs."""

from __future__ import annotations

import json
import select
import threading
from contextlib import ExitStack

from support.controlling import call, controlling, reaching
from support.listening import WAIT, until
from support.yield_double import HELD, YieldDouble

from gpumem_otel.base.counters import Counters
from gpumem_otel.serve import protocol
from gpumem_otel.yielding.control import app
from gpumem_otel.yielding.values import Phase, YieldRequest


def test_a_long_poll_ends_with_the_change(tmp_path):
    double = YieldDouble(by_hand=True)
    with controlling(double, tmp_path) as listener:
        where = listener.socket_path
        version = call(where, "GET", "/v1/state").json["status"]["version"]
        double.waiting.clear()
        with reaching(where) as client:
            client.request(f"/v1/state?version={version}&wait_seconds=60")
            assert double.waiting.wait(WAIT)
            call(where, "POST", "/v1/yield")
            status = json.loads(client.answer()[2])["status"]
        assert status["version"] > version
        assert status["state"] == "yielding"
        now = call(where, "GET", f"/v1/state?version={version}&wait_seconds=60").json["status"]
        assert now["version"] >= status["version"]
        same = call(where, "GET", f"/v1/state?version={now['version']}&wait_seconds=0.01")
        assert same.json["status"] == now


def test_watching_as_a_stream_of_events(tmp_path):
    double = YieldDouble(by_hand=True)
    with controlling(double, tmp_path) as listener, reaching(listener.socket_path) as client:
        client.request("/v1/state", "Accept: text/event-stream")
        head = client._until(b"\r\n\r\n").decode()
        assert "content-type: text/event-stream" in head.lower()

        def event():
            text = client._until(b"\n\n").decode().split("\r\n")[-1]
            fields = dict(line.split(": ", 1) for line in text.strip().split("\n"))
            status = json.loads(fields["data"])["status"]
            assert (fields["event"], fields["id"]) == ("state", str(status["version"]))
            return status

        assert event()["state"] == "running"
        call(listener.socket_path, "POST", "/v1/yield")
        seen = event()
        while seen["operation"] is None:
            seen = event()
        assert seen["state"] == "yielding"
        double.finish()
        while seen["state"] != "yielded":
            seen = event()
        assert seen["moved_bytes"] == sum(HELD.values())


def watching(where, stack):
    """A stream that has begun."""
    client = stack.enter_context(reaching(where))
    client.request("/v1/state", "Accept: text/event-stream")
    client._until(b"event: state")
    return client


def test_watchers_are_bounded_and_leave_room_for_commands(tmp_path):
    double = YieldDouble(by_hand=True)
    with controlling(double, tmp_path) as listener, ExitStack() as stack:
        where = listener.socket_path
        for _ in range(app.MAX_WATCHERS):
            watching(where, stack)
        refused = call(where, "GET", "/v1/state?version=-1&wait_seconds=1")
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert call(where, "GET", "/v1/state", "Accept: text/event-stream").status == 503
        assert call(where, "GET", "/v1/state").status == 200
        assert call(where, "POST", "/v1/yield").status == 202
        stack.close()
        until(lambda: call(where, "GET", "/v1/state?version=-1&wait_seconds=1").status == 200)


def test_a_watcher_that_does_not_read_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(app, "MAX_WATCHERS", 1)
    monkeypatch.setattr(protocol, "DRAIN_SECONDS", 0.2)
    double, counters = YieldDouble(by_hand=True), Counters()
    options = {"counters": counters}
    with controlling(double, tmp_path, **options) as listener, ExitStack() as stack:
        where = listener.socket_path
        client = watching(where, stack)
        path = "/v1/state?version=-1&wait_seconds=1"
        assert call(where, "GET", path).status == 503
        double.submit(YieldRequest(), "x" * 100_000)  # each event has it

        def another_is_served():
            double.advance(Phase.RELEASE, double.wait(-1, 0).version)
            return call(where, "GET", path).status == 200

        until(another_is_served)
        # and its connection is closed, though it has not read what was on its way
        closed = select.poll()
        closed.register(client.sock, 0)
        assert closed.poll(1000 * WAIT) == [(client.sock.fileno(), select.POLLHUP)]
        double.finish()
    assert counters.snapshot() == {}


def test_dry_runs_that_wait_leave_room_for_commands(tmp_path, monkeypatch):
    monkeypatch.setattr(app, "MAX_WATCHERS", 1)
    double = YieldDouble(by_hand=True)
    with controlling(double, tmp_path) as listener, ExitStack() as stack:
        where = listener.socket_path
        watching(where, stack)
        looked = call(where, "POST", "/v1/yield", body={"dry_run": True, "wait_seconds": 3600})
        assert (looked.status, looked.json["state"]) == (202, "running")
        double.finish()
        found = call(where, "GET", looked.headers["location"]).json
        assert found["report"]["moved_bytes"] == HELD


def test_stop_does_not_wait_for_those_who_watch(tmp_path):
    double = YieldDouble(by_hand=True)
    with controlling(double, tmp_path) as listener, reaching(listener.socket_path) as client:
        version = double.wait(-1, 0).version
        double.waiting.clear()
        client.request(f"/v1/state?version={version}&wait_seconds=60")
        assert double.waiting.wait(WAIT)
        listener.stop(WAIT)
        assert client.closed()
    left = [t.name for t in threading.enumerate() if t.name.startswith("gpumem-otel")]
    assert left == []
