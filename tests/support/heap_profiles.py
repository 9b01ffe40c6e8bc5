"""Heap profiles for the tests of the encoder: made by hand, made up, and any at all."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from gpumem_otel.base.profile import Frame, HeapProfile, ProfileKind, Sample
from gpumem_otel.snapshot.stacks import UNNAMED

__all__ = ["PROFILES", "ROOT", "SAMPLES", "SMALL", "as_written", "live", "tower"]

LEAF = Frame("torch.nn.modules.linear.Linear.forward", "/venv/torch/nn/modules/linear.py", 134)
ROOT = Frame("train.main", "/job/train.py", 20)
SMALL = HeapProfile(
    ProfileKind.LIVE,
    0,
    (
        Sample((LEAF, ROOT), 3, 1536),
        Sample((replace(LEAF, line=135), ROOT), 1, 1 << 40, (("tensor_class", "parameter"),)),
        Sample((Frame("[backward]"),), 2, 2_000_000_000),
    ),
    time_ns=1_700_000_000_123_456_789,
    comments=("rank 3 of 8",),
)


TEXT = st.text(max_size=8) | st.sampled_from(
    [
        "",
        "a;b",
        "f 12",
        "x\ny",
        "\x00",
        "std::map<int, f(char)>::{lambda()#1}",
        "\ud800",
        "caf\u00e9 \U0001f600",
    ]
)
FRAMES = st.builds(Frame, TEXT, TEXT, st.integers(0, 300) | st.integers(-(2**64), 2**64))
LABELS = st.dictionaries(TEXT, TEXT, max_size=3).map(lambda d: tuple(sorted(d.items())))
NUMBERS = st.integers(0, 2**63 - 1) | st.integers(0, 3)
SAMPLES = st.builds(Sample, st.lists(FRAMES, max_size=5).map(tuple), NUMBERS, NUMBERS, LABELS)
PROFILES = st.builds(
    HeapProfile,
    st.just(ProfileKind.PEAK),
    st.integers(0, 3),
    st.lists(SAMPLES, max_size=6).map(tuple),
    NUMBERS,
    NUMBERS,
    st.lists(TEXT, max_size=2).map(tuple),
)


def live(*samples, device=0):
    return HeapProfile(ProfileKind.LIVE, device, samples)


def tower(count, depth=12):
    """Stacks that share their outer frames, each of another size."""
    outer = [Frame(f"job.outer_{level}", "/job/train.py", level + 1) for level in range(depth)]
    return tuple(
        Sample(
            (Frame(f"job.layer_{n % 50}.forward_{n}", f"/job/layer_{n % 50}.py", n), *outer),
            1 + n % 7,
            512 * (1 + n * 7919 % count),
        )
        for n in range(count)
    )


def _text(text):
    return text.encode("utf-8", "replace").decode()


def _frame(frame):
    line = frame.line if 0 <= frame.line < 2**63 else 0
    return Frame(_text(frame.name) or UNNAMED, _text(frame.filename), line)


def as_written(sample, more=()):
    labels = {_text(k): _text(v) for k, v in sorted({**dict(sample.labels), **dict(more)}.items())}
    frames = tuple(_frame(frame) for frame in sample.frames) or (Frame("[no stack]"),)
    kept = tuple((key, value) for key, value in labels.items() if key and value)
    return replace(sample, frames=frames, labels=kept)
