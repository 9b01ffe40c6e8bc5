"""The demo's lines: where memory was allocated, and by which line of the job."""

from __future__ import annotations

from types import SimpleNamespace

from gpumem_otel.base.profile import Frame, HeapProfile, ProfileKind, Sample
from gpumem_otel.cli.demo.profile_files import Moment
from gpumem_otel.cli.demo.view import StackRow, device_line, shown_rows, stack_line
from gpumem_otel.profiles.tables import top_rows


def line(*frames: Frame) -> str:
    profile = HeapProfile(ProfileKind.LIVE, 0, (Sample(frames, 1, 10),))
    return stack_line(top_rows(profile)[0])


def test_the_leaf_and_the_jobs_own_line():
    frames = (
        Frame("torch.nn.modules.linear.Linear.forward", "/torch/linear.py", 134),
        Frame("torch.nn.modules.module.Module._call_impl", "/torch/module.py", 1790),
        Frame("model.Attention.forward", "/job/model.py", 24),
        Frame("__main__.train", "/job/train.py", 7),
    )
    assert line(*frames) == "Linear.forward, from Attention.forward (model.py:24)"


def test_the_jobs_own_line_alone_and_named_roots():
    assert line(Frame("__main__.make.<locals>.run", "/job/t.py", 3)) == "make.run (t.py:3)"
    assert line(Frame("[backward]")) == "[backward]"
    assert line(Frame("torch.a.b", "/t.py", 1)) == "a.b (t.py:1)"


def test_stacks_that_read_the_same_are_one_row():
    """GIVEN stacks that differ in what is not shown THEN they are one row with their totals."""
    leaf = Frame("__main__.f", "/job/t.py", 3)
    profile = HeapProfile(
        ProfileKind.LIVE,
        0,
        (
            Sample((leaf, Frame("__main__.a", "/job/t.py", 7)), 1, 30),
            Sample((Frame("__main__.g", "/job/t.py", 5),), 4, 40),
            Sample((leaf, Frame("__main__.b", "/job/t.py", 8)), 2, 20),
        ),
    )
    rows = [StackRow(50, 3, "__main__.f (t.py:3)"), StackRow(40, 4, "__main__.g (t.py:5)")]
    assert shown_rows(profile, 5) == rows
    assert shown_rows(profile, 1) == rows[:1]


def test_the_header_is_the_whole_of_its_rows():
    """Reserved is of the totals of the same reading, and left out without these."""
    profile = HeapProfile(ProfileKind.LIVE, 0, (Sample((Frame("f"),), 1, 1024),))
    same = SimpleNamespace(allocated_bytes=1024, reserved_bytes=4096)
    other = SimpleNamespace(allocated_bytes=2048, reserved_bytes=4096)
    line = device_line(Moment((profile,), {0: same}, 7), profile)
    assert line == "device 0: allocated 1.0 KiB, reserved 4.0 KiB, step 7"
    assert device_line(Moment((profile,), {0: other}, 0), profile) == "device 0: allocated 1.0 KiB"
    assert device_line(Moment((profile,), {}, 0), profile) == "device 0: allocated 1.0 KiB"
