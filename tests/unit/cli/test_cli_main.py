"""The table of verbs, exit codes, and what verbs share."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import click
import pytest

from gpumem_otel import _version
from gpumem_otel.cli import main as cli_main
from gpumem_otel.cli import output
from gpumem_otel.cli.main import VERBS, main
from gpumem_otel.errors import CaptureError, ConfigError, PushError, SnapshotError


def test_every_verb_has_its_file_and_help(capsys):
    for verb in VERBS:
        command = import_module(f"gpumem_otel.cli.{verb.module}").command
        assert isinstance(command, click.Command)
        assert command.name == verb.name
        assert main([verb.name, "--help"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert "Examples:" in out
        assert f"gpumem-otel {verb.name}" in out


def test_help_lists_every_verb_without_importing_one(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for verb in VERBS:
        assert verb.help in out
    script = """
import sys
from gpumem_otel.cli.main import main
assert main(["--help"]) == 0
heavy = {"rich", "torch", "urllib3", "starlette", "uvicorn", "asyncio", "ssl", "opentelemetry",
         "prometheus_client", "gpumem_otel.snapshot.snapshot", "gpumem_otel.cli.demo.command"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SD_BLOCK = """\
  In prometheus.yml:
    scrape_configs:
      - job_name: gpumem
        file_sd_configs: [{files: [/etc/prometheus/targets/gpumem.json]}]
"""
RECORD_LINE = (
    "gpumem-otel record run.gpumem --interval 0.5 -- python train.py && gpumem-otel top run"
)


@pytest.mark.parametrize(("verb", "block"), [("sd", SD_BLOCK), ("record", RECORD_LINE)])
def test_examples_are_printed_as_they_can_be_pasted(capsys, verb, block):
    assert main([verb, "--help"]) == 0
    assert block in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gpumem-otel {_version.__version__}\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (SnapshotError("a.pickle", "cut off"), 2, "a.pickle: cut off"),
        (ConfigError("option 'x' must be y"), 2, "option 'x' must be y"),
        (CaptureError("two\nlines"), 1, "two lines"),
        (PushError("503 down", reason="unavailable"), 1, "503 down"),
        (output.CommandFailed("no"), 1, "no"),
        (PermissionError(13, "Permission denied", "f"), 1, "f: Permission denied"),
        (OSError(5, "Input/output error"), 1, "Input/output error"),
        (RuntimeError("oh"), 1, "unexpected RuntimeError: oh; this is a bug in gpumem-otel"),
        (
            RecursionError("deep"),
            1,
            "unexpected RecursionError: deep; this is a bug in gpumem-otel",
        ),
    ],
)
def test_errors_are_one_line_and_a_code(capsys, monkeypatch, error, code, line):
    def fail(_context: click.Context) -> None:
        raise error

    monkeypatch.setattr(cli_main.cli, "invoke", fail)
    assert main(["stats", "x"]) == code
    assert capsys.readouterr() == ("", f"gpumem-otel: error: {line}\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_interrupt_is_silent(capsys, monkeypatch, error):
    def fail(_context: click.Context) -> None:
        raise error

    monkeypatch.setattr(cli_main.cli, "invoke", fail)
    assert main(["stats", "x"]) == 130
    assert capsys.readouterr() == ("", "")


def test_write_output_is_whole_or_not_at_all(tmp_path, monkeypatch):
    """GIVEN a disk that is full WHEN a file is written THEN the old one is unchanged."""
    target = tmp_path / "out"
    target.write_bytes(b"old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output.os, "fsync", full)
    with pytest.raises(output.CommandFailed, match="No space left on device"):
        output.write_output(str(target), b"new")
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_no_bar_without_a_terminal(capsys):
    with output.progress("working") as report:
        report(1, 2)
    assert capsys.readouterr() == ("", "")


def test_bar_shows_on_a_terminal_once_work_is_long(capsys, monkeypatch):
    """The timer's body, called by hand: no test waits a second."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    bar = output._LateBar("adding up")
    bar.update(1, 4)
    bar.show()
    bar.update(2, 4)
    bar.hide()
    assert "adding up" in capsys.readouterr().err
    with output.progress("quick"):
        pass
    assert capsys.readouterr().err == ""
