"""`name=value,name=value`, as OpenTelemetry's variables hold it."""

from __future__ import annotations

import pytest

from gpumem_otel.settings.parsers import parse_pairs


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        (" , ,", {}),
        ("a=b", {"a": "b"}),
        (" a = b , c=d=e ", {"a": "b", "c": "d=e"}),
        ("a%20b=c%2Cd", {"a b": "c,d"}),
        ("a=", {"a": ""}),
        ("a=1,a=2", {"a": "2"}),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_pairs(text, found, strict):
    assert parse_pairs(text, strict=strict) == found


@pytest.mark.parametrize("text", ["s3cret", "a=b,s3cret", "=s3cret", " =x"])
def test_what_is_no_pair_is_left_out_or_refused_and_never_repeated(text):
    assert set(parse_pairs(text)) <= {"a"}
    with pytest.raises(ValueError, match=r"^a part is not name=value$"):
        parse_pairs(text, strict=True)
