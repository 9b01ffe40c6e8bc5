"""Hostile files in a process of little memory: refused for what they are, not for want of it."""

from __future__ import annotations

import json
import os
import pickle
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support.hostile import FILES, HARMLESS, MARK, deep_values

from gpumem_otel.page import html

MEMORY_BYTES = 200 << 20
CPU_SECONDS = 60  # of a machine that is busy; all that is asked of one process takes ten

VERBS = [
    *(["stats"], ["stats", "--json"], ["segments"], ["trace"], ["trace", "--json"]),
    *(["top", "--kind", kind] for kind in ("live", "allocated", "peak")),
    *(["top", "--by", by] for by in ("function", "line", "pool", "compile-context", "annotation")),
    *(["convert", "-o", "/dev/null", "--kind", k] for k in ("live", "allocated", "peak")),
    *(["convert", "-o", "/dev/null", "--format", f] for f in ("folded", "speedscope", "json")),
    ["dump", "-o", "/dev/null"],
    ["compare"],
]
PAGES = [["flamegraph", "-o", "/dev/null"], ["timeline", "-o", "/dev/null"]]

RUNNER = """
import json, resource, sys
from gpumem_otel.cli.main import main
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]),) * 2)
for name, (verb, *more) in json.loads(sys.stdin.read()):
    code = main([verb, name, *([name] if verb == "compare" else []), *more])
    print("code", code, file=sys.stderr, flush=True)
"""

READER = """
import resource, sys
from pathlib import Path
from gpumem_otel.profiles.of_file import load_snapshot
from gpumem_otel.errors import SnapshotError
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]),) * 2)
for name in sys.argv[3:]:
    try:
        snapshot = load_snapshot(name)
        for device in snapshot.devices():
            snapshot.totals(device), snapshot.live_groups(device), snapshot.event_groups(device)
        print("read", len(snapshot.warnings), flush=True)
    except SnapshotError as error:
        print(error.reason, flush=True)
print(*(name for name in ("torch", "opentelemetry.sdk", "urllib3") if name in sys.modules))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    made = {}
    folder = tmp_path_factory.mktemp("hostile")
    for number, (name, make) in enumerate({**FILES, **HARMLESS}.items()):
        made[name] = folder / f"{number}.pickle"
        made[name].write_bytes(make())
    return made


def test_hostile_files_take_little_memory_and_run_nothing(files):
    done = subprocess.run(
        [sys.executable, "-c", READER, str(MEMORY_BYTES), str(CPU_SECONDS), *files.values()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    *lines, imported = done.stdout.split("\n")[:-1]
    said = dict(zip(files, lines, strict=True))
    assert [name for name in FILES if said[name].startswith("read")] == []
    assert [name for name in files if "memory" in said[name].replace("memory snapshot", "")] == [
        "two million empty dicts"  # "it would take far more memory than its size"
    ]
    assert [name for name in HARMLESS if not said[name].startswith("read")] == []
    assert imported == ""
    assert not Path(MARK).exists()


def run_verbs(pairs):
    """Verbs on files in one process of little memory; their exit codes, and all of stderr."""
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, str(MEMORY_BYTES), str(CPU_SECONDS)],
        input=json.dumps([(str(path), verb) for path, verb in pairs]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "this is a bug" not in done.stderr
    said = done.stderr.splitlines()
    codes = [int(line.removeprefix("code ")) for line in said if line.startswith("code ")]
    assert len(codes) == len(pairs)
    return codes, said


def test_verbs_refuse_hostile_files(files):
    """Whatever is asked: input that cannot be used, and nothing of it was run.

    A file is refused as it is read, which all verbs do alike, so each file meets one of them in
    turn, and dump, which reads in its own way.
    """
    verbs = [verb for verb in VERBS if verb[0] != "dump"]
    pairs = [(files[name], verbs[turn % len(verbs)]) for turn, name in enumerate(FILES)]
    pairs += [(files[name], ["dump", "-o", "/dev/null"]) for name in FILES]
    codes, _ = run_verbs(pairs)
    assert set(codes) == {2}
    assert not Path(MARK).exists()


@pytest.mark.parametrize("name", HARMLESS)
def test_every_verb_reads_what_is_only_odd(files, name):
    verbs = [*VERBS, *PAGES] if html.available() else VERBS
    codes, said = run_verbs([(files[name], verb) for verb in verbs])
    assert set(codes) <= {0, 1}
    told = [line for line in said if line.startswith("gpumem-otel: error: ")]
    assert [line for line in told if "record history" not in line] == []


def test_values_too_deep_to_be_written_are_refused_by_dump_alone(tmp_path):
    path = tmp_path / "deep.pickle"
    path.write_bytes(deep_values())
    codes, said = run_verbs([(path, ["stats"]), (path, ["dump", "-o", str(tmp_path / "out")])])
    assert codes == [0, 2]
    assert f"gpumem-otel: error: {path}: holds values that are nested too deep" in "\n".join(said)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("form", ["json", "folded", "speedscope", "pprof"])
def test_a_long_file_name_is_not_written_again_and_again(tmp_path, form):
    """GIVEN 300 frames of one file whose name has a megabyte WHEN converted THEN it is cut."""
    long = "d/" * 500_000 + "leaf.py"
    frames = [{"name": f"f{n}", "filename": long, "line": n} for n in range(300)]
    block = {"size": 512, "state": "active_allocated", "frames": frames}
    segment = {"device": 0, "total_size": 512, "blocks": [block]}
    path, out = tmp_path / "long.pickle", tmp_path / "out"
    path.write_bytes(pickle.dumps([segment], 4))
    codes, _ = run_verbs([(path, ["convert", "-o", str(out), "--format", form])])
    assert codes == [0]
    assert 0 < out.stat().st_size < 2_000_000


def on_terminal(arguments):
    """Exit code and output of a Python process whose output is a terminal."""
    parent, child = pty.openpty()
    said = []
    with subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=child,
        stderr=child,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    ) as process:
        os.close(child)
        with suppress(OSError):  # how Linux says that nobody holds the other end any more
            while data := os.read(parent, 1 << 16):
                said.append(data)
    os.close(parent)
    return process.returncode, b"".join(said).decode()


def test_words_of_a_file_are_no_markup_on_a_terminal(tmp_path):
    blocks = [{"size": 512, "state": "inactive"}]
    segment = {"device": 0, "total_size": 512, "blocks": blocks, "segment_type": "[/x][red]y"}
    path = tmp_path / "markup.pickle"
    path.write_bytes(pickle.dumps([segment], 4))
    code, said = on_terminal(["-m", "gpumem_otel.cli.main", "stats", str(path)])
    assert code == 0, said
    assert "512 B ([/x][red]y)" in said


def test_the_name_of_a_file_is_no_markup_in_a_progress_bar():
    shown = """
from gpumem_otel.cli.output import _LateBar
bar = _LateBar("reading [/x].pickle")
bar.show()
bar.update(1, 2)
bar.hide()
"""
    code, said = on_terminal(["-c", shown])
    assert code == 0, said
    assert "reading [/x].pickle" in said
