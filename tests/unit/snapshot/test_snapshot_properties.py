"""Whatever the bytes: a snapshot whose totals are closed, or the one error."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_snapshot_files import check_identities

from gpumem_otel.errors import SnapshotError
from gpumem_otel.profiles.of_file import parse_snapshot

DATA = Path(__file__).parents[2] / "data"
REAL = gzip.decompress((DATA / "h200-torch2.11-cuda-graph.pickle.gz").read_bytes())
SMALL = {**pickle.loads(REAL), "device_traces": [pickle.loads(REAL)["device_traces"][0][:20]]}
FORMS = [
    pickle.dumps(SMALL, 2),
    pickle.dumps(SMALL, 4),
    json.dumps(SMALL).encode(),
    gzip.compress(pickle.dumps(SMALL, 4), mtime=0),
]
RELAXED = settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])


def read(data: bytes):
    """Everything that can be asked of a file, asked."""
    try:
        snapshot = parse_snapshot(data, "fuzz")
    except SnapshotError:
        return None
    check_identities(snapshot)
    for segment in snapshot.segments():
        assert segment.size_bytes >= sum(block.size_bytes for block in segment.blocks) >= 0
    assert all(isinstance(warning, str) for warning in snapshot.warnings)
    assert len(snapshot.annotations) >= 0
    repr(dict(snapshot.settings))
    return snapshot


@given(data=st.binary(max_size=300), before=st.sampled_from([b"", b"\x80\x04", b"[", b"\x1f\x8b"]))
@RELAXED
def test_random_bytes(data, before):
    read(before + data)


@given(data=st.data(), form=st.sampled_from(range(len(FORMS))))
@RELAXED
def test_flipped_bytes_and_cuts(data, form):
    changed = bytearray(FORMS[form])
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    read(bytes(changed)[: data.draw(st.integers(0, len(changed)) | st.just(len(changed)))])


@given(data=st.data())
@RELAXED
def test_spliced_pickles(data):
    """Pieces of a real pickle in another order: valid opcodes at the wrong place."""
    whole = FORMS[1]
    cuts = sorted(data.draw(st.lists(st.integers(2, len(whole) - 1), min_size=3, max_size=3)))
    first, second, third = cuts
    read(whole[:first] + whole[second:third] + whole[first:second] + whole[third:])


@given(data=st.binary(max_size=200), form=st.sampled_from([0, 2]))
@RELAXED
def test_damage_inside_gzip(data, form):
    read(gzip.compress(data + FORMS[form]))
    read(gzip.compress(FORMS[form][: len(data)] + data))


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["active_allocated", "inactive", "alloc", "free_requested", 512, 2**64 - 1]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=5,
)
SIZES = st.integers(0, 2**40)
FRAMES = st.fixed_dictionaries(
    {}, optional={"name": st.text(max_size=4) | JUNK, "filename": JUNK, "line": JUNK, "x": JUNK}
)
STACKS = st.lists(FRAMES, max_size=3)
BLOCKS = st.fixed_dictionaries(
    {
        "size": SIZES,
        "state": st.sampled_from(
            ["active_allocated", "active_pending_free", "active_awaiting_free", "inactive", "new"]
        ),
    },
    optional={
        "address": st.none() | SIZES,
        "requested_size": st.none() | SIZES,
        "frames": st.none() | STACKS,
        "history": st.lists(
            st.fixed_dictionaries({}, optional={"real_size": SIZES, "frames": STACKS}), max_size=2
        ),
        "x": JUNK,
    },
)
SEGMENTS = st.fixed_dictionaries(
    {"device": st.integers(0, 3), "blocks": st.lists(BLOCKS, max_size=4)},
    optional={
        "address": JUNK,
        "total_size": st.none() | SIZES,
        "stream": JUNK,
        "segment_type": JUNK,
        "segment_pool_id": st.sampled_from([(0, 0), (0, 1), [1, 0]]),
        "is_expandable": JUNK,
        "x": JUNK,
    },
)
EVENTS = st.fixed_dictionaries(
    {},
    optional={
        "action": st.sampled_from(["alloc", "free_requested", "free_completed", "oom", "snapshot"]),
        "addr": st.none() | SIZES,
        "size": st.none() | SIZES,
        "time_us": st.none() | SIZES,
        "frames": st.none() | STACKS,
        "user_metadata": JUNK,
        "pool_id": JUNK,
    },
)
WELL_FORMED = st.fixed_dictionaries(
    {"segments": st.lists(SEGMENTS, max_size=4)},
    optional={
        "device_traces": st.none() | st.lists(st.lists(EVENTS, max_size=5), max_size=3),
        "allocator_settings": st.dictionaries(st.text(max_size=3), JUNK, max_size=3),
        "external_annotations": st.lists(
            st.dictionaries(st.sampled_from(["name", "stage", "device", "time_us"]), JUNK),
            max_size=2,
        ),
        "x": JUNK,
    },
)


@given(raw=WELL_FORMED, protocol=st.integers(2, 5))
@RELAXED
def test_what_is_well_formed_is_read_and_adds_up(raw, protocol):
    snapshot = read(pickle.dumps(raw, protocol))
    if snapshot is not None:  # numbers of more than 72 bits do not occur, all else reads
        sizes = [b["size"] for s in raw["segments"] for b in s["blocks"]]
        reserved = sum(snapshot.totals(device).reserved_bytes for device in snapshot.devices())
        assert reserved >= sum(sizes)
    assert snapshot is not None


@given(raw=WELL_FORMED, data=st.data())
@RELAXED
def test_one_wrong_value_anywhere_is_refused_or_harmless(raw, data):
    """Junk in the place of any value, at any level."""
    places = [(raw, key) for key in raw]
    for segment in raw["segments"]:
        places += [(segment, key) for key in segment]
        places += [(block, key) for block in segment["blocks"] for key in block]
    for trace in raw.get("device_traces") or ():
        places += [(event, key) for event in trace for key in event]
    where, key = data.draw(st.sampled_from(places))
    where[key] = data.draw(JUNK)
    read(pickle.dumps(raw, 4))


@given(raw=JUNK, as_json=st.booleans())
@RELAXED
def test_junk_is_refused(raw, as_json):
    try:
        data = json.dumps(raw).encode() if as_json else pickle.dumps(raw, 4)
    except (TypeError, ValueError):
        return
    snapshot = read(data)
    assert snapshot is None or snapshot.devices() == ()
