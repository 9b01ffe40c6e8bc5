"""What the kernel says of threads: who slept all the time between two looks, and who may not have.

`test_otherthreads` asks it about real threads; here are files as Linux writes them.
"""

from __future__ import annotations

import os
import sys

import pytest

from gpumem_otel.yielding.scan.other_threads import naps, slept_on

STATUS = (
    "Name:\tpython3\nState:\t{}\nPid:\t7\nvoluntary_ctxt_switches:\t{}\n"
    "nonvoluntary_ctxt_switches:\t{}\n"
)


@pytest.fixture
def task(tmp_path):
    """Writes the status of thread 7."""
    own = tmp_path / str(os.getpid())
    (own / "task" / "7").mkdir(parents=True)
    (tmp_path / "self").symlink_to(own.name)

    def write(state="S (sleeping)", own_will=3, other=1, times="151022 0 4\n", status=STATUS):
        (own / "task/7/status").write_text(status.format(state, own_will, other))
        (own / "task/7/schedstat").write_text(times)

    write()
    return write


def test_one_that_sleeps_with_the_same_numbers_slept_on(tmp_path, task):
    before = naps([7, 8], tmp_path)
    assert before == {7: (3, 1, "151022 0 4\n")}
    assert slept_on(before, 7, tmp_path)
    assert not slept_on(before, 8, tmp_path)
    assert not slept_on(before, None, tmp_path)


@pytest.mark.parametrize(
    "later",
    [
        {"own_will": 4},
        {"other": 2},
        {"times": "151023 0 4\n"},
        {"state": "R (running)"},
        {"state": "D (disk sleep)"},
        {"state": "t (tracing stop)"},
    ],
)
def test_one_that_was_switched_to_did_not(tmp_path, task, later):
    before = naps([7], tmp_path)
    task(**later)
    assert not slept_on(before, 7, tmp_path)


@pytest.mark.parametrize("state", ["R (running)", "D (disk sleep)", "T (stopped)", "Z (zombie)"])
def test_who_does_not_sleep_is_left_out(tmp_path, task, state):
    task(state=state)
    assert naps([7], tmp_path) == {}


def test_numbers_that_nobody_counts_prove_nothing(tmp_path, task):
    task(own_will=0, other=0)
    assert naps([7], tmp_path) == {}
    task(status="Name:\tpython3\nState:\t{}\n")
    assert naps([7], tmp_path) == {}


def test_a_kernel_without_schedstat_is_good_enough(tmp_path, task):
    (tmp_path / "self/task/7/schedstat").unlink()
    before = naps([7], tmp_path)
    assert before == {7: (3, 1, "")}
    assert slept_on(before, 7, tmp_path)


def test_a_proc_of_another_namespace_proves_nothing(tmp_path, task):
    (tmp_path / "self").unlink()
    (tmp_path / "self").symlink_to("1")
    (tmp_path / str(os.getpid())).rename(tmp_path / "1")
    assert naps([7], tmp_path) == {}


def test_a_long_switch_interval_proves_nothing(tmp_path, task):
    was = sys.getswitchinterval()
    sys.setswitchinterval(1.0)
    try:
        assert naps([7], tmp_path) == {}
    finally:
        sys.setswitchinterval(was)
