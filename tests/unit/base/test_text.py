"""Tables for people, to the character."""

from __future__ import annotations

import pytest

from gpumem_otel.base.profile import (
    DeviceStats,
    DeviceTotals,
    Frame,
    HeapProfile,
    ProfileKind,
    Sample,
    Sizes,
)
from gpumem_otel.base.text import human_bytes, percent, printable, table
from gpumem_otel.profiles.tables import (
    TopRow,
    stack_lines,
    stats_table,
    top_rows,
    top_table,
    totals_table,
)

F = Frame("m.f", "/x/m.py", 3)
G = Frame("m.g", "/x/m.py", 9)
H = Frame("n.h", "/x/n.py", 1)
PROFILE = HeapProfile(
    ProfileKind.LIVE,
    0,
    (
        Sample((F, G, H), 2, 600),
        Sample((G, G, H), 1, 300),
        Sample((Frame("[backward]"),), 1, 100),
    ),
)


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1075, "1.0 KiB"),
        (1076, "1.1 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (1024**2, "1.0 MiB"),
        (81_352_720_384, "75.8 GiB"),
        (1024**3 - 1, "1.0 GiB"),
        (141 * 10**9, "131.3 GiB"),
        (3 * 1024**4, "3.0 TiB"),
        (2**63 - 1, "8.0 EiB"),
        (5000 * 1024**6, "5000.0 EiB"),
        (-1536, "-1.5 KiB"),
        (-3, "-3 B"),
    ],
)
def test_human_bytes(size, shown):
    assert human_bytes(size) == shown


def test_percent():
    assert percent(1, 3) == "33.3%"
    assert percent(0, 5) == "0.0%"
    assert percent(0, 0) == "-"


def test_a_name_does_not_drive_the_terminal():
    assert printable("a\x1b[31mb\nc\x9b\u202e") == "a\\u001b[31mb\\u000ac\\u009b\\u202e"
    assert printable("normal <lambda> \u00e9") == "normal <lambda> \u00e9"


def test_table_aligns():
    assert table(("n", "name"), [("10", "b"), ("2", "a\tc")], left=frozenset({1})) == (
        " n  name\n10  b\n 2  a\\u0009c\n"
    )
    assert table(("n", "name"), [], left=frozenset({1})) == "n  name\n"


def test_top_rows():
    assert top_rows(PROFILE, "stack", 1) == [TopRow("m.f", 2, 600, 600, (F, G, H))]
    assert top_rows(PROFILE, "function") == [
        TopRow("m.f", 2, 600, 600),
        TopRow("m.g", 1, 300, 900),
        TopRow("[backward]", 1, 100, 100),
        TopRow("n.h", 0, 0, 900),
    ]
    assert top_rows(PROFILE, "file", 2) == [
        TopRow("/x/m.py", 3, 900, 900),
        TopRow("[backward]", 1, 100, 100),
    ]
    assert top_rows(PROFILE, "function", 0) == []
    with pytest.raises(ValueError, match="top by 'nonsense': neither a way to sum up nor a label"):
        top_rows(PROFILE, "nonsense")


def test_top_rows_by_line_and_by_label():
    assert top_rows(PROFILE, "line", 3) == [
        TopRow("/x/m.py:3", 2, 600, 600),
        TopRow("/x/m.py:9", 1, 300, 900),
        TopRow("[backward]", 1, 100, 100),
    ]
    nowhere = HeapProfile(ProfileKind.LIVE, 0, (Sample((Frame("at::a()", "??", 3),), 1, 2),))
    assert top_rows(nowhere, "line") == [TopRow("[no file]", 1, 2, 2)]
    labelled = HeapProfile(
        ProfileKind.PEAK,
        0,
        tuple(
            Sample((frame,), 1, size, (("pool", pool),))
            for frame, size, pool in ((F, 5, "0,1"), (G, 3, "default"), (H, 4, "default"))
        ),
        sizes=Sizes.REQUESTED,
    )
    assert top_rows(labelled, "pool") == [TopRow("default", 2, 7, 7), TopRow("0,1", 1, 5, 5)]
    assert top_table(labelled, "pool", 1).splitlines() == [
        "device 0, peak (requested bytes): 12 B in 3 allocations; shown: 58.3%",
        "self  self%  total  total%  objects  pool",
        " 7 B  58.3%    7 B   58.3%        2  default",
    ]


def test_frames_without_a_file_share_a_row():
    symbols = (Sample((Frame("at::a()", "??"),), 1, 2), Sample((Frame("at::b()"),), 1, 1))
    profile = HeapProfile(ProfileKind.LIVE, 0, symbols)
    assert top_rows(profile, "file") == [TopRow("[no file]", 2, 3, 3)]


def test_top_table_by_function():
    assert top_table(PROFILE, "function", 2) == (
        "device 0, live: 1000 B in 4 allocations; shown: 90.0%\n"
        " self  self%  total  total%  objects  function\n"
        "600 B  60.0%  600 B   60.0%        2  m.f\n"
        "300 B  30.0%  900 B   90.0%        1  m.g\n"
    )


def test_top_table_by_stack():
    assert top_table(PROFILE, "stack", 1) == (
        "device 0, live: 1000 B in 4 allocations; shown: 60.0%\n"
        "\n"
        "600 B (60.0%) in 2 allocations\n"
        "    m.f (m.py:3)\n"
        "    m.g (m.py:9)\n"
        "    n.h (n.py:1)\n"
    )
    empty = HeapProfile(ProfileKind.LIVE, 1, ())
    assert top_table(empty) == "device 1, live: 0 B in 0 allocations; shown: -\n"


def test_stack_lines():
    stack = (Frame("[backward]"), Frame("at::mm()", "??"), Frame("k", "d/k.py"), Frame("a\nb"))
    assert stack_lines(stack) == ["[backward]", "at::mm()", "k (k.py)", "a\\u000ab"]


def test_totals_and_stats_tables():
    totals = DeviceTotals(
        device=0,
        reserved_bytes=4096,
        allocated_bytes=1024,
        active_bytes=2048,
        requested_bytes=1000,
        segments=1,
        blocks=3,
        free_segment_bytes=0,
        split_remainder_bytes=2048,
        pending_free_bytes=1024,
        private_pool_free_bytes=0,
        bytes_without_stack=0,
        history=True,
    )
    assert totals_table([totals]) == (
        "device  reserved  allocated   active  requested  segments  blocks  without stack"
        "  history\n"
        "     0   4.0 KiB    1.0 KiB  2.0 KiB     1000 B         1       3            0 B"
        "      yes\n"
    )
    stats = DeviceStats(
        device=0,
        allocated_bytes=1024,
        requested_bytes=1,
        active_bytes=1,
        reserved_bytes=2048,
        limit_bytes=4096,
        allocations=7,
    )
    assert stats_table([stats]) == (
        "device  allocated  peak  reserved    limit  used  allocations  ooms\n"
        "     0    1.0 KiB   0 B   2.0 KiB  4.0 KiB     -            7     0\n"
    )
