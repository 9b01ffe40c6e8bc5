"""Faults of other tools of this kind, one test for each, through the command line.

Each docstring names the report of the fault; the input is ours.
"""

from __future__ import annotations

import gzip
import json
import pickle
import subprocess
import sys

import pytest
from support import pprof_proto
from support import raw_snapshots as raw_form
from support.large_snapshots import make
from support.recordings import DATA

from gpumem_otel.base.text import human_bytes
from gpumem_otel.cli.main import main

LEAF = raw_form.frame("f")
PATH = DATA / "h200-torch2.11-cuda-graph.pickle.gz"
OOM = {"action": "oom", "size": 99, "stream": 0, "device_free": 7, "frames": [LEAF]}


def free(address, size):
    event = {"addr": address, "size": size, "stream": 0, "time_us": 2, "frames": []}
    return [{"action": action, **event} for action in ("free_requested", "free_completed")]


@pytest.fixture
def ask(tmp_path, capsys):
    """A function (raw snapshot or bytes, verb, options...) -> what the verb prints as JSON."""

    def run(raw, *arguments, warnings=None):
        path = tmp_path / "in.pickle"
        path.write_bytes(raw if isinstance(raw, bytes) else pickle.dumps(raw, 4))
        verb, *more = arguments
        if verb == "convert":
            more += ["-o", "-", "--format", "json"]
        else:
            more.append("--json")
        code = main([verb, str(path), *more])
        out, err = capsys.readouterr()
        assert code == 0, err
        if verb == "trace":  # a line for each event
            return [json.loads(line) for line in out.splitlines()]
        found = json.loads(out)
        if warnings is not None:
            warnings += [*found.get("warnings", ()), *err.splitlines()]
        return found

    return run


@pytest.fixture
def convert(tmp_path):
    """A function from a raw snapshot to its pprof as the protobuf library reads it."""

    def run(raw, *more):
        path, out = tmp_path / "in.pickle", tmp_path / "out.pb.gz"
        path.write_bytes(pickle.dumps(raw, 4))
        assert main(["convert", str(path), "-o", str(out), *more]) == 0
        return pprof_proto.parse(gzip.decompress(out.read_bytes()))

    return run


def refused(path, capsys):
    """Every verb that reads files fails with the same line, which is returned."""
    said = set()
    for verb in ("stats", "top", "segments", "trace", "convert"):
        more = ["-o", "/dev/null"] if verb == "convert" else []
        assert main([verb, str(path), *more]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        said.add(err)
    (line,) = said
    return line


def test_an_unknown_key(ask):
    """mosaic PR 5, PR 15: a reader breaks on a new key; here one at every level."""
    raw = pickle.loads(gzip.decompress(PATH.read_bytes()))
    plain = {verb: ask(raw, verb) for verb in ("stats", "top", "segments", "trace", "convert")}
    seen = set()

    def widen(entry):
        if id(entry) not in seen:
            seen.add(id(entry))
            entry["brand_new"] = {"of": ["any", ("shape", 1.5)]}

    widen(raw)
    widen(raw["allocator_settings"])
    for annotation in raw["external_annotations"]:
        widen(annotation)
    entries = [*raw["segments"], *(b for s in raw["segments"] for b in s["blocks"])]
    entries += [event for trace in raw["device_traces"] for event in trace]
    for entry in entries:
        widen(entry)
        for frame in entry.get("frames") or ():
            widen(frame)
    assert len(seen) > 700
    assert {verb: ask(raw, verb) for verb in plain} == plain


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_oom_entry_has_no_address(ask, place):
    """mosaic PR 3: first, in the middle, last."""
    trace = [raw_form.alloc(1 << 20, 512, (LEAF,)), *free(1 << 20, 512)]
    trace.insert((0, 2, 3)[place], OOM)
    raw = raw_form.snapshot([raw_form.segment([raw_form.block(512, state="inactive")])], [trace])
    for verb in ("stats", "top", "segments", "trace", "convert"):
        ask(raw, verb)
    assert [event["action"] for event in ask(raw, "trace")].count("oom") == 1
    assert ask(raw, "convert", "--kind", "peak")["profiles"][0]["total_bytes"] == 512


def test_an_oom_entry_alone(ask):
    """mosaic PR 3: and nothing else in the trace."""
    raw = raw_form.snapshot([raw_form.segment([raw_form.block(512, (LEAF,))])], [[OOM]])
    assert ask(raw, "top")["devices"][0]["total_bytes"] == 512
    assert [event["action"] for event in ask(raw, "trace")] == ["oom"]


@pytest.mark.parametrize("time_us", [2**63, 2**63 - 1, 2**63 // 1000 + 1])
def test_integers_of_nine_bytes(ask, convert, time_us):
    """pytorch#115234: they stop the reader; pprof's integers are signed, its times nanoseconds."""
    frame = raw_form.frame("f", line=2**64 - 1)
    event = raw_form.alloc(2**64 - 512, 512, (frame,))
    event |= {"stream": 2**64 - 1, "time_us": time_us}
    blocks = [raw_form.block(512, (frame,), address=2**64 - 512)]
    raw = raw_form.snapshot([raw_form.segment(blocks, address=2**64 - 512, stream=2**64 - 1)])
    raw["device_traces"] = [[event, OOM]]
    for verb in ("stats", "top", "segments", "trace"):
        ask(raw, verb)
    for kind in ("live", "allocated", "peak"):
        profile = convert(raw, "--kind", kind)
        assert {line.line for location in profile.location for line in location.line} == {0}
        assert sum(sample.value[1] for sample in profile.sample) == 512


@pytest.mark.parametrize("share", [0, 1, 50, 99])
def test_a_dump_that_was_cut_short(tmp_path, capsys, share):
    """torchtitan PR 2991: empty files, and files cut short by a full disk."""
    for data in (gzip.decompress(PATH.read_bytes()), PATH.read_bytes()):
        path = tmp_path / "cut.pickle"
        path.write_bytes(data[: len(data) * share // 100])
        line = refused(path, capsys)
        assert ("empty file" in line) == (share == 0)


def test_a_long_trace_takes_bounded_memory(tmp_path):
    """pytorch PR 176290: the viewer dies of a large file. A tenth of the benchmark's here.

    In a process whose address space ends at 400 MB, for a file of 16 MB.
    """
    path = tmp_path / "large.pickle"
    path.write_bytes(pickle.dumps(make(100_000, 10_000), 4))
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (400 << 20,) * 2)\n"
        "from gpumem_otel.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    for kind in ("live", "allocated", "peak"):
        command = ["convert", str(path), "-o", str(tmp_path / "out"), "--kind", kind]
        done = subprocess.run([sys.executable, "-c", script, *command], capture_output=True)
        assert done.returncode == 0, done.stderr


def test_the_peak_has_what_is_older_than_the_trace(ask):
    """mosaic PR 6: 100 bytes without an event and 20 with one: 120, 100 of them a named root."""
    blocks = [raw_form.block(100), raw_form.block(20, (LEAF,))]
    segment = raw_form.segment(blocks)
    trace = [raw_form.alloc(blocks[1]["address"], 20, (LEAF,)), OOM]
    (profile,) = ask(raw_form.snapshot([segment], [trace]), "convert", "--kind", "peak")["profiles"]
    assert profile["total_bytes"] == 120
    frames = [frame["name"] for frame in profile["frames"]]
    assert {frames[s["stack"][0]]: s["size_bytes"] for s in profile["samples"]} == {
        "[allocated before install]": 100,
        "train.py:f": 20,
    }


def test_a_full_ring_is_a_warning_and_nothing_is_negative(ask):
    """pytorch PR 179276: frees without an allocation look like a late start."""
    trace = [*free(1 << 30, 4096), *free(1 << 31, 512), raw_form.alloc(1 << 20, 8, (LEAF,))]
    raw = raw_form.snapshot([raw_form.segment([raw_form.block(512, (LEAF,), requested=8)])])
    raw["device_traces"] = [trace]
    said = []
    (device,) = ask(raw, "stats", warnings=said)["devices"]
    assert any("frees of memory whose allocation is not in the trace" in line for line in said)
    assert device["allocated_bytes"] == 512
    (peak,) = ask(raw, "convert", "--kind", "peak")["profiles"]
    # before the first free all of it was there
    assert peak["total_bytes"] == 4096 + 512
    assert all(sample["size_bytes"] >= 0 for sample in peak["samples"])


def test_a_dump_without_recording_has_totals_and_a_warning(ask, capsys, tmp_path):
    """Megatron-Bridge PR 3487: an empty view."""
    raw = raw_form.snapshot([raw_form.segment([raw_form.block(512), raw_form.block(1024)])], [[]])
    said = []
    (device,) = ask(raw, "stats", warnings=said)["devices"]
    assert device["allocated_bytes"] == 1536
    assert [line.split(":")[0] for line in said] == ["no history recorded"]
    assert ask(raw, "top")["devices"][0]["total_bytes"] == 1536
    path = tmp_path / "bare.pickle"
    path.write_bytes(pickle.dumps(raw, 4))
    assert main(["convert", str(path), "-o", "-", "--kind", "peak"]) == 1
    assert "holds no allocation events; record history" in capsys.readouterr().err


def test_blocks_without_frames_stay(ask, convert):
    """pytorch PR 124784: they vanish, and the totals with them."""
    blocks = [raw_form.block(512, (LEAF,)), raw_form.block(2048), raw_form.block(1024)]
    raw = raw_form.snapshot([raw_form.segment(blocks)])
    names = {row["name"]: row["self_bytes"] for row in ask(raw, "top")["devices"][0]["rows"]}
    assert names == {"train.py:f": 512, "[allocated before install]": 3072}
    assert sum(sample.value[1] for sample in convert(raw).sample) == 3584


def test_private_pools_keep_their_size(ask):
    """pytorch PR 177289, 180515: one byte active of four that are mapped."""
    blocks = [raw_form.block(1, (LEAF,)), raw_form.block(3, state="inactive")]
    raw = raw_form.snapshot([raw_form.segment(blocks, pool=(0, 1))])
    (device,) = ask(raw, "stats")["devices"]
    assert (device["reserved_bytes"], device["active_bytes"]) == (4, 1)
    (shown,) = ask(raw, "segments")["segments"]
    assert (shown["size_bytes"], shown["allocated_bytes"]) == (4, 1)
    (row,) = ask(raw, "top", "--by", "pool")["devices"][0]["rows"]
    assert (row["name"], row["self_bytes"]) == ("0,1", 1)


def test_units_are_powers_of_1024_in_text_and_bytes_elsewhere(ask, capsys, tmp_path):
    """pytorch#120171: GB read as GiB."""
    raw = raw_form.snapshot([raw_form.segment([raw_form.block(81_352_720_384, (LEAF,))])])
    assert ask(raw, "stats")["devices"][0]["allocated_bytes"] == 81_352_720_384
    assert main(["stats", str(tmp_path / "in.pickle")]) == 0
    assert "75.8 GiB" in capsys.readouterr().out
    assert human_bytes(81_352_720_384) == "75.8 GiB"


@pytest.mark.parametrize(
    "raw",
    [
        raw_form.snapshot([]),
        raw_form.snapshot([raw_form.segment([raw_form.block(512)])]),
        raw_form.snapshot([raw_form.segment([raw_form.block(512, (LEAF,))])]),
    ],
    ids=["nothing", "no stack", "a stack"],
)
def test_every_id_of_a_pprof_resolves(convert, raw):
    """pyroscope#4807, parca#1264, PProf.jl#93: samples dropped for ids that lead nowhere."""
    profile = convert(raw)
    locations = {location.id for location in profile.location}
    functions = {function.id for function in profile.function}
    mappings = {mapping.id for mapping in profile.mapping}
    for known in (locations, functions, mappings):
        assert known == set(range(1, len(known) + 1))
    assert {location.mapping_id for location in profile.location} <= mappings
    lines = [line for location in profile.location for line in location.line]
    assert {line.function_id for line in lines} == functions
    assert bool(profile.sample) == bool(raw["segments"])
    for sample in profile.sample:
        assert sample.location_id
        assert set(sample.location_id) <= locations


def test_names_do_not_corrupt_folded_stacks(tmp_path, capsys):
    """pixie#539, pprof PR 669: names with ';', newlines, digits at the end, or none at all."""
    names = ["a;b", "f 12", "x\ny", "", "std::map<int, f(char)>::{lambda(int)#1}::operator()"]
    frames = [raw_form.frame(name, filename="") for name in names]
    blocks = [raw_form.block(512 << n, (frame,)) for n, frame in enumerate(frames)]
    blocks.append(raw_form.block(1 << 20, tuple(frames)))
    path = tmp_path / "names.pickle"
    path.write_bytes(pickle.dumps(raw_form.snapshot([raw_form.segment(blocks)]), 4))
    assert main(["convert", str(path), "-o", "-", "--format", "folded"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines.pop() == ""
    assert len(lines) == 6
    values = [line.rsplit(" ", 1) for line in lines]
    assert sum(int(value) for _, value in values) == sum(block["size"] for block in blocks)
    assert max(stack.count(";") for stack, _ in values) <= len(names) - 1
    assert not any(stack.rsplit(" ", 1)[-1].isdigit() for stack, _ in values)
