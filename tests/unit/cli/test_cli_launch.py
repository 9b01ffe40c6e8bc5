"""The environment that `run` and `record` give to a job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
import pytest

from gpumem_otel.cli import launch, run
from gpumem_otel.cli.main import main


def test_our_folder_comes_first_and_the_rest_stays():
    hook = launch.site_hook_folder()
    assert (Path(hook) / "sitecustomize.py").is_file()
    assert launch.child_environ({}, {})["PYTHONPATH"] == hook
    environ = launch.child_environ({"PYTHONPATH": f"/a{os.pathsep}/b", "X": "y"}, {})
    assert environ == {"PYTHONPATH": os.pathsep.join([hook, "/a", "/b"]), "X": "y"}


def test_nothing_of_ours_shadows_modules_of_the_job():
    """The job could import any other file of the folder by accident."""
    names = {path.name for path in Path(launch.site_hook_folder()).iterdir()} - {"__pycache__"}
    assert names == {"__init__.py", "sitecustomize.py"}


def test_options_become_variables():
    environ = launch.child_environ(
        {"GPUMEM_OTEL_PORT": "1"},
        {
            "service": "job",
            "interval": 0.5,
            "profiles": None,
            "pyroscope": "http://p:4040",
            "serve": True,
            "port": None,
            "tags": ("a=b", "c=d"),
            "record": "/x",
        },
    )
    del environ["PYTHONPATH"]
    assert environ == {
        "GPUMEM_OTEL_PORT": "1",
        "OTEL_SERVICE_NAME": "job",
        "GPUMEM_OTEL_INTERVAL": "0.5",
        "PYROSCOPE_SERVER_ADDRESS": "http://p:4040",
        "GPUMEM_OTEL_SERVE": "1",
        "GPUMEM_OTEL_TAGS": "a=b,c=d",
        "GPUMEM_OTEL_RECORD": "/x",
    }
    assert launch.child_environ({}, {"serve": False})["GPUMEM_OTEL_SERVE"] == "0"
    assert "GPUMEM_OTEL_TAGS" not in launch.child_environ({}, {"tags": ()})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": -1.0}, "--interval must be between"),
        ({"port": 70_000}, "--port must be between"),
        ({"pyroscope": "nowhere"}, "--pyroscope must be an http"),
        ({"profiles": "live,none"}, "--profiles 'none' is none of"),
        ({"tags": ("nonsense",)}, "--tag must be name=value"),
    ],
)
def test_bad_options_are_refused_before_the_job_starts(options, message):
    environ = launch.child_environ({}, options)
    with pytest.raises(click.UsageError, match=message):
        launch.check_settings({}, environ)


def test_bad_variables_of_the_environment_are_left_to_the_job():
    """The job itself warns of them."""
    base = {"GPUMEM_OTEL_PORT": "nonsense"}
    launch.check_settings(base, launch.child_environ(base, {"interval": 5.0}))


def test_find_command(tmp_path):
    assert launch.find_command(["sh", "-c", "true"], {"PATH": "/bin"}) == "/bin/sh"
    with pytest.raises(launch.CommandNotFound) as caught:
        launch.find_command(["no-such-command"], {"PATH": "/bin"})
    assert caught.value.exit_code == 127
    script = tmp_path / "script"
    script.write_text("")
    with pytest.raises(launch.CommandNotExecutable) as refused:
        launch.find_command([str(script)], {})
    assert refused.value.exit_code == 126


def test_run_gives_the_process_to_the_command(monkeypatch, tmp_path):
    """GIVEN an exec that only records WHEN run is called THEN program, words and variables fit."""
    calls = []

    class Gone(BaseException):
        pass

    def note(program: str, words: tuple[str, ...], environ: dict[str, str]) -> None:
        calls.append((program, words, environ))
        raise Gone

    monkeypatch.setattr(run.os, "execve", note)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Gone):
        main(
            [
                "run",
                "--port",
                "9000",
                "--record",
                "r.gpumem",
                "--",
                sys.executable,
                "-c",
                "1",
                "--x",
            ]
        )
    ((program, words, environ),) = calls
    assert program == sys.executable
    assert words == (sys.executable, "-c", "1", "--x")
    assert environ["GPUMEM_OTEL_PORT"] == "9000"
    assert environ["GPUMEM_OTEL_SERVE"] == "1"
    assert environ["GPUMEM_OTEL_RECORD"] == str(tmp_path / "r.gpumem")
    calls.clear()
    with pytest.raises(Gone):
        main(["run", sys.executable, "train.py", "--interval", "3"])
    assert calls[0][1] == (sys.executable, "train.py", "--interval", "3")
    assert "GPUMEM_OTEL_INTERVAL" not in calls[0][2]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run"], 2, "Missing argument 'COMMAND...'"),
        (["run", "--"], 2, "Missing argument 'COMMAND...'"),
        (
            ["run", "--serve", "--", "no-such-command-here"],
            127,
            "no-such-command-here: command not found",
        ),
        (["run", "--port", "70000", "--", "true"], 2, "--port must be between"),
        (["run", "--nonsense", "--", "true"], 2, "No such option"),
        (["record", "o.gpumem"], 2, "Missing argument 'COMMAND...'"),
        (["record", "o.gpumem", "--", "no-such-command-here"], 127, "command not found"),
        (["record", "no/such/o.gpumem", "--", "true"], 1, "no such directory"),
        (["record", ".", "--", "true"], 1, ".: is a directory"),
        (["run", "--record", "no/such/o.gpumem", "--", "true"], 1, "no such directory"),
        (["run", "--record", ".", "--", "true"], 1, ".: is a directory"),
        (["run", "train.py"], 127, "train.py: command not found; did you mean: python train.py"),
        (["record", "o", "train.py"], 127, "command not found; did you mean: python train.py"),
        (
            ["record", "--", "python", "train.py"],
            2,
            "OUT is missing: gpumem-otel record run.gpumem -- python train.py",
        ),
        (["record", "--", "/usr/bin/python3.11", "train.py"], 2, "OUT is missing"),
        (["sd", "-o", ""], 2, "Invalid value for '-o': the name of the file is empty"),
        (["record", "o", "--interval", "0", "--", "true"], 2, "--interval must be between"),
    ],
)
def test_what_cannot_be_started(capsys, monkeypatch, tmp_path, *, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.startswith("gpumem-otel: error: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
