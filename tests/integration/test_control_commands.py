"""Commands to the control API over a real socket: what begins, is refused, is answered."""

from __future__ import annotations

import os
import threading

import pytest
from support.controlling import TOKEN, bearer, call, controlling
from support.listening import WAIT
from support.yield_double import HELD, YieldDouble

from gpumem_otel.base.counters import Counters
from gpumem_otel.yielding.values import Operation, OperationState, Phase, YieldLevel, YieldRequest


def test_a_yield_and_a_restore(tmp_path, audit):
    double = YieldDouble(by_hand=True)
    with controlling(double, tmp_path) as listener:
        where = listener.socket_path
        state = call(where, "GET", "/v1/state").json
        assert state["process"] == {
            "service_name": "trainer", "namespace": "", "run_id": "r1", "rank": 0,
            "local_rank": 0, "world_size": 1, "node": "n1", "pid": 7,
        }  # fmt: skip
        assert state["status"]["state"] == "running"

        begun = call(where, "POST", "/v1/yield", body={"level": "tensors", "lease_seconds": 60})
        assert begun.status == 202
        assert begun.headers["location"] == "/v1/operations/op-1"
        who = f"uid {os.getuid()}"
        wanted = YieldRequest(level=YieldLevel.TENSORS, lease_seconds=60.0)
        assert double.submitted == [(wanted, who)]
        double.advance(Phase.RELEASE, 5)
        running = call(where, "GET", begun.headers["location"]).json
        assert (running["state"], running["phase"], running["done_bytes"]) == (
            "running", "release", 5,
        )  # fmt: skip
        double.finish()
        done = call(where, "GET", begun.headers["location"]).json
        assert (done["state"], done["already"]) == ("done", False)
        assert done["report"]["moved_bytes"] == HELD
        assert call(where, "GET", "/v1/state").json["status"]["moved_bytes"] == sum(HELD.values())

        again = call(where, "POST", "/v1/yield")
        assert (again.status, again.json["state"], again.json["already"]) == (200, "done", True)
        came = call(where, "POST", "/v1/restore", body={})
        assert (came.status, came.json["already"]) == (202, False)
        double.finish()
        assert call(where, "GET", "/v1/state").json["status"]["state"] == "running"
    assert double.moves == 2
    lines = audit()
    assert len(lines) == 3
    start = f'control: command="yield" who="{who}" role="read+restore+yield" from="pid '
    assert lines[0].startswith(start + str(os.getpid()))
    assert lines[0].endswith(
        'request={"level": "tensors", "lease_seconds": 60.0} operation="op-1" outcome="begun" '
        'reason=""'
    )
    assert 'operation="op-2" outcome="nothing to do"' in lines[1]
    assert 'command="restore"' in lines[2]


def test_what_the_job_refuses_is_a_conflict(tmp_path, audit):
    double = YieldDouble(by_hand=True)
    with controlling(double, tmp_path) as listener:
        where = listener.socket_path
        begun = call(where, "POST", "/v1/yield", body={})
        refused = call(where, "POST", "/v1/restore")
        assert (refused.status, refused.detail) == (409, "operation op-1 runs: wait for it")
        assert call(where, "POST", "/v1/yield", body={}).json["id"] == begun.json["id"]
        double.finish("no safe point within 60 s")
        ended = call(where, "GET", "/v1/operations/op-1").json
        assert (ended["state"], ended["error"]) == ("refused", "no safe point within 60 s")
    assert double.moves == 0
    assert 'outcome="refused" reason="operation op-1 runs: wait for it"' in audit()[1]


@pytest.mark.parametrize(
    ("state", "status"), [(OperationState.REFUSED, 409), (OperationState.FAILED, 500)]
)
def test_a_dry_run_is_answered_at_its_end(tmp_path, state, status):
    double = YieldDouble(by_hand=True)
    with controlling(double, tmp_path) as listener:
        found = []
        for error in ("", "captured graphs"):
            ask = threading.Thread(
                target=lambda: found.append(
                    call(listener.socket_path, "POST", "/v1/yield", body={"dry_run": True})
                )
            )
            double.waiting.clear()
            ask.start()
            assert double.waiting.wait(WAIT)
            double.finish(error, state)
            ask.join(WAIT)
    good, bad = found
    assert good.status == 200
    assert good.json["report"]["moved_bytes"] == HELD
    assert (bad.status, bad.detail, bad.json["operation"]) == (status, "captured graphs", "op-2")
    assert double.moves == 0


def test_the_same_key_begins_one_operation(tmp_path, tokens, audit):
    double = YieldDouble(by_hand=True)
    key = "Idempotency-Key: k-1"
    with controlling(double, tmp_path, host="127.0.0.1", token_file=tokens) as listener:
        where = listener.socket_path
        found = []
        asking = [
            threading.Thread(
                target=lambda: found.append(call(where, "POST", "/v1/yield", key, body={}))
            )
            for _ in range(5)
        ]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(WAIT)
        assert {answer.json["id"] for answer in found} == {"op-1"}
        assert len(double.submitted) == 1
        double.finish()
        # not a body of the same bytes, but of the same meaning
        again = call(where, "POST", "/v1/yield", key, body=b' {"keep": []} ')
        assert (again.status, again.json["state"], again.json["id"]) == (200, "done", "op-1")
        assert again.json["already"] is False  # it is the answer to what began it
        other = call(where, "POST", "/v1/yield", key, body={"verify": True})
        assert (other.status, other.detail) == (
            422, "this Idempotency-Key came with another command: take a new one",
        )  # fmt: skip
        assert call(where, "POST", "/v1/restore", key).status == 422
        for wrong in ("Idempotency-Key: a b", "Idempotency-Key: " + "x" * 129, "Idempotency-Key:"):
            assert call(where, "POST", "/v1/yield", wrong, body={}).status == 400
        assert call(where, "POST", "/v1/yield", key, key, body={}).status == 400
        assert len(double.submitted) == 1
        # keys are the sender's own
        call(listener.address, "POST", "/v1/yield", key, bearer(TOKEN), body={"verify": True})
        assert len(double.submitted) == 2
    assert sum('outcome="sent again"' in line for line in audit()) == 5


def test_a_command_whose_state_is_there_already_is_told_apart(tmp_path):
    key = "Idempotency-Key: k-1"
    with controlling(YieldDouble(), tmp_path) as listener:
        where = listener.socket_path
        first = call(where, "POST", "/v1/restore", key)
        assert (first.status, first.json["state"], first.json["already"]) == (200, "done", True)
        begun = call(where, "POST", "/v1/yield")
        assert (begun.status, begun.json["already"]) == (202, False)
        assert call(where, "GET", begun.headers["location"]).json["state"] == "done"
        for _ in range(2):
            answer = call(where, "POST", "/v1/yield")
            assert (answer.status, answer.json["already"]) == (200, True)
        # of the command, not of the operation
        for path in (begun.headers["location"], answer.headers["location"]):
            assert call(where, "GET", path).json["already"] is False
        assert call(where, "GET", "/v1/state").json["status"]["operation"]["already"] is False
        again = call(where, "POST", "/v1/restore", key)  # and nothing comes back by that
        assert (again.status, again.json["id"]) == (200, first.json["id"])
        assert again.json["already"] is True  # the same answer as before


class RestoredByTheLease(YieldDouble):
    """The last restore that was asked for was refused; everything came back all the same."""

    def submit(self, request, who):
        refused = OperationState.REFUSED
        return Operation(id="op-9", kind="restore", state=refused, who=who, error="no room")


def test_an_old_failure_is_none_of_a_restore_that_has_nothing_to_do(tmp_path, audit):
    with controlling(RestoredByTheLease(), tmp_path) as listener:
        answer = call(listener.socket_path, "POST", "/v1/restore")
    assert (answer.status, answer.json["state"], answer.json["error"]) == (200, "done", "")
    assert (answer.json["already"], answer.json["id"]) == (True, "")
    assert "location" not in answer.headers
    (line,) = audit()
    assert line.endswith('operation="" outcome="nothing to do" reason=""')


def test_a_folder_on_a_file_system_that_hangs_holds_up_nobody_else(tmp_path, monkeypatch):
    asked, goes_on, resolve = threading.Event(), threading.Event(), os.path.realpath

    def hangs(path):
        if path == "/net/away":
            asked.set()
            assert goes_on.wait(WAIT)
        return resolve(path)

    monkeypatch.setattr(os.path, "realpath", hangs)
    double = YieldDouble()
    with controlling(double, tmp_path, disk_dirs=("/net",)) as listener:
        where = listener.socket_path
        found = []
        body = {"disk_dir": "/net/away"}
        hanging = threading.Thread(
            target=lambda: found.append(call(where, "POST", "/v1/yield", body=body))
        )
        hanging.start()
        try:
            assert asked.wait(WAIT)
            assert call(where, "GET", "/v1/state").status == 200
            assert call(where, "POST", "/v1/restore").status == 200
        finally:
            goes_on.set()
            hanging.join(WAIT)
    assert found[0].status == 202


def test_paths_methods_and_types(tmp_path):
    double = YieldDouble()
    with controlling(double, tmp_path) as listener:
        where = listener.socket_path
        for path in ("/", "/v1", "/v1/yield/", "/v2/yield", "/v1/operations/", "/metrics",
                     "/v1/operations/op-1/x", "//v1/yield", "/v1/../v1/yield", "/v1/yield%0A",
                     "/v1/yield%2F", "/v1/operations/%00", "/v1/YIELD"):  # fmt: skip
            answer = call(where, "POST", path, body={})
            assert answer.status in {404, 405}, path
            assert answer.detail
        assert call(where, "GET", "/v1/operations/unknown").detail.startswith("no such operation")
        assert call(where, "GET", "/v1/operations/..%2Fstate").status == 404
        wrong = call(where, "GET", "/v1/yield")
        assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
        for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
            assert call(where, method, "/v1/yield", body={}).status == 405
        assert call(where, "HEAD", "/v1/state").status == 200
        form = call(where, "POST", "/v1/yield", "Content-Type: text/plain", body={})
        assert (form.status, form.detail) == (415, "the body must be application/json")
        charset = "Content-Type: application/JSON; charset=utf-8"
        assert call(where, "POST", "/v1/yield", charset, body={"x": 1}).status == 422
        assert call(where, "POST", "/v1/yield?dry_run=true", body={}).status == 400
        assert call(where, "GET", "/v1/state?versions=1").status == 400
        assert call(where, "GET", "/v1/openapi.json?x=1").status == 400
        no_length = call(where, "POST", "/v1/yield", "Transfer-Encoding: chunked")
        assert no_length.status == 411
    assert double.submitted == []


def test_no_cookies_no_cors_no_caching(tmp_path):
    with controlling(YieldDouble(), tmp_path) as listener:
        headers = call(listener.socket_path, "GET", "/v1/state", "Origin: http://evil").headers
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert not [name for name in headers if name.startswith(("access-control", "set-cookie"))]
        assert "server" not in headers


def test_a_failure_of_ours_is_counted_and_answered(tmp_path, audit):
    class Broken(YieldDouble):
        def submit(self, request, who):
            raise RuntimeError("bug")

    counters = Counters()
    with controlling(Broken(), tmp_path, counters=counters) as listener:
        answer = call(listener.socket_path, "POST", "/v1/yield")
        assert (answer.status, answer.detail) == (500, "internal error")
    assert 'outcome="failed" reason="bug"' in audit()[0]
    assert counters.get("exporter_errors", stage="control") == 1
