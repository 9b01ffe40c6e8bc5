"""The control API over real sockets: what it answers, whom it knows, what it leaves behind."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import ssl
import stat
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from support import certs
from support.controlling import IDENTITY, MANY, bearer, call, controlling, reaching, short
from support.listening import WAIT, until
from support.yield_double import HELD, YieldDouble

from gpumem_otel.config import ControlConfig, Secret
from gpumem_otel.core.counters import Counters
from gpumem_otel.core.model import Identity
from gpumem_otel.core.yields import OperationState, Phase, YieldLevel, YieldRequest
from gpumem_otel.errors import ServeError
from gpumem_otel.serve import control_app, protocol, rundir
from gpumem_otel.serve.control import ControlListener
from gpumem_otel.serve.peers import Peer

TOKEN = "operator-token-0123456789"
READER = "reader-token-0123456789"


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"read,yield,restore {TOKEN} operator\nread {READER} dashboard\n")
    return str(path)


@pytest.fixture
def audit(caplog):
    caplog.set_level(logging.WARNING, logger="gpumem_otel.audit")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "gpumem_otel.audit"]


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
        assert done["state"] == "done"
        assert done["report"]["moved_bytes"] == HELD
        assert call(where, "GET", "/v1/state").json["status"]["moved_bytes"] == sum(HELD.values())

        again = call(where, "POST", "/v1/yield")
        assert (again.status, again.json["state"]) == (200, "done")
        assert call(where, "POST", "/v1/restore", body={}).status == 202
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
    assert 'operation="op-2" outcome="done"' in lines[1]
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
        for _ in range(control_app.MAX_WATCHERS):
            watching(where, stack)
        refused = call(where, "GET", "/v1/state?version=-1&wait_seconds=1")
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert call(where, "GET", "/v1/state", "Accept: text/event-stream").status == 503
        assert call(where, "GET", "/v1/state").status == 200
        assert call(where, "POST", "/v1/yield").status == 202
        stack.close()
        until(lambda: call(where, "GET", "/v1/state?version=-1&wait_seconds=1").status == 200)


def test_a_watcher_that_does_not_read_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(control_app, "MAX_WATCHERS", 1)
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
    monkeypatch.setattr(control_app, "MAX_WATCHERS", 1)
    double = YieldDouble(by_hand=True)
    with controlling(double, tmp_path) as listener, ExitStack() as stack:
        where = listener.socket_path
        watching(where, stack)
        looked = call(where, "POST", "/v1/yield", body={"dry_run": True, "wait_seconds": 3600})
        assert (looked.status, looked.json["state"]) == (202, "running")
        double.finish()
        found = call(where, "GET", looked.headers["location"]).json
        assert found["report"]["moved_bytes"] == HELD


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


def test_roles_of_tokens(tmp_path, tokens, audit):
    double = YieldDouble()
    with controlling(double, host="127.0.0.1", token_file=tokens) as listener:
        where = listener.address
        assert listener.socket_path is None
        for path in ("/v1/state", "/v1/openapi.json"):
            assert call(where, "GET", path, bearer(READER)).status == 200
        for path, role in (("/v1/yield", "yield"), ("/v1/restore", "restore")):
            refused = call(where, "POST", path, bearer(READER))
            assert refused.status == 403
            assert refused.detail == f"token dashboard does not have the role {role}"
        assert double.submitted == []
        assert call(where, "POST", "/v1/yield", bearer(TOKEN)).status == 202
        assert call(where, "GET", "/v1/operations/op-1", bearer(READER)).json["who"] == (
            "token operator"
        )
        # read again when it changes
        Path(tokens).write_text(f"read {TOKEN}\n")
        assert call(where, "POST", "/v1/restore", bearer(TOKEN)).status == 403
        assert call(where, "GET", "/v1/state", bearer(READER)).status == 401
    text = "\n".join(audit())
    assert TOKEN not in text
    assert READER not in text


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_log_says_where_commands_are_taken(tmp_path, tokens, host, caplog):
    caplog.set_level(logging.INFO, logger="gpumem_otel.serve")
    with controlling(YieldDouble(), tmp_path, host=host, token_file=tokens) as listener:
        shown = f"[{host}]" if ":" in host else host
        expected = {f"unix://{listener.socket_path}", f"http://{shown}:{listener.address[1]}"}
    said = {m.rpartition(" ")[2] for m in caplog.messages if "commands are taken at" in m}
    assert said == expected


def test_a_token_of_a_setting_is_warned_of(caplog):
    with controlling(YieldDouble(), host="127.0.0.1", token=Secret(TOKEN)) as listener:
        assert call(listener.address, "POST", "/v1/yield", bearer(TOKEN)).status == 202
    (line,) = [r.getMessage() for r in caplog.records if r.name == "gpumem_otel.serve"]
    assert "GPUMEM_OTEL_CONTROL_TOKEN_FILE" in line
    assert TOKEN not in caplog.text


def shown(ca, issued=None):
    context = ssl.create_default_context(cafile=str(ca.cert_file))
    if issued is not None:
        context.load_cert_chain(issued.cert_file, issued.key_file)
    return context


def test_roles_of_client_certificates(tmp_path, files, ca, audit):
    ops, other = (certs.issue(tmp_path, ca, name, []) for name in ("ops", "someone"))
    double = YieldDouble()
    options = {
        **files,
        "host": "127.0.0.1",
        "tls_client_ca_file": str(ca.cert_file),
        "client_roles": ("read", "ops=yield"),
    }
    with controlling(double, **options) as listener:
        where = listener.address
        assert call(where, "GET", "/v1/state", tls=shown(ca, other)).status == 200
        assert call(where, "POST", "/v1/yield", tls=shown(ca, other)).status == 403
        assert call(where, "POST", "/v1/yield", tls=shown(ca, ops)).status == 202
        assert call(where, "POST", "/v1/restore", tls=shown(ca, ops)).status == 403
        with pytest.raises(OSError):
            call(where, "GET", "/v1/state", tls=shown(ca))
    assert double.submitted == [(YieldRequest(), "certificate ops")]
    assert 'who="certificate someone" role="read"' in audit()[0]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "needs credentials"),
        ({"host": "0.0.0.0", "token": Secret(TOKEN)}, "needs TLS"),
        ({"host": "node7.example", "token": Secret(TOKEN)}, "needs TLS"),
        ({"client_roles": ("read",)}, "needs control_tls_client_ca_file"),
        ({"client_roles": ("read",), "token": Secret(TOKEN)}, "needs control_tls_client_ca_file"),
        ({"tls_client_ca_file": "ca.pem", "token": Secret(TOKEN)}, "without tls_cert_file"),
        ({"tls_cert_file": "/nowhere.pem", "token": Secret(TOKEN)}, "No such file"),
        ({"port": 65535, "token": Secret(TOKEN)}, "take a lower base port"),
        ({"token_file": "/nowhere"}, "control token file /nowhere: No such file"),
    ],
)
def test_what_would_open_a_door_is_refused(config, reason):
    given = ControlConfig(**{"enabled": True, "host": "127.0.0.1", **config})
    identity = Identity(service_name="x", local_rank=1)
    with pytest.raises(ServeError, match=reason) as caught:
        ControlListener(YieldDouble(), given, run_dir="", identity=identity)
    assert "\n" not in str(caught.value)


def test_a_certificate_without_roles_opens_nothing(files, ca):
    given = ControlConfig(
        enabled=True, host="127.0.0.1", tls_client_ca_file=str(ca.cert_file), **files
    )
    with pytest.raises(ServeError, match="needs credentials"):
        ControlListener(YieldDouble(), given, run_dir="", identity=IDENTITY)


def test_without_tls_on_another_address_only_when_said(tokens):
    options = {"host": "0.0.0.0", "token_file": tokens, "insecure": True}
    with controlling(YieldDouble(), **options) as listener:
        where = ("127.0.0.1", listener.address[1])
        assert call(where, "GET", "/v1/state", bearer(READER)).status == 200


RANK_3 = Identity(service_name="x", local_rank=3)

# the socket ----------------------------------------------------------------------------------


def test_the_socket_is_this_users_alone_and_goes_with_the_listener(tmp_path):
    run_dir = tmp_path / "run"
    mask = os.umask(0)
    try:
        with controlling(YieldDouble(), run_dir, identity=RANK_3) as listener:
            path = Path(listener.socket_path)
            mode = path.stat().st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == 0o600
            assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
            assert path.name.startswith(f"{os.getpid()}-")
            assert path.name.endswith(".control-3.sock")
            assert rundir.control_sockets(str(run_dir)) == [str(path)]
            assert [entry.name for entry in run_dir.iterdir()] == [path.name]
            assert rundir.targets(str(run_dir)) == []
    finally:
        os.umask(mask)
    assert list(run_dir.iterdir()) == []


def test_a_long_path_is_no_obstacle(tmp_path):
    run_dir = tmp_path / ("d" * 120) / ("e" * 120)
    with controlling(YieldDouble(), run_dir) as listener:
        folder = os.open(run_dir, os.O_RDONLY)
        try:
            short = f"/proc/self/fd/{folder}/{Path(listener.socket_path).name}"
            assert call(short, "GET", "/v1/state").status == 200
        finally:
            os.close(folder)


def dead_process():
    """The pid of a process that has ended."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def stale(run_dir, pid):
    place = rundir.socket_name(0).split("-", 2)[2].split(".")[0]
    path = run_dir / f"{pid}-1-{place}.control-0.sock"
    with socket.socket(socket.AF_UNIX) as sock, short(path) as address:
        sock.bind(address)
    return path


def test_sockets_of_the_dead_are_dropped_and_of_the_living_never(tmp_path):
    run_dir = tmp_path / "run"
    with controlling(YieldDouble(), run_dir) as listener:
        dead = stale(run_dir, dead_process())
        elsewhere = run_dir / f"{dead_process()}-1-00000000.control-1.sock"
        with socket.socket(socket.AF_UNIX) as sock, short(elsewhere) as address:
            sock.bind(address)
        (run_dir / "mine.sock").touch()
        # of another container nobody knows who lives, but whether somebody listens
        assert rundir.control_sockets(str(run_dir)) == [listener.socket_path]
        assert not dead.exists()
        assert elsewhere.exists()
        with socket.socket(socket.AF_UNIX) as sock:
            beside = run_dir / "1-1-00000000.control-2.sock"
            with short(beside) as address:
                sock.bind(address)
            sock.listen(0)
            for _ in range(3):  # also once its queue is full
                found = rundir.control_sockets(str(run_dir))
                assert found == [listener.socket_path, str(beside)]
        assert (run_dir / "mine.sock").exists()
        assert call(listener.socket_path, "GET", "/v1/state").status == 200
        # another process of the same rank and folder has a name of its own
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with controlling(YieldDouble(), run_dir) as other:
                    code = int(other.socket_path == listener.socket_path)
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert call(listener.socket_path, "GET", "/v1/state").status == 200


def test_a_socket_that_appears_while_it_stops_goes_too(tmp_path, monkeypatch):
    bound, goes_on, bind = threading.Event(), threading.Event(), rundir.bind_socket

    def late(*arguments):
        made = bind(*arguments)
        bound.set()
        assert goes_on.wait(WAIT)
        return made

    monkeypatch.setattr(rundir, "bind_socket", late)
    listener = ControlListener(
        YieldDouble(), ControlConfig(enabled=True), run_dir=str(tmp_path), identity=IDENTITY
    )
    listener.start()
    assert bound.wait(WAIT)
    assert len(rundir.control_sockets(str(tmp_path))) == 1
    stopping = threading.Thread(target=listener.stop, args=(WAIT,))
    stopping.start()
    (door,) = listener._doors
    until(lambda: door._loop is None)
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


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_can_write_is_not_used(tmp_path, mode, caplog):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(mode)
    listener = ControlListener(
        YieldDouble(), ControlConfig(enabled=True), run_dir=str(run_dir), identity=IDENTITY
    )
    listener.start()
    try:
        until(lambda: "is writable by others" in caplog.text)
        assert list(run_dir.iterdir()) == []
        run_dir.chmod(0o700)  # it is tried again
        assert listener.wait(WAIT)
    finally:
        listener.stop(WAIT)


def test_a_symlink_is_not_followed(tmp_path, caplog):
    (tmp_path / "link").symlink_to(tmp_path)
    listener = ControlListener(
        YieldDouble(),
        ControlConfig(enabled=True),
        run_dir=str(tmp_path / "link"),
        identity=IDENTITY,
    )
    listener.start()
    try:
        until(lambda: "is a symlink" in caplog.text)
    finally:
        listener.stop(WAIT)
    assert [entry.name for entry in tmp_path.iterdir()] == ["link"]


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


def test_another_user_is_refused(tmp_path, monkeypatch, audit):
    double = YieldDouble()
    with controlling(double, tmp_path) as listener:
        here = os.getuid()
        monkeypatch.setattr(
            "gpumem_otel.serve.protocol.peer_of",
            lambda transport: Peer(uid=here + 1, pid=5),
        )
        answer = call(listener.socket_path, "POST", "/v1/yield")
        assert (answer.status, answer.detail) == (
            403, "this socket is for the user of the job and for root",
        )  # fmt: skip
    assert double.submitted == []
    assert 'from="pid 5" outcome="refused"' in audit()[0]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_a_real_process_of_another_user_is_refused(audit):
    """First by the mode of the socket, then, where somebody changed that, by who it is."""
    nobody = 65534
    double = YieldDouble()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # the socket alone has to hold
        with controlling(double, folder) as listener:
            statuses = []
            for mode in (0o600, 0o666):
                Path(listener.socket_path).chmod(mode)
                pid = os.fork()
                if pid == 0:
                    code = 99
                    try:
                        os.setuid(nobody)
                        code = call(listener.socket_path, "POST", "/v1/yield").status - 400
                    except PermissionError:
                        code = 98
                    finally:
                        os._exit(code)
                statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    assert statuses == [98, 3]
    assert double.submitted == []
    assert len(audit()) == 1


def test_the_kernel_says_who_comes(tmp_path, audit):
    """A child of another pid is told apart, whatever it sends."""
    double = YieldDouble()
    with controlling(double, tmp_path) as listener:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                answer = call(listener.socket_path, "POST", "/v1/yield", bearer(TOKEN), body={})
                code = answer.status != 202
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert f'from="pid {pid}"' in audit()[0]


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


def test_who_asks_while_it_stops_is_told_so(tmp_path, caplog):
    counters = Counters()
    with controlling(YieldDouble(), tmp_path, counters=counters) as listener:
        (door,) = listener._doors
        door._loop._workers.stop()
        for method, path in (("GET", "/v1/state"), ("POST", "/v1/yield")):
            answer = call(listener.socket_path, method, path)
            assert (answer.status, answer.detail) == (503, "the listener stops")
    assert counters.snapshot() == {}
    assert "Traceback" not in caplog.text


def test_no_signal_handler_is_touched(tmp_path):
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with controlling(YieldDouble(), tmp_path, limits=MANY):
        assert {n: signal.getsignal(n) for n in signal.valid_signals()} == before
