"""Run files and the file_sd made of them."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from gpumem_otel import _version
from gpumem_otel.base.profile import Identity
from gpumem_otel.errors import ServeError
from gpumem_otel.serve.discovery import RunEntry, as_file_sd, entry_for, register, targets

IDENTITY = Identity(
    service_name="trainer",
    namespace="team",
    run_id="run-7",
    rank=3,
    local_rank=1,
    world_size=8,
    node="node7",
)


def file_sd(run_dir: str) -> str:
    return as_file_sd(targets(run_dir))


ACTS = [lambda run_dir: register(run_dir, mine()), targets, file_sd]


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "deep" / "run"


def mine(**changes) -> RunEntry:
    return replace(entry_for(IDENTITY, ("127.0.0.1", 9465)), **changes)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def start_ticks(pid: int | str) -> int:
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text.rsplit(")", 1)[1].split()[19])


def plant(run_dir, entry: RunEntry) -> str:
    """The file of another process, as that one would have written it."""
    (run_dir / entry.file_name).write_text(json.dumps(asdict(entry)))
    return entry.file_name


def test_a_run_file_names_its_process_and_address(run_dir):
    file = register(str(run_dir), mine())
    path = run_dir / file.name
    ticks = start_ticks("self")
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    pid_namespace = str(Path("/proc/self/ns/pid").readlink())
    place = hashlib.sha256(f"{boot_id} {pid_namespace}".encode()).hexdigest()[:8]
    assert file.name == f"{os.getpid()}-{ticks}-{place}.json"
    assert json.loads(path.read_text()) == {
        "pid": os.getpid(),
        "start_ticks": ticks,
        "pid_namespace": pid_namespace,
        "boot_id": boot_id,
        "machine": os.uname().nodename,
        "host": "127.0.0.1",
        "port": 9465,
        "scheme": "http",
        "service_name": "trainer",
        "namespace": "team",
        "rank": 3,
        "local_rank": 1,
        "world_size": 8,
        "run_id": "run-7",
        "node": "node7",
        "version": _version.__version__,
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert names(run_dir) == [file.name]
    assert targets(str(run_dir)) == [mine()]


def test_a_file_is_replaced_and_removed(run_dir):
    register(str(run_dir), mine())
    file = register(str(run_dir), mine(rank=4))
    assert [entry.rank for entry in targets(str(run_dir))] == [4]
    file.remove()
    file.remove()
    assert targets(str(run_dir)) == []
    assert names(run_dir) == []


def test_a_child_leaves_the_file_of_its_parent(run_dir, monkeypatch):
    file = register(str(run_dir), mine())
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    file.remove()
    assert names(run_dir) == [file.name]


def test_no_directory_means_no_targets(run_dir):
    assert targets(str(run_dir)) == []
    assert file_sd(str(run_dir)) == "[]\n"
    assert not run_dir.exists()


def ended_process() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_dead_processes_are_dropped_and_their_files_deleted(run_dir):
    keep = register(str(run_dir), mine()).name
    plant(run_dir, mine(pid=ended_process()))
    plant(run_dir, mine(start_ticks=mine().start_ticks + 1))  # our pid, used before by another
    died_while_writing = mine(pid=ended_process(), start_ticks=5).file_name
    (run_dir / f".{died_while_writing}").touch()
    assert [entry.pid for entry in targets(str(run_dir))] == [os.getpid()]
    assert names(run_dir) == [keep]


def test_a_zombie_is_dead(run_dir):
    register(str(run_dir), mine())
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    try:
        child.stdout.read()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        plant(run_dir, mine(pid=child.pid, start_ticks=start_ticks(child.pid)))
        assert [entry.pid for entry in targets(str(run_dir))] == [os.getpid()]
    finally:
        child.wait()
        child.stdout.close()


def test_registering_drops_the_dead_too(run_dir):
    register(str(run_dir), mine())
    plant(run_dir, mine(pid=ended_process()))
    name = register(str(run_dir), mine()).name
    assert names(run_dir) == [name]


def test_processes_of_another_container_are_kept(run_dir):
    register(str(run_dir), mine())
    name = plant(run_dir, mine(pid=ended_process(), pid_namespace="pid:[1]", rank=0))
    assert [entry.rank for entry in targets(str(run_dir))] == [0, 3]
    assert name in names(run_dir)


def elsewhere(**changes) -> RunEntry:
    """A process of another machine, whose pid is that of a dead one here."""
    there = {"boot_id": "another", "machine": "node8", "host": "10.0.0.8", "rank": 8}
    return mine(pid=ended_process(), **{**there, **changes})


def test_processes_of_another_machine_are_kept(run_dir):
    """GIVEN a directory on a shared file system THEN nothing of others in it is ever deleted."""
    register(str(run_dir), mine())
    planted = [
        plant(run_dir, elsewhere()),
        plant(run_dir, elsewhere(host="0.0.0.0", rank=9)),
        plant(run_dir, elsewhere(host="127.0.0.1", rank=10)),  # cannot be reached from here
    ]
    half_written = f".{elsewhere(start_ticks=6).file_name}"
    (run_dir / half_written).touch()
    listed = [(entry.rank, entry.target) for entry in targets(str(run_dir))]
    assert listed == [(3, "127.0.0.1:9465"), (8, "10.0.0.8:9465"), (9, "node8:9465")]
    register(str(run_dir), mine())
    assert {*planted, half_written} <= set(names(run_dir))


def test_processes_from_before_a_reboot_are_not_listed(run_dir):
    register(str(run_dir), mine())
    name = plant(run_dir, elsewhere(machine=os.uname().nodename))
    assert [entry.rank for entry in targets(str(run_dir))] == [3]
    assert name in names(run_dir)


def test_a_file_that_does_not_say_where_its_process_runs_is_kept(run_dir):
    register(str(run_dir), mine())
    entry = elsewhere(boot_id="", machine="")
    name = f"{entry.pid}-{entry.start_ticks}.json"
    (run_dir / name).write_text(json.dumps(asdict(entry)))
    assert [entry.rank for entry in targets(str(run_dir))] == [3, 8]
    assert name in names(run_dir)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"junk",
        b"[]",
        b"{}",
        b'{"pid": "1"}',
        b"[" * 60_000,
        b"x" * 70_000,
        json.dumps({**asdict(mine()), "port": 0}).encode(),
        json.dumps({**asdict(mine()), "port": True}).encode(),
        json.dumps({**asdict(mine()), "scheme": "gopher"}).encode(),
        json.dumps({**asdict(mine()), "host": ""}).encode(),
    ],
)
def test_files_that_are_not_ours_are_passed_over(run_dir, content):
    name = register(str(run_dir), mine()).name
    (run_dir / name).write_bytes(content)
    assert targets(str(run_dir)) == []
    assert names(run_dir) == [name]


def test_a_newer_version_may_say_more(run_dir):
    name = register(str(run_dir), mine()).name
    (run_dir / name).write_text(json.dumps({**asdict(mine()), "color": "red"}))
    assert targets(str(run_dir)) == [mine()]


def test_links_and_pipes_are_not_followed(run_dir, tmp_path):
    name = register(str(run_dir), mine()).name
    path = run_dir / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert targets(str(run_dir)) == []
    path.unlink()
    os.mkfifo(path)
    assert targets(str(run_dir)) == []


def test_other_files_are_left_alone(run_dir):
    register(str(run_dir), mine())
    (run_dir / "notes.json").touch()
    assert len(targets(str(run_dir))) == 1
    assert "notes.json" in names(run_dir)


@pytest.mark.parametrize("act", ACTS)
def test_a_symlink_is_refused(run_dir, tmp_path, act):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "deep").mkdir()
    run_dir.symlink_to(tmp_path / "real")
    with pytest.raises(ServeError, match=r"run is a symlink: give its target$"):
        act(str(run_dir))
    assert names(tmp_path / "real") == []


@pytest.mark.parametrize("act", ACTS)
def test_a_directory_that_others_can_write_is_refused(run_dir, act):
    run_dir.mkdir(parents=True)
    run_dir.chmod(0o777)
    with pytest.raises(ServeError, match=r"is writable by others: chmod 700 it$"):
        act(str(run_dir))


@pytest.mark.parametrize("act", ACTS)
def test_the_directory_of_another_user_is_refused(run_dir, act, monkeypatch):
    run_dir.mkdir(mode=0o700, parents=True)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(ServeError, match=r"belongs to another user: give your own$"):
        act(str(run_dir))


@pytest.mark.parametrize("act", ACTS)
def test_a_file_in_its_place_is_refused(tmp_path, act):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ServeError, match=r"Not a directory$"):
        act(str(path))


def test_file_sd_is_what_prometheus_reads(run_dir):
    register(str(run_dir), mine(host="0.0.0.0", scheme="https"))
    parent = os.getppid()
    ticks = start_ticks(parent)
    plant(
        run_dir,
        mine(pid=parent, start_ticks=ticks, host="::1", port=9464, rank=0, namespace="", node=""),
    )
    meta = "__meta_gpumem_"
    first, second = json.loads(file_sd(str(run_dir)))
    assert first == {
        "targets": ["[::1]:9464"],
        "labels": {
            f"{meta}service_name": "trainer",
            f"{meta}run_id": "run-7",
            f"{meta}rank": "0",
            f"{meta}local_rank": "1",
            f"{meta}world_size": "8",
            f"{meta}pid": str(parent),
        },
    }
    assert second["targets"] == ["127.0.0.1:9465"]
    assert second["labels"]["__scheme__"] == "https"
    assert second["labels"][f"{meta}namespace"] == "team"
    assert second["labels"][f"{meta}node"] == "node7"
    assert all(name.startswith("__") for name in second["labels"])
    assert file_sd(str(run_dir)) == file_sd(str(run_dir))


def test_a_directory_that_cannot_be_made_is_an_error_that_names_it():
    """Only readers take a missing directory for one without jobs."""
    entry = entry_for(IDENTITY, ("127.0.0.1", 9464))
    with pytest.raises(ServeError, match="/proc/none/run"):
        register("/proc/none/run", entry)
