"""The metadata string: the job's own value is put back, whoever ends first."""

from __future__ import annotations

import threading
import types

import pytest

from gpumem_otel.capture.metadata import AllocationMarks


class Strings:
    """torch's C functions: one string per device, or one per thread."""

    def __init__(self, version):
        self.per_thread = version >= (2, 14)
        self.device = 0
        self.of_device = {0: "", 1: ""}
        self.mine = threading.local()
        self.calls = 0
        c = types.SimpleNamespace(
            _cuda_getMemoryMetadata=self.get,
            _cuda_setMemoryMetadata=self.set,
            _cuda_getDevice=lambda: self.device,
            _cuda_exchangeDevice=self.exchange,
        )
        self.torch = types.SimpleNamespace(_C=c, __version__=f"{version[0]}.{version[1]}.0")

    def get(self):
        self.calls += 1
        if self.per_thread:
            return getattr(self.mine, "text", "")
        return self.of_device[self.device]

    def set(self, text):
        if self.per_thread:
            self.mine.text = text
        else:
            self.of_device[self.device] = text

    def exchange(self, device):
        before, self.device = self.device, device
        return before


@pytest.fixture(params=[(2, 10), (2, 13), (2, 14)])
def strings(request):
    return Strings(request.param)


def test_regions_nest_and_the_jobs_value_comes_back(strings):
    marks = AllocationMarks(strings.torch)
    strings.set("the job's")
    outer = marks.enter("outer")
    inner = marks.enter("inner")
    assert strings.get() == "inner"
    marks.exit(inner)
    assert strings.get() == "outer"
    marks.exit(outer)
    assert strings.get() == "the job's"


def test_the_same_region_within_itself(strings):
    marks = AllocationMarks(strings.torch)
    outer, inner = marks.enter("r"), marks.enter("r")
    marks.exit(inner)
    assert strings.get() == "r"
    marks.exit(outer)
    assert strings.get() == ""


def test_what_the_job_sets_within_stays(strings):
    marks = AllocationMarks(strings.torch)
    mark = marks.enter("ours")
    strings.set("the job's")
    marks.exit(mark)
    assert strings.get() == "the job's"


def test_a_value_of_the_job_between_two_regions_comes_back(strings):
    marks = AllocationMarks(strings.torch)
    outer = marks.enter("outer")
    strings.set("the job's")
    inner = marks.enter("inner")
    marks.exit(inner)
    assert strings.get() == "the job's"
    marks.exit(outer)
    assert strings.get() == "the job's"


def test_threads_that_overlap_leave_nothing_behind():
    """GIVEN one string for all threads WHEN the first to begin is the first to end THEN the last
    one does not put back the name of a region that is over."""
    strings = Strings((2, 12))
    marks = AllocationMarks(strings.torch)
    strings.set("the job's")
    first, second = marks.enter("first"), marks.enter("second")
    marks.exit(first)
    assert strings.get() == "second"
    third = marks.enter("third")
    marks.exit(second)
    assert strings.get() == "third"
    marks.exit(third)
    assert strings.get() == "the job's"


def test_each_thread_has_its_own_from_2_14_on():
    strings = Strings((2, 14))
    marks = AllocationMarks(strings.torch)
    mark = marks.enter("here")
    seen = []

    def elsewhere():
        seen.append(strings.get())
        other = marks.enter("there")
        seen.append(strings.get())
        marks.exit(other)
        seen.append(strings.get())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == ["", "there", ""]
    assert strings.get() == "here"
    marks.exit(mark)
    assert strings.get() == ""


def test_the_string_of_the_device_where_it_was_set():
    strings = Strings((2, 11))
    marks = AllocationMarks(strings.torch)
    strings.of_device[1] = "the job's"
    mark = marks.enter("ours")
    strings.device = 1
    marks.exit(mark)
    assert strings.of_device == {0: "", 1: "the job's"}
    assert strings.device == 1


def test_a_torch_without_it_is_left_alone():
    torch = types.SimpleNamespace(_C=types.SimpleNamespace(), __version__="2.9.0")
    marks = AllocationMarks(torch)
    assert not marks.supported
    assert marks.enter("x") is None


def test_a_backend_that_keeps_none_is_left_alone(strings):
    strings.torch._C._cuda_memoryMetadataSupported = lambda: False
    marks = AllocationMarks(strings.torch)
    assert marks.enter("x") is None
    assert strings.calls == 0


def test_a_failure_ends_it_and_never_reaches_the_job(strings, caplog):
    marks = AllocationMarks(strings.torch)
    mark = marks.enter("x")

    def broken():
        raise RuntimeError("device lost")

    marks._get = broken
    marks.exit(mark)
    assert marks.enter("y") is None
    assert not marks.supported
    assert [r.message for r in caplog.records] == ["regions no longer label allocations"]


def test_a_finalizer_that_enters_a_region_within_enter_does_not_wait_for_itself(strings):
    """The collector may run at any allocation, also while the lock is held."""
    marks = AllocationMarks(strings.torch)
    plain_get = marks._get
    inner = []

    def collected():
        marks._get = plain_get
        inner.append(marks.enter("finalizer"))
        marks.exit(inner[0])
        return plain_get()

    marks._get = collected
    thread = threading.Thread(target=lambda: marks.exit(marks.enter("outer")), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert inner[0].text == "finalizer"
    assert strings.get() == ""


def test_regions_that_always_overlap_hold_no_chain(strings):
    marks = AllocationMarks(strings.torch)
    strings.set("the job's")
    before = marks.enter("region 0")
    for number in range(1, 100):
        now = marks.enter(f"region {number}")
        marks.exit(before)
        before = now
    length, link = 0, before
    while link is not None:
        length, link = length + 1, link.below
    assert length <= 2
    marks.exit(before)
    assert strings.get() == "the job's"
