"""The line profiler in processes of their own: the end of a process, forks, coverage, pdb, HTTP."""

from __future__ import annotations

import http.client
import importlib.util
import io
import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.line_memory import Memory
from support.recordings import make_recording

from gpumem_otel.api import line_profiler
from gpumem_otel.base.clock import SystemClock
from gpumem_otel.line_profiling import profiler as capture_lines
from gpumem_otel.recording.reader import load_recording
from gpumem_otel.recording.source import ReplaySource
from gpumem_otel.runtime.agent import Agent
from gpumem_otel.settings.options import resolve

TESTS = Path(__file__).parents[1]

JOB = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from support.line_memory import Memory
memory = Memory()
sys.modules["torch"] = memory.torch()
import gpumem_otel

{decorator}
def work(count):
    kept = memory.alloc(1024 * count)
    memory.alloc(4096).free()
    return kept

for count in (1, 2):
    work(count)
{after}
"""


@pytest.fixture
def run(tmp_path):
    """Run the job in a Python of its own."""

    def start(after="", *, decorator="@gpumem_otel.profile", command=(sys.executable,), **more):
        script = tmp_path / "job.py"
        text = JOB.format(tests=str(TESTS), decorator=decorator, after=textwrap.dedent(after))
        script.write_text(text)
        return subprocess.run(
            [*command, str(script)],
            capture_output=True,
            text=True,
            timeout=100,
            cwd=tmp_path,
            **more,
        )

    return start


def assert_printed(output):
    assert output.count("## __main__.work (job.py:9), 2 calls") == 1
    (line,) = (text for text in output.splitlines() if "memory.alloc(1024 * count)" in text)
    assert line.split()[:8] == ["0", "2", "3.0", "KiB", "+3.0", "KiB", "3.0", "KiB"]


def test_what_ran_is_printed_when_the_process_ends(run):
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert_printed(done.stdout)


def test_an_error_keeps_its_exit_code_and_its_message(run):
    done = run("raise SystemExit(7)")
    assert done.returncode == 7
    assert_printed(done.stdout)
    done = run("raise KeyError('mine')")
    assert done.returncode == 1
    assert done.stderr.endswith("KeyError: 'mine'\n")
    assert_printed(done.stdout)


def test_interrupted_from_the_keyboard_it_is_printed(run):
    done = run("signal.signal(signal.SIGINT, signal.default_int_handler)\n"
               "os.kill(os.getpid(), signal.SIGINT)\nsignal.pause()")  # fmt: skip
    assert done.returncode == -signal.SIGINT
    assert_printed(done.stdout)


def test_a_forked_child_counts_nothing_and_prints_nothing(run):
    done = run("""
        reads = memory.reads
        if os.fork() == 0:
            work(5)
            assert memory.reads == reads
            sys.exit(0)
        assert os.wait()[1] == 0
    """)
    assert done.returncode == 0, done.stderr
    assert_printed(done.stdout)


def test_off_it_prints_nothing(run):
    assert run(decorator="@gpumem_otel.profile(enable=False)").stdout == ""


@pytest.mark.skipif(not importlib.util.find_spec("coverage"), reason="coverage is not installed")
@pytest.mark.parametrize("core", ["ctrace", "pytrace", "sysmon"])
def test_coverage_sees_the_same_lines(run, tmp_path, core):
    if core == "sysmon" and not hasattr(sys, "monitoring"):
        pytest.skip("this Python has no sys.monitoring")
    seen = []
    for decorator in ("", "@gpumem_otel.profile"):
        # both have the line of the decorator
        command = (sys.executable, "-m", "coverage", "run", "--include=job.py")
        done = run(decorator=decorator or "@(lambda f: f)", command=command,
                   env={"COVERAGE_CORE": core, "PATH": ""})  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        subprocess.run(
            [sys.executable, "-m", "coverage", "json", "-q", "-o", "out.json"],
            cwd=tmp_path, check=True, timeout=100,
        )  # fmt: skip
        lines = json.loads((tmp_path / "out.json").read_text())["files"]["job.py"]
        seen.append((lines["executed_lines"], lines["missing_lines"]))
    assert_printed(done.stdout)
    assert seen[0] == seen[1]
    assert {11, 12, 13} <= set(seen[1][0])


def test_a_breakpoint_in_a_profiled_function_stops_there(run):
    commands = ["b 12", "c", "p 'count is', count", "cl 1", "n", "c", "q"]
    options = [part for command in commands for part in ("-c", command)]
    done = run(command=(sys.executable, "-m", "pdb", *options), stdin=subprocess.DEVNULL)
    assert "('count is', 1)" in done.stdout
    assert "memory.alloc(4096).free()" in done.stdout
    assert "## __main__.work (job.py:9)" in done.stdout


def test_the_first_example_of_the_docs_prints_what_they_show(tmp_path):
    """With a substitute for the allocator that rounds in the same way."""
    page = (TESTS.parent / "docs" / "line-profiler.md").read_text()
    code, shown = page.split("```python\n")[1].split("```\n")[0], page.split("\n```\n")[2]
    (tmp_path / "job.py").write_text(code)
    stand_in = f"""
        import runpy, sys, types
        sys.path.insert(0, {str(TESTS)!r})
        from support.line_memory import Memory
        memory = Memory()
        torch = sys.modules["torch"] = memory.torch()
        class OnGpu:
            def __init__(self):
                self.blocks = memory.alloc(100 * 100 * 4), memory.alloc(100 * 4)
            def __del__(self):
                [block.free() for block in self.blocks]
        linear = types.SimpleNamespace(cuda=OnGpu)
        torch.nn = types.SimpleNamespace(Linear=lambda rows, columns: linear)
        runpy.run_path("job.py", run_name="__main__")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(stand_in)],
        capture_output=True, text=True, cwd=tmp_path, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == shown + "\n"


def test_lines_are_served_with_the_metrics(tmp_path, monkeypatch):
    memory = Memory()
    monkeypatch.setitem(sys.modules, "torch", memory.torch())
    monkeypatch.setattr(line_profiler, "_STATE", line_profiler._State())
    monkeypatch.setattr(capture_lines, "_PUBLISHED", [])

    def work():
        memory.alloc(4096)

    snapshot = "h200-torch2.11-train-python-stacks.pickle.gz"
    recording = load_recording(io.BytesIO(make_recording(snapshot)), name="test")
    config = resolve({}, port=0, serve=True, run_dir=str(tmp_path / "run"))
    agent = Agent(config, source=ReplaySource(recording, SystemClock()), environ={"RANK": "2"})
    agent.start()
    try:
        assert agent.wait_listening(10)
        line_profiler.profile(show=False)(work)()
        connection = http.client.HTTPConnection("127.0.0.1", agent.address[1], timeout=10)
        bodies = {}
        for path in ("/metrics/lines", "/metrics"):
            connection.request("GET", path)
            answer = connection.getresponse()
            assert answer.status == 200
            bodies[path] = answer.read().decode()
        connection.close()
    finally:
        agent.stop()
        line_profiler.line_profiler().disable()
    families = {f.name: f for f in text_string_to_metric_families(bodies["/metrics/lines"])}
    rows = families["gpumem_line_allocation_bytes"].samples
    assert {s.labels["file"] for s in rows} == {"test_line_processes.py"}
    assert {s.labels["rank"] for s in rows} == {"2"}
    assert sum(s.value for s in rows) == 4096
    assert "gpumem_line" not in bodies["/metrics"]
