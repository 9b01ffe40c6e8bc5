"""Raw snapshots as torch writes them, made by hand or by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

STATES = ("active_allocated", "active_pending_free", "inactive")


def frame(name, filename="train.py", line=1):
    return {"name": name, "filename": filename, "line": line}


def block(size, frames=(), *, state="active_allocated", requested=None, address=None):
    raw = {
        "size": size,
        "requested_size": size if requested is None else requested,
        "state": state,
        "frames": list(frames) if isinstance(frames, tuple) else frames,
    }
    if address is not None:
        raw["address"] = address
    return raw


def segment(blocks, *, device=0, address=1 << 20, pool=(0, 0), total=None, **more):
    start = address
    for raw in blocks:
        raw.setdefault("address", start)
        start += raw["size"]
    return {
        "device": device,
        "address": address,
        "total_size": sum(raw["size"] for raw in blocks) if total is None else total,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": pool,
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
        **more,
    }


def alloc(address, size, frames=()):
    return {
        "action": "alloc",
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": 1,
        "frames": list(frames) if isinstance(frames, tuple) else frames,
    }


def snapshot(segments, traces=()):
    return {"segments": list(segments), "device_traces": [list(trace) for trace in traces]}


_NAMES = st.text(min_size=0, max_size=6)
_FILES = st.sampled_from(["a.py", "/x/b.py", "C:\\y\\b.py", "??", "", "k.cpp", "<frozen runpy>"])
_LINES = st.one_of(st.integers(0, 300), st.just(2**64 - 1))


@st.composite
def raw_snapshots(draw):
    """Any snapshot whose segments and blocks fit together, stacks shared as torch shares them."""
    frames = draw(
        st.lists(
            st.fixed_dictionaries({"name": _NAMES, "filename": _FILES, "line": _LINES}),
            min_size=1,
            max_size=6,
        )
    )
    stacks = [[]] + [
        [frames[index] for index in indexes]
        for indexes in draw(
            st.lists(st.lists(st.integers(0, len(frames) - 1), max_size=5), max_size=5)
        )
    ]
    segments = []
    address = 1 << 30
    for _ in range(draw(st.integers(0, 4))):
        blocks = [
            block(
                draw(st.integers(0, 2**40)),
                draw(st.sampled_from(stacks)),
                state=draw(st.sampled_from(STATES)),
                requested=draw(st.integers(0, 2**41)),
            )
            for _ in range(draw(st.integers(0, 6)))
        ]
        made = segment(
            blocks,
            device=draw(st.integers(0, 2)),
            address=address,
            pool=draw(st.sampled_from([(0, 0), (1, 0)])),
            stream=draw(st.integers(0, 3)),
        )
        made["total_size"] += draw(st.sampled_from([0, 512]))
        segments.append(made)
        address += made["total_size"]
    events = st.lists(
        st.builds(
            alloc,
            st.sampled_from([b["address"] for s in segments for b in s["blocks"]] or [0]),
            st.integers(0, 2**40),
            st.sampled_from(stacks),
        ),
        max_size=5,
    )
    return {"segments": segments, "device_traces": draw(st.lists(events, max_size=3))}
