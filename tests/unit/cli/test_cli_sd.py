"""`sd`: which folders are read, and that an unreadable one does not hide the others."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from gpumem_otel.base.profile import Identity
from gpumem_otel.cli import sd
from gpumem_otel.errors import ServeError
from gpumem_otel.serve.discovery import entry_for, register

UID = os.getuid()
SESSION, BATCH = f"/run/user/{UID}/gpumem-otel", f"/tmp/gpumem-otel-{UID}"


@pytest.mark.parametrize(
    ("option", "environ", "folders"),
    [
        ("/x", {"GPUMEM_OTEL_RUN_DIR": "/y", "XDG_RUNTIME_DIR": "/z"}, ("/x",)),
        (None, {"GPUMEM_OTEL_RUN_DIR": "/y", "XDG_RUNTIME_DIR": "/z"}, ("/y",)),
        (None, {"XDG_RUNTIME_DIR": "/z"}, ("/z/gpumem-otel", SESSION, BATCH)),
        (None, {"XDG_RUNTIME_DIR": f"/run/user/{UID}"}, (SESSION, BATCH)),
        (None, {}, (BATCH, SESSION)),
    ],
)
def test_all_places_are_read_unless_one_was_set(option, environ, folders):
    assert sd.run_dirs(option, environ) == folders


@pytest.fixture
def folders(tmp_path):
    """Two folders, a process in each."""
    for rank, name in ((1, "session"), (0, "batch")):
        entry = entry_for(Identity(service_name="job"), ("127.0.0.1", 9464 + rank))
        register(str(tmp_path / name), replace(entry, rank=rank))
    return str(tmp_path / "session"), str(tmp_path / "batch")


def set_mode(folder, mode):
    Path(folder).chmod(mode)


def targets(*arguments):
    return [target for group in json.loads(sd._file_sd(*arguments)) for target in group["targets"]]


def test_processes_of_all_folders_are_one_list(folders):
    assert targets(folders, {}) == ["127.0.0.1:9464", "127.0.0.1:9465"]


def test_a_folder_that_can_not_be_read_is_said_once_and_the_others_are_listed(folders, capsys):
    set_mode(folders[1], 0o777)
    said = {}
    assert targets(folders, said) == targets(folders, said) == ["127.0.0.1:9465"]
    set_mode(folders[1], 0o700)
    assert len(targets(folders, said)) == 2
    set_mode(folders[1], 0o777)
    targets(folders, said)
    warning = (
        f"gpumem-otel: warning: run directory {folders[1]} is writable by others: chmod 700 it\n"
    )
    assert capsys.readouterr().err == 2 * warning


def test_no_folder_that_can_be_read_is_a_failure(folders):
    for folder in folders:
        set_mode(folder, 0o777)
    with pytest.raises(ServeError, match="session is writable by others"):
        sd._file_sd(folders, {})
