"""Bearer tokens."""

from __future__ import annotations

import pytest

from gpumem_otel.errors import ServeError
from gpumem_otel.serve.auth import Tokens
from gpumem_otel.settings.config import Secret

NONE = Secret("")


def test_without_a_token_reading_is_open():
    tokens = Tokens(NONE, "")
    assert not tokens.required
    assert tokens.accept("")


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("Bearer s3cret", True),
        ("bearer   s3cret ", True),
        ("Bearer s3cret2", False),
        ("Bearer s3cre", False),
        ("Bearer ", False),
        ("Basic s3cret", False),
        ("s3cret", False),
        ("", False),
        ("Bearer s3cret\xe9", False),
        ("Bearer s3cret s3cret", False),
    ],
)
def test_a_token_is_compared(header, accepted):
    assert Tokens(Secret("s3cret"), "").accept(header) is accepted


def test_a_token_file_is_read_again_when_it_changes(tmp_path):
    path = tmp_path / "token"
    path.write_text("first\n")
    tokens = Tokens(NONE, str(path))
    assert tokens.accept("Bearer first")

    path.write_text("second token is not one\n")
    assert tokens.accept("Bearer first")

    replacement = tmp_path / "new"
    replacement.write_text("second")
    replacement.rename(path)
    assert tokens.accept("Bearer second")
    assert not tokens.accept("Bearer first")


def test_a_file_that_vanishes_never_opens_the_listener(tmp_path, caplog):
    path = tmp_path / "token"
    path.write_text("first")
    tokens = Tokens(NONE, str(path))
    path.unlink()
    assert not tokens.accept("")
    assert not tokens.accept("Bearer ")
    assert tokens.accept("Bearer first")
    assert [record.message for record in caplog.records] == [
        f"token file {path}: No such file or directory: the last token stays"
    ]


def test_token_and_file_both_open(tmp_path):
    path = tmp_path / "token"
    path.write_text("fromfile")
    tokens = Tokens(Secret("fixed"), str(path))
    assert tokens.accept("Bearer fixed")
    assert tokens.accept("Bearer fromfile")
    assert not tokens.accept("Bearer other")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file or directory"),
        (b"\n", "is empty"),
        (b"two tokens", "does not hold one token"),
        (b"x" * 20_000, "is larger than 16384 bytes"),
    ],
)
def test_a_bad_token_file_is_reported_at_the_start(tmp_path, content, reason):
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ServeError) as caught:
        Tokens(NONE, str(path))
    assert str(caught.value) == f"token file {path}: {reason}"
