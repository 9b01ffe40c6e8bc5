"""The unnamed file that takes what does not fit into host memory."""

from __future__ import annotations

import mmap
import os
import stat

import pytest

from gpumem_otel.errors import YieldFailedError, YieldRefusedError
from gpumem_otel.yielding.copy import disk
from gpumem_otel.yielding.copy.disk import DISK_BLOCK, DiskFile

SIZE = 64 * DISK_BLOCK


def aligned(data):
    buffer = mmap.mmap(-1, len(data))
    buffer[:] = data
    return memoryview(buffer)


@pytest.fixture
def make():
    made = []

    def one(folder, size=SIZE, **more):
        made.append(DiskFile(str(folder), size, **{"margin_bytes": 0, **more}))
        return made[-1]

    yield one
    for file in made:
        file.close()


@pytest.mark.parametrize("named_first", [False, True])
def test_it_has_no_name_and_is_for_this_user_alone(make, tmp_path, monkeypatch, named_first):
    if named_first:  # a file system without O_TMPFILE
        real = os.open

        def without(path, flags, *mode, **more):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(95, "not supported")
            return real(path, flags, *mode, **more)

        monkeypatch.setattr(disk.os, "open", without)
    file = make(tmp_path)
    assert list(tmp_path.iterdir()) == []
    status = os.fstat(file._file)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert status.st_size == SIZE
    assert status.st_blocks * 512 >= SIZE  # the room is taken, not promised


@pytest.mark.parametrize("where", ["disk", "/dev/shm"])
def test_what_is_written_is_read_back(make, tmp_path, where, monkeypatch):
    monkeypatch.setattr(disk, "_IN_MEMORY", frozenset())  # for its lack of direct transfers
    file = make(tmp_path if where == "disk" else where)
    data = os.urandom(10 * DISK_BLOCK)
    file.write(3 * DISK_BLOCK, aligned(data))
    file.write(0, aligned(os.urandom(3 * DISK_BLOCK)))
    back = mmap.mmap(-1, len(data))
    file.read(3 * DISK_BLOCK, memoryview(back))
    assert back[:] == data


def test_a_block_size_that_does_not_fit_is_written_through_the_cache(make, tmp_path):
    file = make(tmp_path)
    data = os.urandom(100)
    file.write(0, memoryview(data))  # neither aligned nor whole
    back = bytearray(100)
    file.read(0, memoryview(back))
    assert bytes(back) == data


def test_closing_gives_the_room_back(make, tmp_path):
    def free():
        status = os.statvfs(tmp_path)
        return status.f_bfree * status.f_frsize

    file = make(tmp_path, 64 << 20)
    taken = os.fstat(file._file).st_blocks * 512
    assert taken >= 64 << 20
    descriptor = file._file
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_too_little_room_is_refused_with_numbers(make, tmp_path):
    with pytest.raises(YieldRefusedError, match=r"MiB free, 1073741824 and") as refused:
        make(tmp_path, 1 << 50)
    assert str(tmp_path) in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_memory_is_refused(make):
    with pytest.raises(YieldRefusedError, match=r"/dev/shm is a tmpfs"):
        make("/dev/shm")


def test_a_forked_child_does_not_keep_the_room(make, tmp_path):
    file = make(tmp_path)
    descriptor = file._file
    child = os.fork()
    if not child:
        try:
            os.fstat(descriptor)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert os.fstat(descriptor).st_size == SIZE


def test_a_folder_that_is_not_there_is_refused(make, tmp_path):
    with pytest.raises(YieldRefusedError, match="no-such"):
        make(tmp_path / "no-such")


def test_a_disk_that_fills_up_refuses_and_one_that_lost_bytes_fails(make, tmp_path, monkeypatch):
    file = make(tmp_path)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.os, "pwrite", full)
    with pytest.raises(YieldRefusedError, match="No space left"):
        file.write(0, aligned(bytes(DISK_BLOCK)))
    os.ftruncate(file._file, DISK_BLOCK)
    with pytest.raises(YieldFailedError, match="shorter"):
        file.read(0, aligned(bytes(2 * DISK_BLOCK)))
