"""A failed allocation in a whole agent: log, line of JSON, profile in Pyroscope or in the spool."""

from __future__ import annotations

import gzip
import io
import json
import logging
import multiprocessing
import sys
import threading

import pytest
from support import fake_torch
from support.fake_pyroscope import FakePyroscope
from support.pyroscope_query import total

from gpumem_otel.cli.main import main
from gpumem_otel.oom import handler
from gpumem_otel.oom.urgent_queue import THREAD_NAME
from gpumem_otel.profiles.of_file import parse_snapshot
from gpumem_otel.profiles.pprof_reader import decode
from gpumem_otel.runtime.agent import Agent
from gpumem_otel.settings.options import resolve

OOM = "gpu_memory_oom:inuse_space:bytes:space:bytes"
SNAPSHOTS = "gpu_memory_oom:snapshots:count:space:bytes"
HELD = 3 * 512 + 4096


@pytest.fixture
def torch(monkeypatch):
    module = fake_torch.make("2.11")
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.fixture
def start(torch, tmp_path):
    """An armed agent whose job then allocates what `HELD` says."""
    agents = []

    def begin(environ=None, **options):
        settings = {
            "interval_seconds": 3600, "run_dir": str(tmp_path / "run"), "service_name": "job",
            **options,
        }  # fmt: skip
        agent = Agent(resolve(environ or {}, **settings), environ=environ or {})
        agents.append(agent)
        agent._await_cuda()
        agent._arm()
        for _ in range(3):
            torch.allocators[0].alloc(100)
        torch.allocators[0].alloc(4000, ({"name": "cache", "filename": "/job/c.py", "line": 9},))
        return agent

    yield begin
    for agent in agents:
        agent.stop()


@pytest.fixture
def server():
    with FakePyroscope() as fake:
        yield fake


def fail(torch, agent, size=1 << 30):
    with pytest.raises(torch.OutOfMemoryError):
        torch.fail(size, free=1 << 20, limit=8 << 30)
    assert agent.ooms.wait(30)


def lines_of(capfd):
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines]


def spooled(tmp_path):
    folder = tmp_path / "run" / "spool"
    return sorted(folder.iterdir()) if folder.exists() else []


def test_the_profile_is_in_pyroscope_under_its_own_id(start, torch, server, tmp_path, capfd):
    agent = start({"RANK": "3", "WORLD_SIZE": "4"}, pyroscope_url=server.url, tags={"team": "a"})
    fail(torch, agent)
    (line,) = lines_of(capfd)
    selector = f',oom_id="{line["oom_id"]}",rank="3",device="0",team="a"'
    assert total(server.url, "job", OOM, selector=selector) == HELD
    assert total(server.url, "job", SNAPSHOTS, selector=selector) == 1
    assert (line["event"], line["rank"], line["device"]) == ("gpumem_oom", 3, 0)
    assert (line["asked_bytes"], line["free_bytes"], line["limit_bytes"]) == (
        1 << 30, 1 << 20, 8 << 30,
    )  # fmt: skip
    assert (line["allocated_bytes"], line["cached_bytes"]) == (HELD, 0)
    assert [one["bytes"] for one in line["top"]] == [4096, 1536]
    assert line["top"][0]["stack"] == ["cache (c.py:9)"]
    assert spooled(tmp_path) == []
    assert agent.counters.get("exporter_errors", stage="oom") == 0
    assert agent.counters.get("last_push_timestamp_seconds", kind="oom") > 0


def test_the_block_is_in_the_log(start, torch, caplog):
    agent = start()
    with caplog.at_level(logging.WARNING):
        fail(torch, agent)
    (block,) = [text for text in map(logging.LogRecord.getMessage, caplog.records) if "\n" in text]
    assert block.startswith(
        "out of memory on device 0 of rank 0: asked for 1.0 GiB, 1.0 MiB of the device are free, "
        "the job may take 8.0 GiB\n  oom_id "
    )
    assert "cache (c.py:9)" in block


def test_the_counter_is_the_allocators_own_and_of_now(start, torch):
    agent = start()
    before = agent.observe().devices[0].ooms
    fail(torch, agent)
    agent.queries.forget()
    assert agent.observe().devices[0].ooms == before + 1


@pytest.mark.parametrize("fault", ["503", "400", "cut"])
def test_what_the_server_does_not_take_waits_in_the_spool(start, torch, server, tmp_path, fault):
    agent = start(pyroscope_url=server.url)
    server.fault = fault
    fail(torch, agent)
    (path,) = spooled(tmp_path)
    assert path.name.endswith("-rank0-device0.pb.gz")
    assert decode(path.read_bytes()).total("inuse_space") == HELD
    assert agent.counters.get("exporter_errors", stage="push") == 1


def test_push_sends_what_waits_and_deletes_it(start, torch, tmp_path, capsys, monkeypatch):
    fail(torch, start(namespace="ns"))
    capsys.readouterr()
    (path,) = spooled(tmp_path)
    oom_id = path.name.partition("-rank")[0]
    monkeypatch.setenv("GPUMEM_OTEL_RUN_DIR", str(tmp_path / "run"))
    with FakePyroscope() as server:
        command = ["push", "--url", server.url]
        server.fault = "503"
        assert main(command) == 1
        assert f"{path} not pushed" in capsys.readouterr().err
        assert spooled(tmp_path) == [path]
        server.fault = ""
        assert main(command) == 0
        assert capsys.readouterr().out == (
            f"pushed oom_id {oom_id}: 5.5 KiB of rank 0, device 0 to {server.url} as job\n"
        )
        assert spooled(tmp_path) == []
        assert main(command) == 0
        assert capsys.readouterr().out == f"nothing waits in {path.parent}\n"
        selector = f',oom_id="{oom_id}",namespace="ns"'
        assert total(server.url, "job", OOM, selector=selector) == HELD


def test_push_leaves_what_is_not_ours_and_goes_on(start, torch, tmp_path, capsys, monkeypatch):
    fail(torch, start())
    (path,) = spooled(tmp_path)
    other = path.with_name("0.pb.gz")
    other.write_bytes(b"no profile")
    monkeypatch.setenv("GPUMEM_OTEL_SPOOL_DIR", str(path.parent))
    with FakePyroscope() as server:
        assert main(["push", "--url", server.url]) == 0
        assert f"{other}: not a pprof file, left where it is" in capsys.readouterr().err
        assert total(server.url, "job", OOM) == HELD
    assert spooled(tmp_path) == [other]


def test_labels_of_a_file_are_not_for_the_spool(capsys):
    assert main(["push", "--url", "http://127.0.0.1:9", "--tag", "a=b"]) == 2
    assert "--tag is for a file" in capsys.readouterr().err


def test_a_server_that_hangs_is_not_waited_for(start, torch, server, tmp_path, monkeypatch):
    monkeypatch.setattr(handler, "WAIT_SECONDS", 0.3)
    agent = start(pyroscope_url=server.url)
    server.fault = "hang"
    with pytest.raises(torch.OutOfMemoryError):
        torch.fail(1 << 30)
    server.wait_for_pushes(1)
    assert not agent.ooms.wait()
    assert agent.ooms.gave_up
    (path,) = spooled(tmp_path)
    assert not path.name.startswith("sending-")
    assert decode(path.read_bytes()).total("inuse_space") == HELD
    agent.stop()
    server.down()
    server.up()


def test_while_it_is_sent_the_profile_is_on_disk_already(start, torch, server, tmp_path):
    """A process that is killed at that moment has lost nothing."""
    agent = start(pyroscope_url=server.url)
    server.fault = "hang"
    with pytest.raises(torch.OutOfMemoryError):
        torch.fail(1 << 30)
    server.wait_for_pushes(1)
    (path,) = spooled(tmp_path)
    assert path.name.startswith("sending-")
    assert decode(path.read_bytes()).total("inuse_space") == HELD
    server.fault = ""
    server.down()
    server.up()
    assert agent.ooms.wait(30)


def test_ranks_beyond_the_eighth_only_spool(start, torch, server, tmp_path):
    agent = start({"RANK": "8", "WORLD_SIZE": "9"}, pyroscope_url=server.url)
    fail(torch, agent)
    assert server.requests == []
    (path,) = spooled(tmp_path)
    assert "-rank8-" in path.name


def test_without_a_server_the_profile_waits(start, torch, tmp_path):
    agent = start(spool_dir=str(tmp_path / "kept"))
    fail(torch, agent)
    (path,) = (tmp_path / "kept").iterdir()
    assert decode(path.read_bytes()).total("inuse_space") == HELD


def test_a_spool_that_can_not_be_written_does_not_stop_the_push(start, torch, server, tmp_path):
    (tmp_path / "file").write_text("")
    agent = start(pyroscope_url=server.url, spool_dir=str(tmp_path / "file"))
    fail(torch, agent)
    assert total(server.url, "job", OOM) == HELD
    assert agent.counters.get("exporter_dropped", reason="spool") == 0


def test_where_nothing_can_take_it_the_loss_is_said(start, torch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    agent = start(spool_dir=str(tmp_path / "file"))
    fail(torch, agent)
    assert agent.counters.get("exporter_dropped", reason="spool") == 1
    assert "is lost" in caplog.text


def test_the_snapshot_of_torch_is_written_where_asked(start, torch, tmp_path):
    folder = tmp_path / "snapshots"
    agent = start(oom_snapshot_dir=str(folder))
    fail(torch, agent)
    (path,) = folder.iterdir()
    assert path.suffix == ".pickle"
    assert path.stat().st_mode & 0o777 == 0o600
    snapshot = parse_snapshot(path.read_bytes(), path.name)
    assert snapshot.totals(0).allocated_bytes == HELD


def test_survived_failures_are_counted_and_reported_once(start, torch, server, capfd):
    agent = start(pyroscope_url=server.url)
    before = agent.observe().devices[0].ooms
    for _ in range(1000):
        with pytest.raises(torch.OutOfMemoryError):
            torch.fail(1 << 30)
    assert agent.ooms.wait(30)
    assert len(lines_of(capfd)) == 1
    assert len(server.requests) == 1
    agent.queries.forget()
    assert agent.observe().devices[0].ooms == before + 1000


def test_a_job_that_never_fails_has_no_hook_of_ours_and_uninstall_puts_them_back(start, torch):
    hooks = sys.excepthook, threading.excepthook
    agent = start()
    assert (sys.excepthook, threading.excepthook) == hooks
    fail(torch, agent)
    assert sys.excepthook is not hooks[0]
    agent.stop()
    assert (sys.excepthook, threading.excepthook) == hooks
    with pytest.raises(torch.OutOfMemoryError):
        torch.fail(1)
    assert [t for t in threading.enumerate() if t.name == THREAD_NAME] == []


def test_the_fatal_failure_is_pushed_although_one_was_just_before(start, torch, server, capfd):
    """A batch-size finder ran out of memory, then the training did."""
    agent = start(pyroscope_url=server.url)
    fail(torch, agent, 100)
    try:
        torch.fail(200)
    except torch.OutOfMemoryError as error:
        sys.stderr, kept = io.StringIO(), sys.stderr
        try:
            sys.excepthook(type(error), error, error.__traceback__)
            shown = sys.stderr.getvalue()
        finally:
            sys.stderr = kept
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 200 bytes." in shown
    assert len(server.requests) == 2
    assert total(server.url, "job", OOM) == 2 * HELD
    line = json.loads(shown.splitlines()[0])
    assert line["asked_bytes"] == 200
    assert line["note"].startswith("taken after the exception")


def test_a_snapshot_out_of_budget_gives_the_last_profile_and_says_so(start, torch, server, capfd):
    agent = start(pyroscope_url=server.url)
    agent.reader.live_now()
    torch.allocators[0].alloc(100_000)
    agent.source._snapshots.block_seconds = 1.0
    fail(torch, agent)
    (line,) = lines_of(capfd)
    assert "s before: a snapshot would" in line["note"]
    assert line["top"][0]["bytes"] == 4096
    assert total(server.url, "job", OOM) == HELD


def test_switched_off_there_is_no_observer(start, torch):
    agent = start(oom=False)
    assert torch.observers == []
    assert agent.ooms is None


def test_another_allocator_has_no_observer(start, torch):
    torch.backend = "cudaMallocAsync"
    agent = start()
    assert torch.observers == []
    assert agent.counters.get("exporter_errors", stage="oom") == 0


def test_a_forked_child_says_nothing_and_its_error_is_its_own(start, torch, server, capfd):
    agent = start(pyroscope_url=server.url)
    fail(torch, agent)

    def work():
        ours = agent.ooms
        agent.after_fork_in_child()
        assert agent.ooms is None
        with pytest.raises(torch.OutOfMemoryError):
            torch.fail(1)
        assert ours.wait(0)
        sys.excepthook(ValueError, ValueError("of the child"), None)

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert len(server.requests) == 1
    fail(torch, agent)
    assert "ValueError: of the child" in capfd.readouterr().err


def test_last_words_are_left_when_it_happens_and_at_the_end(start, torch, tmp_path):
    folder = tmp_path / "left"
    folder.mkdir(mode=0o700)
    agent = start(serve=True, port=0, handover_dir=str(folder))
    assert agent.wait_listening(10)
    port = agent.address[1]
    fail(torch, agent)
    (path,) = folder.iterdir()
    words = json.loads(path.read_text())
    assert (words["ooms"], words["port"], words["guarded"]) == (3, port, False)
    assert 'gpumem_ooms_total{device="0",rank="0"} 3.0' in words["body"]
    torch.allocators[0].ooms = 9
    agent.stop()
    assert 'gpumem_ooms_total{device="0",rank="0"} 9.0' in json.loads(path.read_text())["body"]


def test_comments_of_a_spooled_profile_say_what_happened(start, torch, tmp_path):
    agent = start()
    fail(torch, agent)
    (path,) = spooled(tmp_path)
    comments = decode(gzip.decompress(path.read_bytes())).comments
    assert any(
        comment.startswith(
            "out of memory: asked for 1073741824 bytes, 1048576 free on the device, "
            "limit 8589934592, thread MainThread"
        )
        for comment in comments
    )
    assert "series label __name__=gpu_memory_oom" in comments


def test_a_push_that_fails_after_nobody_waits_any_more_is_not_called_lost(
    start, torch, server, monkeypatch, caplog
):
    monkeypatch.setattr(handler, "WAIT_SECONDS", 0.3)
    agent = start(pyroscope_url=server.url)
    server.fault = "hang"
    with pytest.raises(torch.OutOfMemoryError):
        torch.fail(1 << 30)
    server.wait_for_pushes(1)
    assert not agent.ooms.wait()
    server.down()
    assert agent.ooms._urgent.wait(30)
    server.up()
    spool = agent.ooms._spool
    (name,) = spool.waiting()
    assert f"waits in {spool.folder}/{name}" in caplog.text
    assert "is lost" not in caplog.text
    assert agent.counters.get("exporter_dropped", reason="spool") == 0


def test_snapshots_of_a_job_that_goes_on_failing_are_bounded(start, torch, tmp_path, monkeypatch):
    monkeypatch.setattr(handler, "MAX_SNAPSHOTS", 2)
    folder = tmp_path / "snapshots"
    agent = start(oom_snapshot_dir=str(folder))
    seen = []
    for _ in range(4):
        agent.ooms._watch._looked.clear()
        fail(torch, agent)
        seen += [path for path in folder.iterdir() if path not in seen]
    assert set(folder.iterdir()) == set(seen[2:])
    assert len(seen) == 4


def test_a_snapshot_that_can_not_be_written_leaves_nothing_and_is_said_once(
    start, torch, tmp_path, monkeypatch, caplog
):
    folder = tmp_path / "snapshots"
    agent = start(oom_snapshot_dir=str(folder))

    def full(self, target):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(handler.Path, "rename", full)
    for _ in range(3):
        agent.ooms._watch._looked.clear()
        fail(torch, agent)
    assert list(folder.iterdir()) == []
    assert agent.counters.get("exporter_errors", stage="oom") == 3
    assert caplog.text.count("was not fully reported") == 1


def test_one_that_the_server_refuses_does_not_hold_up_those_after_it(
    start, torch, tmp_path, capsys, monkeypatch
):
    agent = start()
    for _ in range(2):
        agent.ooms._watch._looked.clear()
        fail(torch, agent)
    paths = spooled(tmp_path)
    capsys.readouterr()
    monkeypatch.setenv("GPUMEM_OTEL_RUN_DIR", str(tmp_path / "run"))
    with FakePyroscope() as server:
        server.fault = "400"
        assert main(["push", "--url", server.url]) == 1
        assert len(server.requests) == 2
        errors = capsys.readouterr().err
        assert all(f"{path} not pushed: 400" in errors for path in paths)
        assert f"{server.url}: 2 of 2 not pushed" in errors
        assert spooled(tmp_path) == paths
