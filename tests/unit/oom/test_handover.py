"""The last exposition of a process, left for its supervisor."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from gpumem_otel.errors import ServeError
from gpumem_otel.oom.handover import FinalMetrics, is_guarded, leave, left_in
from gpumem_otel.settings.config import Secret, ServeConfig

WORDS = FinalMetrics(
    pid=7, host="127.0.0.1", port=9464, scheme="http", guarded=False, ooms=1,
    content_type="text/plain", body="gpumem_ooms_total 1\n",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


def test_what_was_left_last_is_read_back(folder):
    leave(str(folder), replace(WORDS, ooms=0, body="older"))
    leave(str(folder), WORDS)
    leave(str(folder), replace(WORDS, pid=8, port=9465))
    assert left_in(str(folder)) == [WORDS, replace(WORDS, pid=8, port=9465)]
    assert (folder / "7.json").stat().st_mode & 0o777 == 0o600


def test_of_one_port_the_latest_process_counts(folder):
    leave(str(folder), replace(WORDS, pid=9))
    leave(str(folder), WORDS)
    os.utime(folder / "9.json", (1, 1))
    assert left_in(str(folder)) == [WORDS]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"null", b'{"pid": 7}', b"\xff"])
def test_what_is_not_one_of_ours_is_passed_over(folder, content):
    (folder / "5.json").write_bytes(content)
    (folder / "other.txt").write_bytes(content)
    assert left_in(str(folder)) == []


def test_a_folder_that_others_can_write_is_refused(folder):
    folder.chmod(0o777)
    with pytest.raises(ServeError, match=r"hand-over folder .* is writable by others"):
        leave(str(folder), WORDS)
    with pytest.raises(ServeError, match="writable by others"):
        left_in(str(folder))


def test_a_folder_that_is_gone_is_an_error_of_ours(folder):
    with pytest.raises(ServeError, match="No such file"):
        leave(str(folder / "gone"), WORDS)


@pytest.mark.parametrize(
    ("config", "guarded"),
    [
        ({}, False),
        ({"token": Secret("x")}, True),
        ({"token_file": "f"}, True),
        ({"tls_client_ca_file": "f"}, True),
        ({"tls_cert_file": "f"}, False),
    ],
)
def test_who_must_show_something(config, guarded):
    assert is_guarded(ServeConfig(**config)) is guarded
