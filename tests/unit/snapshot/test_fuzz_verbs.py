"""Any file, through every verb that reads files: it is read, or refused in one line, never worse.

A few inputs of each of six kinds by default; `make fuzz` tries a hundred thousand in all.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import pickle

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.recordings import make_recording
from test_snapshot_properties import FORMS, JUNK, SIZES, STACKS

from gpumem_otel.cli.main import VERBS, main
from gpumem_otel.errors import SnapshotError
from gpumem_otel.page import html
from gpumem_otel.profiles.of_file import parse_snapshot

SETTINGS = settings(
    max_examples=int(os.environ.get("GPUMEM_FUZZ", "20")), suppress_health_check=list(HealthCheck)
)
RECORDING = gzip.decompress(make_recording("h200-torch2.11-cuda-graph.pickle.gz", windows=1))
LINES = RECORDING.splitlines(keepends=True)
ORIGINALS = [*FORMS, RECORDING, make_recording("h200-torch2.11-cuda-graph.pickle.gz", windows=1)]

KINDS = ["live", "allocated", "peak"]
BY = ["stack", "function", "file", "line", "pool", "compile-context", "annotation"]
ALWAYS = [["stats"], ["stats", "--json"], ["segments"], ["segments", "--json"], ["trace"]]
ALWAYS += [["trace", "--json"]]
OUT = ["-o", "-"]
SOMETIMES = [["top", "--kind", kind, "--by", by] for kind in KINDS for by in BY]
SOMETIMES += [["top", "--json", "--frames", "1", "--kind", kind] for kind in KINDS]
SOMETIMES += [
    ["convert", *OUT, "--kind", kind, "--format", form]
    for kind in KINDS
    for form in ("pprof", "folded", "speedscope", "json")
]
SOMETIMES += [["dump", *OUT], ["dump", *OUT, "--at", "1"], ["stats", "--device", "0"]]
SOMETIMES += [["trace", "--min-size", "1KiB"], ["trace", "--stack", "f"], ["top", "--device", "1"]]
if html.available():
    SOMETIMES += [["flamegraph", *OUT], ["timeline", *OUT], ["flamegraph", *OUT, "--kind", "peak"]]
COMPARED = [["compare", "--kind", kind] for kind in KINDS]
COMPARED += [["compare", "--by", "segment"], ["compare", "--json"]]
SAID = (
    "holds no allocation events",
    "holds a single event",
    "holds no windows",
    "holds no events",
    "single reading",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A function that runs a verb on files of these bytes; its exit code."""
    folder = tmp_path_factory.mktemp("fuzz")

    def one(arguments, *contents):
        paths = []
        for number, data in enumerate(contents):
            path = folder / f"in{number}"
            path.write_bytes(data)
            paths.append(str(path))
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([arguments[0], *paths, *arguments[1:]])
        err.flush()
        said = err.buffer.getvalue().decode()
        assert "this is a bug" not in said, (arguments, said)
        assert "Traceback" not in said
        if code:
            last = said.splitlines()[-1]
            assert last.startswith("gpumem-otel: error: "), (arguments, said)
            assert code == 2 or any(text in last for text in SAID), (arguments, said)
        return code

    return one


def through(run, data, draw):
    """Everything that can be asked of a file, asked."""
    try:
        parse_snapshot(data, "fuzz")
    except SnapshotError:
        assert run(draw(st.sampled_from(ALWAYS + SOMETIMES)), data) == 2
        return False
    for arguments in ALWAYS:
        assert run(arguments, data) in {0, 1}, arguments
    for arguments in draw(st.lists(st.sampled_from(SOMETIMES), min_size=2, max_size=4)):
        run(arguments, data)
    run(draw(st.sampled_from(COMPARED)), data, data)
    return True


ACTIONS = [
    *["alloc", "free_requested", "free_completed"] * 3,
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
    "annotate",
    "brand_new",
]
PLACES = st.sampled_from([0, 512, 1024, 1 << 21, 2**64 - 512])
POOLS = st.sampled_from([(0, 0), (0, 1), (1, 0), (2**40, 1), [3, 0]])
EVENTS = st.fixed_dictionaries(
    {"action": st.sampled_from(ACTIONS)},
    optional={
        "addr": st.none() | PLACES | SIZES,
        "size": st.none() | SIZES,
        "stream": JUNK,
        "time_us": st.none() | st.integers(0, 2**64),
        "device_free": st.none() | SIZES,
        "frames": st.none() | STACKS,
        "compile_context": st.sampled_from(["N/A", "0/0", "\ud800"]) | JUNK,
        "user_metadata": JUNK,
        "pool_id": POOLS | JUNK,
        "x": JUNK,
    },
)
BLOCKS = st.fixed_dictionaries(
    {
        "size": SIZES,
        "state": st.sampled_from(
            ["active_allocated", "active_pending_free", "active_awaiting_free", "inactive", "new"]
        ),
    },
    optional={
        "address": st.none() | PLACES | SIZES,
        "requested_size": st.none() | SIZES,
        "frames": st.none() | STACKS,
        "history": st.lists(
            st.fixed_dictionaries(
                {}, optional={"addr": PLACES, "real_size": SIZES, "frames": STACKS}
            ),
            max_size=2,
        ),
        "x": JUNK,
    },
)
SEGMENTS = st.fixed_dictionaries(
    {"device": st.integers(0, 2), "blocks": st.lists(BLOCKS, max_size=4)},
    optional={
        "address": PLACES | JUNK,
        "total_size": st.none() | SIZES,
        "stream": JUNK,
        "segment_type": st.sampled_from(["small", "large"]) | JUNK,
        "segment_pool_id": st.sampled_from([(0, 0), (0, 1), [1, 0], (2**40, 0)]),
        "is_expandable": st.booleans() | JUNK,
        "frames": st.none() | STACKS,
        "x": JUNK,
    },
)
ANNOTATIONS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.text(max_size=3) | JUNK,
        "stage": st.sampled_from(["START", "END"]) | JUNK,
        "device": st.integers(0, 1) | JUNK,
        "time_us": st.integers(0, 2**64) | JUNK,
    },
)
WELL_FORMED = st.fixed_dictionaries(
    {"segments": st.lists(SEGMENTS, max_size=3)},
    optional={
        "device_traces": st.none() | st.lists(st.lists(EVENTS, max_size=12), max_size=3),
        "allocator_settings": st.dictionaries(st.text(max_size=3), JUNK, max_size=3),
        "external_annotations": st.lists(ANNOTATIONS, max_size=4),
        "x": JUNK,
    },
)


@given(draw=st.data(), which=st.sampled_from(range(len(ORIGINALS))))
@SETTINGS
def test_bytes_changed_and_cut(run, draw, which):
    changed = bytearray(ORIGINALS[which])
    for _ in range(draw.draw(st.integers(1, 4))):
        changed[draw.draw(st.integers(0, len(changed) - 1))] = draw.draw(st.integers(0, 255))
    end = draw.draw(st.integers(0, len(changed)) | st.just(len(changed)))
    through(run, bytes(changed[:end]), draw.draw)


@given(draw=st.data(), data=st.binary(max_size=200), which=st.sampled_from(range(len(ORIGINALS))))
@SETTINGS
def test_bytes_spliced(run, draw, data, which):
    """Pieces of a real file in another order, with noise between."""
    whole = ORIGINALS[which]
    first, second, third = sorted(draw.draw(st.integers(0, len(whole))) for _ in range(3))
    pieces = [whole[:first], whole[second:third], data, whole[first:second], whole[third:]]
    kept = draw.draw(st.lists(st.sampled_from(range(5)), min_size=1, max_size=5, unique=True))
    through(run, b"".join(pieces[number] for number in sorted(kept)), draw.draw)


@given(draw=st.data(), raw=WELL_FORMED, protocol=st.integers(2, 5))
@SETTINGS
def test_what_is_well_formed(run, draw, raw, protocol):
    through(run, pickle.dumps(raw, protocol), draw.draw)


@given(draw=st.data(), raw=WELL_FORMED)
@SETTINGS
def test_one_wrong_value_anywhere(run, draw, raw):
    places = [(raw, key) for key in raw]
    for segment in raw["segments"]:
        places += [(segment, key) for key in segment]
        places += [(block, key) for block in segment["blocks"] for key in block]
        places += [
            (f, key) for block in segment["blocks"] for f in block.get("frames") or () for key in f
        ]
    for trace in raw.get("device_traces") or ():
        places += [(event, key) for event in trace for key in event]
    where, key = draw.draw(st.sampled_from(places))
    where[key] = draw.draw(JUNK)
    through(run, pickle.dumps(raw, 4), draw.draw)


@given(draw=st.data())
@SETTINGS
def test_lines_of_a_recording(run, draw):
    """Lines left out, repeated, moved, and with one wrong value in them."""
    order = draw.draw(st.lists(st.sampled_from(range(len(LINES))), max_size=len(LINES) + 2))
    lines = [json.loads(LINES[number]) for number in ([0, *order] if order[:1] != [0] else order)]
    where = draw.draw(st.sampled_from(lines))
    for _ in range(draw.draw(st.integers(0, 6))):
        keys = list(where) if isinstance(where, dict) else range(len(where))
        if not keys:
            break
        key = draw.draw(st.sampled_from(keys))
        if not isinstance(where[key], dict | list) or draw.draw(st.booleans()):
            where[key] = draw.draw(JUNK | st.integers(-2, 3))
            break
        where = where[key]
    try:
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    except (TypeError, ValueError):  # junk that JSON cannot hold
        return
    through(run, data, draw.draw)


@given(draw=st.data(), first=WELL_FORMED, second=WELL_FORMED)
@SETTINGS
def test_two_files_compared(run, draw, first, second):
    arguments = draw.draw(st.sampled_from(COMPARED))
    run(arguments, pickle.dumps(first, 4), pickle.dumps(second, 4))


def test_the_verbs_are_all_of_those_that_read_files():
    """A verb that is added has to be added here."""
    asked = {arguments[0] for arguments in [*ALWAYS, *SOMETIMES, *COMPARED]}
    others = {
        "demo", "run", "record", "push", "sd", "doctor", "flamegraph", "timeline", "cost", "ctl",
    }  # fmt: skip
    assert {verb.name for verb in VERBS} - others == asked - {"flamegraph", "timeline"}
