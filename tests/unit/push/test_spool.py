"""Profiles that wait on this machine: permissions, number, and when they are sent."""

from __future__ import annotations

import os
import stat
import threading

import pytest

from gpumem_otel.errors import SpoolError
from gpumem_otel.push.spool import MAX_FILES, Spool, label_comments, labels_of
from gpumem_otel.serve import discovery


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "spool"


@pytest.fixture
def spool(folder):
    return Spool(str(folder))


def age(folder, name, seconds):
    path = folder / name
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_only_this_user_may_read_a_file(spool, folder):
    previous = os.umask(0)
    try:
        name = spool.write("a", b"profile")
    finally:
        os.umask(previous)
    assert name == "a.pb.gz"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    assert spool.read(name) == b"profile"
    assert names(folder) == ["a.pb.gz"]


def test_without_a_folder_nothing_waits_and_none_is_made(spool, folder):
    assert spool.waiting() == []
    spool.delete("a.pb.gz")
    spool.release("sending-a.pb.gz")
    assert not folder.exists()


def test_a_file_being_sent_is_not_waiting_until_it_is_released(spool, folder):
    name = spool.write("a", b"1", sending=True)
    assert spool.waiting() == []
    assert spool.release(name) == "a.pb.gz"
    assert spool.waiting() == ["a.pb.gz"]
    spool.delete("a.pb.gz")
    assert names(folder) == []


def test_what_a_killed_process_was_sending_waits_after_two_minutes(spool, folder):
    name = spool.write("a", b"1", sending=True)
    age(folder, name, 121)
    assert spool.waiting() == [name]


def test_the_oldest_come_first_and_make_room(folder):
    spool = Spool(str(folder), max_files=3, max_bytes=100)
    for number, name in enumerate("abc"):
        spool.write(name, b"x" * 10)
        age(folder, f"{name}.pb.gz", 50 - number)
    assert spool.waiting() == ["a.pb.gz", "b.pb.gz", "c.pb.gz"]
    spool.write("d", b"x" * 10)
    assert spool.waiting() == ["b.pb.gz", "c.pb.gz", "d.pb.gz"]
    spool.write("e", b"x" * 85)
    assert spool.waiting() == ["d.pb.gz", "e.pb.gz"]
    with pytest.raises(SpoolError, match="100 bytes"):
        spool.write("f", b"x" * 101)
    assert spool.waiting() == ["d.pb.gz", "e.pb.gz"]


def test_many_at_once_stay_within_the_bounds(spool, folder):
    def write(number):
        for turn in range(20):
            spool.write(f"{number}-{turn}", b"x")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # each may have looked before another wrote
    assert MAX_FILES - 4 <= len(names(folder)) <= MAX_FILES + 4
    spool.write("last", b"x")
    assert len(names(folder)) <= MAX_FILES


def test_files_of_others_are_left_alone(spool, folder, tmp_path):
    spool.write("a", b"1")
    (folder / "notes.txt").write_text("mine")
    (folder / "link.pb.gz").symlink_to(tmp_path / "target")
    (folder / "dir.pb.gz").mkdir()
    assert spool.waiting() == ["a.pb.gz"]
    with pytest.raises(SpoolError):
        spool.read("link.pb.gz")


def test_what_was_half_written_goes_after_an_hour(spool, folder):
    spool.write("a", b"1")
    for name, seconds in ((".old.pb.gz", 3700), (".new.pb.gz", 10)):
        (folder / name).write_bytes(b"")
        age(folder, name, seconds)
    assert spool.waiting() == ["a.pb.gz"]
    assert names(folder) == [".new.pb.gz", "a.pb.gz"]


@pytest.mark.parametrize("act", ["write", "waiting"])
def test_a_folder_that_others_can_write_is_refused(spool, folder, act):
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(SpoolError, match=r"writable by others: chmod 700 it"):
        spool.write("a", b"1") if act == "write" else spool.waiting()


def test_a_link_in_its_place_is_refused(spool, folder, tmp_path):
    folder.parent.mkdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(SpoolError, match="is a symlink"):
        spool.write("a", b"1")


def test_labels_are_read_back_from_the_comments():
    labels = (("__name__", "gpu_memory_oom"), ("team", "a=b c"), ("rank", "3"))
    comments = ("rank 3 of 4", *label_comments(labels), "series label broken")
    assert labels_of(comments) == labels
    assert labels_of(("nothing",)) == ()


def test_the_folders_above_it_are_for_this_user_alone_too(spool, folder):
    """Where a group shares its umask, the run directory would be refused from then on."""
    previous = os.umask(0)
    try:
        spool.write("a", b"profile")
    finally:
        os.umask(previous)
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert discovery.targets(str(folder.parent)) == []


def test_each_file_deleted_to_make_room_is_counted(folder):
    dropped = []
    spool = Spool(str(folder), max_files=2, on_dropped=lambda: dropped.append(1))
    for name in "abcd":
        spool.write(name, b"profile")
    assert len(dropped) == 2
    assert len(names(folder)) == 2
