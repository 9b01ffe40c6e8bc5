"""Commands over real sockets to the real engine, whose parts move bytes in memory."""

from __future__ import annotations

import json
import re
import threading

import pytest
from support.controlling import call, controlling, reaching
from support.listening import WAIT, until
from support.yield_parts import SIZE, LoopingJob, World

from gpumem_otel.cli.main import main
from gpumem_otel.yielding.values import OperationState, YieldState


@pytest.fixture
def world():
    made = World(driver=False)
    yield made
    assert made.nothing_lost
    made.engine.close(WAIT)


def ended(where, operation_id):
    """The operation once it has ended."""
    found = []

    def done():
        found[:] = [call(where, "GET", f"/v1/operations/{operation_id}").json]
        return found[0]["state"] != "running"

    until(done)
    return found[0]


def test_a_yield_and_a_restore_through_the_command_line(world, tmp_path, capsys):
    with LoopingJob(world.safe_points) as job, controlling(world.engine, tmp_path):
        verb = ["ctl", "yield", "--run-dir", str(tmp_path), "--json"]
        assert main([*verb, "--dry-run"]) == 0
        assert world.all_on_device
        (dry,) = json.loads(capsys.readouterr().out)
        would = dry["value"]["report"]["moved_bytes"]
        job.goes_on()

        assert main(verb) == 0
        (done,) = json.loads(capsys.readouterr().out)
        assert done["value"]["report"]["moved_bytes"] == would
        assert sum(would.values()) == SIZE * len(world.storages)
        assert not any(one.device for one in world.storages)
        assert main(["ctl", "state", "--run-dir", str(tmp_path), "--json"]) == 0
        (state,) = json.loads(capsys.readouterr().out)
        assert state["value"]["state"] == "yielded"

        assert main(["ctl", "restore", "--run-dir", str(tmp_path)]) == 0
        assert "took again 5.0 MiB" in capsys.readouterr().out
        assert world.all_on_device
        job.goes_on()


def test_a_restore_of_what_was_never_yielded(world, tmp_path):
    with controlling(world.engine, tmp_path) as listener:
        answer = call(listener.socket_path, "POST", "/v1/restore")
        assert (answer.status, answer.json["state"]) == (200, "done")
        assert answer.json["already"] is True
        assert "location" not in answer.headers


def test_what_is_there_already_is_said_and_no_error(world, tmp_path, capsys):
    """As of `systemctl start` of what runs: exit code 0, a plain sentence, and no old report."""

    def ctl(*arguments):
        code = main(["ctl", *arguments, "--run-dir", str(tmp_path)])
        captured = capsys.readouterr()
        return code, captured.out.partition("): ")[2], captured.err

    nothing_away = (0, "nothing is away, nothing had to be restored\n", "")
    with LoopingJob(world.safe_points), controlling(world.engine, tmp_path):
        assert ctl("restore") == nothing_away
        assert ctl("yield")[:1] == (0,)
        assert ctl("yield") == (
            0, "its memory is away already (5.0 MiB), nothing had to be moved\n", "",
        )  # fmt: skip
        assert ctl("restore", "--json")[:1] == (0,)
        assert ctl("restore") == nothing_away
        assert ctl("restore", "--no-wait") == nothing_away
        assert main(["ctl", "restore", "--json", "--run-dir", str(tmp_path)]) == 0
        (entry,) = json.loads(capsys.readouterr().out)
        assert (entry["value"]["already"], entry["error"]) == (True, "")


def test_a_yield_that_could_not_be_undone_is_there_when_it_is_repeated(tmp_path):
    """It failed, and what is asked for now is so: no error of the second command."""
    world = World()
    world.engine._lease.try_again = lambda: None
    with LoopingJob(world.safe_points), controlling(world.engine, tmp_path) as listener:
        world.faults.now["checkpoint"] = RuntimeError("the driver says no")
        world.faults.now["copy_back"] = RuntimeError("the device is taken")
        first = call(listener.socket_path, "POST", "/v1/yield")
        while world.engine.operation(first.json["id"]).state is OperationState.RUNNING:
            world.engine.wait(world.engine.status.version, 5.0)
        assert world.engine.status.state is YieldState.YIELDED
        assert world.engine.status.operation.state is OperationState.FAILED
        again = call(listener.socket_path, "POST", "/v1/yield")
        assert (again.status, again.json["already"], again.json["error"]) == (200, True, "")
        world.faults.now.clear()
        world.engine.restore()
    assert world.all_on_device


def test_no_safe_point_in_time_is_refused_and_the_state_is_what_it_was(world, tmp_path, capsys):
    entered, leave = threading.Event(), threading.Event()

    def busy():
        world.safe_points.reached()
        entered.set()
        leave.wait(WAIT)

    thread = threading.Thread(target=busy)
    thread.start()
    assert entered.wait(WAIT)
    try:
        with controlling(world.engine, tmp_path):
            verb = ["ctl", "yield", "--run-dir", str(tmp_path), "--wait-seconds", "0.1"]
            assert main(verb) == 1
            error = capsys.readouterr().err
            *progress, line = error.splitlines()
            assert line.startswith("gpumem-otel: error: ")
            assert "yield refused: " in line
            assert all(re.fullmatch(r".* \(pid 7\): yield(: \w+| \w+.*)", one) for one in progress)
    finally:
        leave.set()
        thread.join(WAIT)
    assert world.engine.status.state is YieldState.RUNNING
    assert world.all_on_device


def test_a_flood_of_commands_is_one_yield(world, tmp_path):
    copying, go_on = threading.Event(), threading.Event()
    copies = []

    def during_copy():
        copies.append(1)
        copying.set()
        go_on.wait(WAIT)

    world.offload.during_copy = during_copy
    with LoopingJob(world.safe_points), controlling(world.engine, tmp_path) as listener:
        where, answers = listener.socket_path, []

        def flood():
            for _ in range(10):
                answers.append(call(where, "POST", "/v1/yield", body={}))
                answers.append(call(where, "POST", "/v1/restore", body={}))

        threads = [threading.Thread(target=flood) for _ in range(4)]
        first = call(where, "POST", "/v1/yield", body={}).json["id"]
        assert copying.wait(WAIT)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        assert {answer.status for answer in answers} <= {202, 409, 503}
        begun = {answer.json["id"] for answer in answers if answer.status == 202}
        assert begun == {first}
        go_on.set()
        assert ended(where, first)["state"] == "done"
        assert len(copies) == len(world.storages)
        assert ended(where, call(where, "POST", "/v1/restore").json["id"])["state"] == "done"


def test_a_client_that_goes_away_changes_nothing(world, tmp_path):
    with LoopingJob(world.safe_points) as job, controlling(world.engine, tmp_path) as listener:
        where = listener.socket_path
        with reaching(where) as client:
            client.request("/v1/yield", "Content-Length: 0", method="POST")
        until(lambda: world.engine.status.state is YieldState.YIELDED)
        with reaching(where) as client:
            client.request("/v1/state?version=0&wait_seconds=60", "Accept: text/event-stream")
        with reaching(where) as client:
            client.request("/v1/restore", "Content-Length: 0", method="POST")
        until(lambda: world.engine.status.state is YieldState.RUNNING)
        job.goes_on()
    assert world.all_on_device


def test_a_device_that_is_taken_is_said_and_tried_again(world, tmp_path):
    with LoopingJob(world.safe_points), controlling(world.engine, tmp_path) as listener:
        where = listener.socket_path
        ended(where, call(where, "POST", "/v1/yield").json["id"])
        world.offload.room = False
        refused = ended(where, call(where, "POST", "/v1/restore").json["id"])
        assert refused["state"] == "refused"
        assert "bytes are missing" in refused["error"]
        assert call(where, "GET", "/v1/state").json["status"]["state"] == "yielded"
        world.offload.room = True
        assert ended(where, call(where, "POST", "/v1/restore").json["id"])["state"] == "done"


def test_a_lease_shows_and_ends_by_itself(world, tmp_path):
    with LoopingJob(world.safe_points) as job, controlling(world.engine, tmp_path) as listener:
        where = listener.socket_path
        begun = call(where, "POST", "/v1/yield", body={"lease_seconds": 0.3}).json["id"]
        ended(where, begun)
        until(lambda: call(where, "GET", "/v1/state").json["status"]["state"] == "running")
        status = call(where, "GET", "/v1/state").json["status"]
        assert status["lease_expiry_ns"] == 0
        assert status["operation"]["kind"] == "restore"
        job.goes_on()
