"""Reservations of host memory and the locks of GPUs, between real processes."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.copy.limits import HostRoom
from gpumem_otel.yielding.copy.reservations import DeviceReservations, HostReservations

ROOT = Path(__file__).parents[3]
PATIENCE = 100
"""Seconds for a process of a machine that is busy; none of them takes long by itself."""
PLENTY = HostRoom(1 << 50, "the test")


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "reservations")


@pytest.fixture
def make(folder):
    made = []

    def one(free=1000, **more):
        reservations = HostReservations(folder, lambda: HostRoom(free, "the test"), **more)
        made.append(reservations)
        return reservations

    yield one
    for reservations in made:
        reservations.close()


def entries(folder):
    return sorted(path.name for path in Path(folder).glob("host-*"))


@pytest.fixture
def start():
    """Starts processes, which are gone afterwards with their pipes, whatever became of the test."""
    started = []

    def begin(script, *arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def test_what_another_reserved_and_has_not_touched_is_not_free(make):
    first, second = make(), make()
    assert first.reserve(700) == 700
    with pytest.raises(YieldRefusedError) as refused:
        second.reserve(301)
    assert "host memory" in str(refused.value)
    assert "the test" in str(refused.value)
    assert second.reserve(300) == 300


def test_what_was_touched_is_counted_by_the_kernel_alone(make):
    first, second = make(), make()
    first.reserve(700)
    first.settle()
    assert second.reserve(1000) == 1000
    assert (first.held_bytes, second.held_bytes) == (700, 1000)


def test_a_limit_of_all_together_counts_what_is_held(make):
    first, second = make(limit_bytes=900), make(limit_bytes=900)
    first.reserve(700)
    first.settle()
    with pytest.raises(YieldRefusedError, match="the limit that was set"):
        second.reserve(201)
    assert second.reserve(500, at_least=0) == 200
    first.keep(0)
    assert second.reserve(700) == 700


def test_a_part_is_taken_where_a_part_is_of_use(make):
    reservations = make()
    assert reservations.reserve(5000, at_least=0) == 1000
    with pytest.raises(YieldRefusedError):
        reservations.reserve(1, at_least=1)
    assert reservations.reserve(0) == 0


def test_closing_gives_all_of_it_up(make, folder):
    first, second = make(), make()
    first.reserve(1000)
    assert len(entries(folder)) == 1
    first.close()
    assert entries(folder) == []
    assert second.reserve(1000) == 1000


def test_files_are_for_this_user_alone(make, folder):
    make().reserve(1)
    paths = [Path(folder), *Path(folder).iterdir()]
    assert len(paths) == 3
    assert [stat.S_IMODE(path.stat().st_mode) & 0o077 for path in paths] == [0, 0, 0]


def test_a_folder_of_others_is_refused(folder):
    Path(folder).mkdir()
    Path(folder).chmod(0o777)
    reservations = HostReservations(folder, lambda: PLENTY)
    with pytest.raises(YieldRefusedError, match="writable by others"):
        reservations.reserve(1)


def test_reservations_that_are_collected_hold_nothing(folder, make):
    gone = HostReservations(folder, lambda: HostRoom(1000, "the test"))
    gone.reserve(900)
    entry = gone._entry
    del gone
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(entry)
    assert make().reserve(1000) == 1000
    assert len(entries(folder)) == 1


def test_small_amounts_are_told_as_such(make):
    with pytest.raises(YieldRefusedError, match=r"3\.5 MiB are needed and 1000 B can be taken"):
        make().reserve(7 << 19)


LOCK = """
    import fcntl, os, signal, sys
    fcntl.flock(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_EX)
    print("holds", flush=True)
    sys.stdin.readline()
"""


def test_a_lock_that_is_not_let_go_is_not_waited_for_without_end(start, make, folder, clock):
    reservations = make(monotonic=clock.monotonic, sleep=clock.sleep)
    other = make()
    reservations.reserve(400)
    holder = start(LOCK, f"{folder}/lock")  # and is stopped
    assert holder.stdout.readline() == "holds\n"
    with pytest.raises(YieldRefusedError, match=rf"PID {holder.pid}\).* 5 s; continue it"):
        reservations.reserve(100)
    assert clock.now == 5.0
    with pytest.raises(YieldRefusedError, match=r"for 1 s"):
        reservations.reserve(100, wait_seconds=1.0)
    assert clock.now == 6.0
    reservations.settle()  # undoing needs no lock
    reservations.keep(300)
    assert clock.now == 6.0
    clock.on_sleep = lambda: holder.communicate("\n", timeout=PATIENCE)
    assert reservations.reserve(100) == 100
    assert reservations.held_bytes == 400
    assert other.reserve(900) == 900


def test_closing_needs_no_lock(start, make, folder):
    reservations = make()
    reservations.reserve(400)
    holder = start(LOCK, f"{folder}/lock")
    assert holder.stdout.readline() == "holds\n"
    reservations.close()
    assert entries(folder) == []


HOLD = """
    import os, sys
    from gpumem_otel.errors import YieldRefusedError
    from gpumem_otel.yielding.copy.limits import HostRoom
    from gpumem_otel.yielding.copy.reservations import HostReservations
    reservations = HostReservations(sys.argv[1], lambda: HostRoom(1000, "the test"))
    print(reservations.reserve(900), flush=True)
    sys.stdin.readline()
    os._exit(9)
"""


def test_a_process_that_died_holds_nothing(start, make, folder):
    holder = start(HOLD, folder)
    assert holder.stdout.readline() == "900\n"
    reservations = make()
    with pytest.raises(YieldRefusedError):
        reservations.reserve(500)
    holder.communicate("\n", timeout=PATIENCE)
    assert holder.returncode == 9
    assert len(entries(folder)) == 1
    assert reservations.reserve(500) == 500
    assert len(entries(folder)) == 1


def test_a_forked_child_does_not_speak_for_its_dead_parent(start, make, folder):
    parent = start(
        """
        import os, sys
        from gpumem_otel.yielding.copy.limits import HostRoom
        from gpumem_otel.yielding.copy.reservations import HostReservations
        reservations = HostReservations(sys.argv[1], lambda: HostRoom(1000, "the test"))
        reservations.reserve(900)
        if os.fork():
            os._exit(0)
        assert reservations.held_bytes == 0
        print("forked", flush=True)
        sys.stdin.readline()
        reservations.close()
        print("child", flush=True)
        """,
        folder,
    )
    assert parent.stdout.readline() == "forked\n"
    parent.wait(timeout=PATIENCE)
    reservations = make()
    assert reservations.reserve(1000) == 1000
    out, _ = parent.communicate("\n", timeout=PATIENCE)
    assert out == "child\n"


# each touches by adding to a file that stands for what the kernel counts, under its own lock
EIGHT = """
    import fcntl, json, os, random, sys
    from gpumem_otel.errors import YieldRefusedError
    from gpumem_otel.yielding.copy.limits import HostRoom
    from gpumem_otel.yielding.copy.reservations import HostReservations
    folder, kernel, number = sys.argv[1:]
    TOTAL = 10_000
    def used(change=0):
        with open(kernel, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            now = int(file.read() or 0) + change
            file.seek(0); file.write(str(now).ljust(20)); file.flush()
            return now
    reservations = HostReservations(folder, lambda: HostRoom(TOTAL - used(), "the test"))
    rng, worst, granted, refused = random.Random(int(number)), 0, 0, 0
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(60):
        size = rng.randrange(500, 4000)
        try:
            reservations.reserve(size)
        except YieldRefusedError:
            refused += 1
            continue
        granted += 1
        for part in range(4):  # touched little by little, as threads do
            worst = max(worst, used(size // 4))
        reservations.settle()
        used(-4 * (size // 4))
        reservations.keep(0)
    reservations.close()
    print(json.dumps([worst, granted, refused]), flush=True)
"""


def test_eight_processes_never_take_more_than_there_is(start, folder, tmp_path):
    kernel = tmp_path / "kernel"
    kernel.write_text("0")
    children = [start(EIGHT, folder, str(kernel), str(number)) for number in range(8)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    results = [json.loads(child.communicate(timeout=PATIENCE)[0]) for child in children]
    assert max(worst for worst, _, _ in results) <= 10_000
    assert all(granted for _, granted, _ in results)
    assert sum(refused for _, _, refused in results) > 0  # they did meet the limit
    assert int(kernel.read_text()) == 0
    assert entries(folder) == []


class Time:
    def __init__(self):
        self.now = 0.0
        self.on_sleep = lambda: None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.on_sleep()


@pytest.fixture
def clock():
    return Time()


@pytest.fixture
def gpus(folder, clock):
    return DeviceReservations(folder, monotonic=clock.monotonic, sleep=clock.sleep)


def never():
    return False


def test_room_that_is_there_is_had_at_once(gpus, clock):
    with gpus.room("GPU-1", 100, lambda: 100, 0.0, never):
        assert clock.now == 0.0


def test_room_that_comes_is_waited_for(gpus, clock):
    free = [0]
    clock.on_sleep = lambda: free.__setitem__(0, free[0] + 40)
    with gpus.room("GPU-1", 100, lambda: free[0], 10.0, never):
        assert free[0] == 120
    assert 0 < clock.now < 10


def test_room_that_does_not_come_is_told_in_bytes(gpus, clock):
    with (
        pytest.raises(YieldRefusedError, match=r"GPU-1: 2\.0 GiB of 3\.0 GiB are missing"),
        gpus.room("GPU-1", 3 << 30, lambda: 1 << 30, 1.5, never),
    ):
        pytest.fail("there is no room")
    assert clock.now == 1.5


def test_a_wait_can_be_stopped(gpus, clock):
    with (
        pytest.raises(YieldRefusedError),
        gpus.room("GPU-1", 2, lambda: 1, 1e9, lambda: clock.now > 1),
    ):
        pytest.fail("there is no room")
    assert clock.now < 2


def test_an_error_within_leaves_the_lock_free(gpus):
    with pytest.raises(ZeroDivisionError), gpus.room("GPU-1", 1, lambda: 1, 0.0, never):
        raise ZeroDivisionError
    with gpus.room("GPU-1", 1, lambda: 1, 0.0, never):
        pass


def test_one_process_at_a_time_on_a_gpu(start, gpus, folder, clock):
    other = start(
        """
        import sys
        from gpumem_otel.yielding.copy.reservations import DeviceReservations
        with DeviceReservations(sys.argv[1]).room("GPU-1", 1, lambda: 1, 0.0, lambda: False):
            print("holds", flush=True)
            sys.stdin.readline()
        """,
        folder,
    )
    assert other.stdout.readline() == "holds\n"
    with (
        pytest.raises(YieldRefusedError, match=rf"GPU-1: another process \(PID {other.pid}\) rest"),
        gpus.room("GPU-1", 1, lambda: 1, 1.0, never),
    ):
        pytest.fail("another process holds it")
    with gpus.room("GPU-2", 1, lambda: 1, 0.0, never):
        pass
    clock.on_sleep = lambda: other.communicate("\n", timeout=PATIENCE)
    with gpus.room("GPU-1", 1, lambda: 1, 5.0, never):
        assert other.returncode == 0
