"""`go tool pprof` reads from our profiles what we wrote."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from support.heap_profiles import SMALL, live, tower

from gpumem_otel.base.profile import Frame, Sample
from gpumem_otel.profiles import pprof

if TYPE_CHECKING:
    from pathlib import Path

STRANGE = live(
    *(
        Sample((Frame(name, name, line), Frame("root", "", 0)), 1, 1000)
        for line, name in enumerate(
            [
                "",
                "a;b",
                "f 12",
                "x\ny",
                "tab\there",
                "\x00",
                "\ud800",
                "<module>",
                "train.py:<lambda>",
                "main<int>(x)",
                "std::vector<int, std::allocator<int> >::push_back(int&&)",
                "_ZN2at6nativeL3addEv",
                "%s %d {{.}}",
                "caf\u00e9 \U0001f600",
                "x" * 5000,
            ]
        )
    )
)


@dataclass(frozen=True)
class Go:
    """`go tool pprof` on one profile."""

    tool: str
    folder: Path

    def __call__(self, profiles, *options, **kwargs) -> str:
        path = self.folder / "profile.pb.gz"
        path.write_bytes(pprof.gzip_bytes(pprof.encode(profiles, **kwargs)))
        env = {**os.environ, "PPROF_TMPDIR": str(self.folder), "PPROF_BINARY_PATH": ""}
        done = subprocess.run(
            [self.tool, "tool", "pprof", *options, str(path)],
            capture_output=True,
            check=False,
            env=env,
            timeout=100,
        )
        # No search for symbols, no complaint about a missing binary.
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout.decode()


@pytest.fixture
def go(tmp_path):
    tool = shutil.which("go")
    if tool is None:
        if os.environ.get("GPUMEM_REQUIRE_SERVERS") == "1":
            pytest.fail("GPUMEM_REQUIRE_SERVERS=1 and there is no `go` on PATH")
        pytest.skip("no `go` on PATH")
    return Go(tool, tmp_path)


def _raw_samples(text):
    """Values of the samples in the output of -raw."""
    block = text[text.index("Samples:") : text.index("Locations")]
    return [
        tuple(int(number) for number in line.split(":")[0].split())
        for line in block.splitlines()
        if re.match(r"\s*\d+ +\d+ +\d+: ", line)
    ]


def test_raw_of_an_ordinary_profile(go):
    raw = go([SMALL], "-raw")
    assert [line.rstrip() for line in raw.splitlines()] == (
        """\
Comment: rank 3 of 8
PeriodType: space bytes
Period: 1
Time: 2023-11-14 22:13:20.123456789 +0000 UTC
Samples:
inuse_objects/count inuse_space/bytes[dflt] snapshots/count
          3       1536          0: 1 2
          1 1099511627776          0: 3 2
                tensor_class:[parameter]
          2 2000000000          0: 4
          0          0          1: 5
Locations
     1: 0x0 M=1 torch.nn.modules.linear.Linear.forward /venv/torch/nn/modules/linear.py:134:0 s=0()
     2: 0x0 M=1 train.main /job/train.py:20:0 s=0()
     3: 0x0 M=1 torch.nn.modules.linear.Linear.forward /venv/torch/nn/modules/linear.py:135:0 s=0()
     4: 0x0 M=1 [backward] :0:0 s=0()
     5: 0x0 M=1 (snapshot) :0:0 s=0()
Mappings
1: 0x0/0x0/0x0 gpu_memory  [FN]
"""
    ).splitlines()


def test_top_is_bytes_by_default_and_does_not_show_the_snapshot_count(go):
    top = go([SMALL], "-top", "-nodefraction=0")
    assert top == go([SMALL], "-top", "-nodefraction=0", "-sample_index=inuse_space")
    assert "Type: inuse_space" in top
    assert "nodes accounting for 1025.86GB, 100% of 1025.86GB total" in top
    assert "torch.nn.modules.linear.Linear.forward" in top
    assert "(snapshot)" not in top


def test_the_snapshot_count_is_one(go):
    top = go([SMALL], "-top", "-sample_index=snapshots")
    assert "nodes accounting for 1, 100% of 1 total" in top
    assert top.splitlines()[-1].split() == ["1", "100%", "100%", "1", "100%", "(snapshot)"]


def test_traces_show_every_stack_leaf_first(go):
    traces = go([SMALL], "-traces", "-unit=B")
    stacks = [
        [line.split() for line in part.strip("-+").split("\n") if line.strip("-+ ")]
        for part in re.split(r"-{5,}\+-{5,}\n", traces)[1:]
    ]
    assert [[line[-1] for line in stack] for stack in stacks if stack] == [
        ["torch.nn.modules.linear.Linear.forward", "train.main"],
        ["parameter", "torch.nn.modules.linear.Linear.forward", "train.main"],
        ["[backward]"],
        ["(snapshot)"],
    ]


def test_a_huge_profile_and_the_same_within_a_limit(go):
    profile = live(*tower(15_000, depth=30))
    total = profile.total_bytes
    whole = _raw_samples(go([profile], "-raw"))
    assert len(whole) == 15_001
    limited = _raw_samples(go([profile], "-raw", max_bytes=300_000))
    assert len(limited) < 15_001
    for samples in (whole, limited):
        assert [sum(column) for column in zip(*samples, strict=True)] == [
            profile.total_objects,
            total,
            1,
        ]
    top = go([profile], "-top", "-unit=B", max_bytes=300_000)
    assert f"% of {total}B total" in top
    assert "[other]" in top


def test_strange_names_arrive_as_they_are(go):
    raw = go([STRANGE], "-raw")
    assert [row[1] for row in _raw_samples(raw)] == [1000] * 15 + [0]
    for sample in STRANGE.samples:
        name = sample.frames[0].name
        shown = {"": "[unnamed]", "\ud800": "?"}.get(name, name)
        assert f" M=1 {shown} " in raw
    for options in (["-top", "-nodefraction=0"], ["-traces"], ["-sample_index=snapshots", "-top"]):
        assert "Type: " in go([STRANGE], *options)


def test_names_that_look_like_templates_are_not_shortened(go):
    names = [sample.frames[0].name for sample in STRANGE.samples if "<" in sample.frames[0].name]
    raw = go([STRANGE], "-raw", "-symbolize=local")
    assert len(names) == 4
    assert all(f" M=1 {name} " in raw for name in names)


@pytest.mark.parametrize("profiles", [[live()], []], ids=["nothing allocated", "no device"])
def test_the_empty_profile(go, profiles):
    assert _raw_samples(go(profiles, "-raw")) == [(0, 0, 1)] * len(profiles)
    assert "Showing nodes accounting for 0, 0% of 0 total" in go(
        profiles, "-top", "-sample_index=inuse_space"
    )
    count = len(profiles)
    assert f"of {count} total" in go(profiles, "-top", "-sample_index=snapshots")
    assert "Type: inuse_space" in go(profiles, "-traces")


def test_two_devices_are_selected_by_label(go):
    profiles = [live(Sample((Frame("a"),), 1, 700)), live(Sample((Frame("b"),), 1, 300), device=1)]
    top = go(profiles, "-top", "-unit=B", "-tagfocus=device=^1$", device_labels={"rank": "0"})
    assert "300B" in top
    assert "700B" not in top
