"""The command line as processes: run, record, sd, doctor, pipes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import pyroscope_query
from support.cli_process import WAIT, clean_environ, cli, only_line
from support.fake_pyroscope import FakePyroscope
from support.recordings import DATA, make_recording

from gpumem_otel.base.profile import Identity
from gpumem_otel.cli.main import main
from gpumem_otel.profiles import pprof
from gpumem_otel.profiles.of_file import load_snapshot
from gpumem_otel.recording import format as record_format
from gpumem_otel.serve import discovery

PYTHON = DATA / "h200-torch2.11-train-python-stacks.pickle.gz"


# run

WHAT_IS_THERE = """
import json, os, sys
lifecycle = sys.modules.get("gpumem_otel.api.lifecycle")
print(json.dumps({
    "armed": lifecycle is not None and lifecycle.current() is not None,
    "heavy": sorted({"torch", "opentelemetry", "click", "rich", "urllib3"} & set(sys.modules)),
    "sitecustomize": getattr(sys.modules.get("sitecustomize"), "__file__", ""),
    "path_has_ours": any("site_hook" in entry for entry in sys.path),
    "theirs": os.environ.get("THEIRS", ""),
    "pid": os.getpid(),
}))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(WHAT_IS_THERE)
    return str(path)


def test_run_arms_the_job_without_importing_anything_heavy(script):
    done = cli("run", "--serve", "--", sys.executable, script)
    assert (done.returncode, done.stderr) == (0, "")
    seen = json.loads(done.stdout)
    assert seen["armed"] is True
    assert seen["heavy"] == []
    assert seen["path_has_ours"] is False


def test_without_run_nothing_is_armed(script):
    done = subprocess.run(
        [sys.executable, script], env=clean_environ(), capture_output=True, check=True
    )
    assert json.loads(done.stdout)["armed"] is False


def test_run_disabled(script):
    done = cli(
        "run", "--serve", "--", sys.executable, script, env=clean_environ(GPUMEM_OTEL_DISABLED="1")
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["armed"] is False


def test_run_chains_the_sitecustomize_that_it_hides(script, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import os\nos.environ['THEIRS'] = __name__\nX = 1\n")
    done = cli(
        "run", "--serve", "--", sys.executable, script, env=clean_environ(PYTHONPATH=str(theirs))
    )
    assert (done.returncode, done.stderr) == (0, "")
    seen = json.loads(done.stdout)
    assert seen["armed"] is True
    assert seen["theirs"] == "sitecustomize"
    assert seen["sitecustomize"] == str(theirs / "sitecustomize.py")


def test_run_arms_although_the_hidden_sitecustomize_fails(script, tmp_path):
    """Python itself reports it, as without us."""
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('theirs')")
    done = cli(
        "run", "--serve", "--", sys.executable, script, env=clean_environ(PYTHONPATH=str(tmp_path))
    )
    assert done.returncode == 0
    assert "RuntimeError: theirs" in done.stderr
    assert json.loads(done.stdout)["armed"] is True


def test_run_in_a_python_without_us_says_so_and_goes_on(script, tmp_path):
    (tmp_path / "gpumem_otel.py").write_text("raise ImportError('not for this Python')")
    done = cli(
        "run", "--serve", "--", sys.executable, script, env=clean_environ(PYTHONPATH=str(tmp_path))
    )
    assert done.returncode == 0
    assert done.stderr.startswith("gpumem-otel: ")
    assert done.stderr.count("\n") == 1
    assert json.loads(done.stdout)["armed"] is False


def test_run_reaches_children_of_the_command(script):
    done = cli("run", "--", "sh", "-c", f"'{sys.executable}' '{script}'; exit 3")
    assert done.returncode == 3
    assert json.loads(done.stdout)["armed"] is True


def test_run_is_the_process_of_the_command(script):
    """The pid is the same: signals and exit codes are the job's own."""
    command = [sys.executable, "-m", "gpumem_otel.cli.main", "run", "--", sys.executable, script]
    with subprocess.Popen(command, env=clean_environ(), stdout=subprocess.PIPE) as process:
        out, _ = process.communicate(timeout=WAIT)
    assert json.loads(out)["pid"] == process.pid


@pytest.mark.parametrize(("code", "returned"), [("raise SystemExit(7)", 7), ("1/0", 1)])
def test_run_returns_the_exit_code(code, returned):
    assert cli("run", "--", sys.executable, "-c", code).returncode == returned


def test_run_dies_of_the_signal():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert cli("run", "--", sys.executable, "-c", code).returncode == -signal.SIGKILL


def test_run_without_a_destination_says_so(script):
    done = cli("run", "--", sys.executable, script)
    assert json.loads(done.stdout)["armed"] is True
    assert done.stderr.startswith("gpumem-otel: warning: nothing is exported: give --serve")
    assert done.stderr.count("\n") == 1


def test_run_that_takes_commands_goes_somewhere(script, tmp_path):
    where = {"GPUMEM_OTEL_CONTROL": "1", "GPUMEM_OTEL_RUN_DIR": str(tmp_path / "run")}
    done = cli("run", "--", sys.executable, script, env=clean_environ(**where))
    assert json.loads(done.stdout)["armed"] is True
    assert done.stderr == ""


def test_run_command_not_found():
    done = cli("run", "--serve", "--", "no-such-command-here")
    assert done.returncode == 127
    assert only_line(done.stderr) == "gpumem-otel: error: no-such-command-here: command not found\n"


def test_run_script_without_its_interpreter(tmp_path):
    path = tmp_path / "job"
    path.write_text("#!/no/such/python\n")
    path.chmod(0o755)
    done = cli("run", "--serve", "--", str(path))
    assert done.returncode == 127
    only_line(done.stderr)


# record

RECORDER = """
import os, sys
with open(os.environ["GPUMEM_OTEL_RECORD"], "wb") as file:
    file.write(open(sys.argv[1], "rb").read())
print(os.environ["GPUMEM_OTEL_INTERVAL"], os.environ["GPUMEM_OTEL_MAX_STALL_RATIO"])
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "made"
    path.write_bytes(make_recording(PYTHON.name, PYTHON.name))
    return str(path)


@pytest.mark.parametrize("code", [0, 5])
def test_record_reports_and_returns_the_exit_code(tmp_path, recorded, code):
    """GIVEN a job that leaves a recording WHEN it ends THEN its readings and size are reported."""
    done = cli(
        "record", "out.gpumem", "--", sys.executable, "-c", RECORDER, recorded, str(code),
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == code
    assert done.stdout == "1 0.02\n"
    assert f"{tmp_path / 'out.gpumem'}: 2 readings, " in done.stderr


def test_record_without_a_gpu_says_that_nothing_was_recorded(tmp_path):
    done = cli("record", "out.gpumem", "--", sys.executable, "-c", "print('ran')", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "ran\n")
    assert "nothing was recorded" in only_line(done.stderr)


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(9)", "open('o.gpumem', 'w').close()"])
def test_record_of_nothing_keeps_the_older_recording(tmp_path, recorded, end):
    shutil.copy(recorded, tmp_path / "o.gpumem")
    code = f"import os; assert not os.path.exists('o.gpumem'); {end}"
    done = cli("record", "o.gpumem", "--", sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == (9 if "9" in end else 1)
    *damaged, kept, last = done.stderr.splitlines()
    assert kept == "gpumem-otel: kept older recordings: o.gpumem"
    assert "nothing was recorded" in last
    assert len(damaged) == ("open" in end)
    assert (tmp_path / "o.gpumem").read_bytes() == Path(recorded).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"made", "o.gpumem"}


@pytest.mark.parametrize("verb", [["record", "o"], ["run", "--record", "o"]])
def test_a_file_that_is_no_recording_is_never_recorded_to(tmp_path, verb):
    (tmp_path / "o").write_bytes(b"older")
    done = cli(*verb, "--", sys.executable, "-c", "print('ran')", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "o exists" in only_line(done.stderr)
    assert (tmp_path / "o").read_bytes() == b"older"


def test_a_line_in_a_log_names_us(tmp_path):
    """GIVEN a job without logging THEN our warning names us, else its logger does."""
    code = "{}import gpumem_otel; gpumem_otel.watch(3); gpumem_otel.watch(4)"
    for setup, line in (
        ("", "gpumem_otel: watch: no weak reference to int objects\n"),
        (
            "import logging; logging.basicConfig(); ",
            "WARNING:gpumem_otel:watch: no weak reference to int objects\n",
        ),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code.format(setup)], env=clean_environ(), cwd=tmp_path,
            capture_output=True, text=True, timeout=WAIT, check=True,
        )  # fmt: skip
        assert done.stderr == line


def test_record_of_a_failed_job_keeps_its_exit_code(tmp_path):
    done = cli("record", "o", "--", sys.executable, "-c", "raise SystemExit(9)", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (9, "gpumem-otel: nothing was recorded\n")


def test_record_finds_the_files_of_ranks(tmp_path, recorded):
    code = """
import os, shutil, sys
stem = os.environ["GPUMEM_OTEL_RECORD"].removesuffix(".gpumem")
for rank in (0, 1):
    shutil.copy(sys.argv[1], f"{stem}-rank{rank}.gpumem")
"""
    done = cli("record", "o.gpumem", "--", sys.executable, "-c", code, recorded, cwd=tmp_path)
    assert done.returncode == 0
    assert [line.split(": ")[1] for line in done.stderr.splitlines()] == [
        str(tmp_path / "o-rank0.gpumem"),
        str(tmp_path / "o-rank1.gpumem"),
    ]


def test_record_may_be_repeated(tmp_path, recorded):
    """GIVEN what an earlier run left WHEN it is recorded again THEN the new files are listed."""
    for name in ("o.gpumem", "o-rank7.gpumem"):
        shutil.copy(recorded, tmp_path / name)
    (tmp_path / "o-rank8.gpumem").write_bytes(b"notes")
    code = """
import os, shutil, sys
out = os.environ["GPUMEM_OTEL_RECORD"]
assert not os.path.exists(out)
for path in (out, out.replace("o.gpumem", "o-pid77.gpumem")):
    shutil.copy(sys.argv[1], path)
"""
    done = cli("record", "o.gpumem", "--", sys.executable, "-c", code, recorded, cwd=tmp_path)
    assert done.returncode == 0
    removed, *listed = done.stderr.splitlines()
    assert removed == "gpumem-otel: removed older recordings: o.gpumem, o-rank7.gpumem"
    assert [line.split(": ")[1] for line in listed] == [
        str(tmp_path / "o-pid77.gpumem"),
        str(tmp_path / "o.gpumem"),
    ]
    assert (tmp_path / "o-rank8.gpumem").read_bytes() == b"notes"


def test_record_keeps_the_exit_code_next_to_unreadable_entries(tmp_path, recorded):
    """GIVEN entries that cannot be read, before and after, THEN the job runs and is reported."""
    loop = tmp_path / "o-rank3.gpumem"
    loop.symlink_to(loop)
    code = "import os; os.symlink('o-rank4.gpumem', 'o-rank4.gpumem'); " + RECORDER
    done = cli("record", "o.gpumem", "--", sys.executable, "-c", code, recorded, "6", cwd=tmp_path)
    assert done.returncode == 6
    assert f"{tmp_path}/o.gpumem: 2 readings, " in done.stderr
    assert done.stderr.count("\n") == 1


def test_record_keeps_the_exit_code_when_stderr_is_closed(tmp_path, recorded):
    job = [sys.executable, "-c", RECORDER, recorded, "6"]
    command = [sys.executable, "-m", "gpumem_otel.cli.main", "record", "o", "--", *job]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            command, env=clean_environ(), cwd=tmp_path, stderr=writing, timeout=WAIT, check=False,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert done.returncode == 6


def test_record_says_when_a_recording_reached_its_limit(tmp_path, monkeypatch):
    blocks = sum(len(segment["blocks"]) for segment in load_snapshot(PYTHON).raw_segments())
    monkeypatch.setattr(record_format, "MAX_BLOCKS", 2 * blocks)
    (tmp_path / "full").write_bytes(make_recording(*[PYTHON.name] * 4))
    monkeypatch.undo()
    done = cli(
        "record", "o", "--", sys.executable, "-c", RECORDER, str(tmp_path / "full"), "0",
        cwd=tmp_path,
    )  # fmt: skip
    report, warning = done.stderr.splitlines()
    assert report.startswith(f"gpumem-otel: {tmp_path}/o: 2 readings, ")
    assert warning == (
        f"gpumem-otel: warning: {tmp_path}/o: the recording stopped at its limit after 1 s"
    )


def test_record_passes_signals_on(tmp_path):
    """SIGTERM to us ends the job, and we report its exit code as shells do."""
    code = "import signal, sys; print('up', flush=True); signal.pause()"
    command = [
        sys.executable, "-m", "gpumem_otel.cli.main",
        "record", "o", "--", sys.executable, "-c", code,
    ]  # fmt: skip
    with subprocess.Popen(
        command, env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    ) as process:
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.fixture
def server():
    with FakePyroscope() as fake:
        yield fake


# sd


def test_sd_lists_living_processes(capsys, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    assert main(["sd", "--run-dir", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out) == []
    entry = discovery.entry_for(Identity(service_name="job", rank=3), ("127.0.0.1", 9467))
    file = discovery.register(str(folder), entry)
    out = tmp_path / "targets.json"
    monkeypatch.setenv("GPUMEM_OTEL_RUN_DIR", str(folder))
    assert main(["sd", "-o", str(out)]) == 0
    (group,) = json.loads(out.read_text())
    assert group["targets"] == ["127.0.0.1:9467"]
    assert group["labels"]["__meta_gpumem_rank"] == "3"
    file.remove()
    assert main(["sd", "-o", str(out)]) == 0
    assert json.loads(out.read_text()) == []


def test_sd_watch_outlives_a_failure(capsys, tmp_path, monkeypatch):
    """GIVEN a folder that others may write for a while WHEN watched THEN a warning says so."""
    folder, out = tmp_path / "run", tmp_path / "targets.json"
    folder.mkdir(mode=0o700)
    seen = []

    def broken():
        out.write_text("before")
        folder.chmod(0o777)

    def as_broken():
        seen.append(out.read_text())

    def mended():
        folder.chmod(0o700)

    turns = iter([broken, as_broken, mended])

    def sleep(seconds):
        assert seconds == 15.0
        turn = next(turns, None)
        if turn is None:
            raise KeyboardInterrupt
        turn()

    monkeypatch.setattr(time, "sleep", sleep)
    options = ["--run-dir", str(folder), "-o", str(out), "--watch", "15"]
    assert main(["sd", *options]) == 130
    assert (seen, out.read_text()) == (["before"], "[]\n")
    assert capsys.readouterr().err == (
        f"gpumem-otel: warning: run directory {folder} is writable by others: chmod 700 it\n"
    )


def test_sd_of_an_unsafe_folder_fails(capsys, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(0o777)
    assert main(["sd", "--run-dir", str(folder)]) == 1
    assert "writable by others" in only_line(capsys.readouterr().err)


def test_sd_watch_needs_a_file(capsys):
    assert main(["sd", "--watch", "5"]) == 2
    assert "-o FILE" in only_line(capsys.readouterr().err)


# doctor


def test_doctor_as_a_process(server, tmp_path):
    environ = clean_environ(
        PYROSCOPE_SERVER_ADDRESS=server.url, GPUMEM_OTEL_RUN_DIR=str(tmp_path / "run")
    )
    done = cli("doctor", "--json", env=environ)
    form = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, ""), form
    states = {check["name"]: check["status"] for check in form["checks"]}
    assert states["python"] == states["gpumem-otel"] == states["pyroscope"] == "ok"
    assert pyroscope_query.total(server.url, "unknown_service:python") == 0
    server.authorization = "Bearer other"
    done = cli("doctor", "--json", env=environ)
    assert done.returncode == 1
    (check,) = [c for c in json.loads(done.stdout)["checks"] if c["name"] == "pyroscope"]
    assert check["status"] == "problem"
    assert "401" in check["detail"]


# pipes and interrupts


def test_closed_pipe_is_silent():
    command = f"'{sys.executable}' -m gpumem_otel.cli.main top -n 1000 --json '{PYTHON}' | head -1"
    done = subprocess.run(
        ["bash", "-c", command], env=clean_environ(), capture_output=True, text=True, timeout=WAIT
    )
    assert (done.stdout, done.stderr) == ("{\n", "")


@pytest.mark.parametrize("verb", ["top", "segments", "trace", "compare"])
def test_a_closed_pipe_has_its_own_exit_code(verb):
    files = f"'{PYTHON}' '{PYTHON}'" if verb == "compare" else f"'{PYTHON}'"
    command = (
        f"'{sys.executable}' -m gpumem_otel.cli.main {verb} {files} | true; echo ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(
        ["bash", "-c", command], env=clean_environ(), capture_output=True, text=True, timeout=WAIT
    )
    assert done.stdout == "141\n"
    assert not [line for line in done.stderr.splitlines() if ": warning: " not in line]


def test_stdin_and_stdout_in_a_pipeline():
    with PYTHON.open("rb") as file:
        done = cli("convert", "-", "-o", "-", stdin=file, text=False)
    assert done.returncode == 0
    assert done.stderr.startswith(b"gpumem-otel: warning: <stdin>: device 0: 576 frees of memory")
    assert done.stderr.count(b"\n") == 1
    assert pprof.decode(done.stdout).total("inuse_space") == 121_323_520


def test_full_device_is_one_line():
    done = cli("convert", str(PYTHON), "-o", "/dev/full")
    assert done.returncode == 1
    assert "No space left on device" in only_line(done.stderr)
    with Path("/dev/full").open("w") as full:
        done = cli("stats", "--json", str(PYTHON), stdout=full, stderr=subprocess.PIPE,
                   capture_output=False)  # fmt: skip
    assert done.returncode == 1
    assert "No space left on device" in only_line(done.stderr)


@pytest.mark.parametrize("options", [(), ("--supervise",)])
def test_a_job_ignores_no_signal_that_it_did_not_ignore_without_us(options):
    """Python ignores SIGPIPE: a pipeline of the job's shell would end with another code."""
    ask = ("sh", "-c", "grep SigIgn /proc/self/status")
    plain = subprocess.run(ask, capture_output=True, check=True, text=True)
    done = cli("run", "--serve", *options, "--", *ask)
    glibcs_own = 0b11 << 31  # 32 and 33, which posix_spawn leaves ignored and no program can send
    found, wanted = (int(text.split()[1], 16) & ~glibcs_own for text in (done.stdout, plain.stdout))
    assert found == wanted
