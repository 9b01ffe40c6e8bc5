"""Checksums: each byte and its place count, and a changed one is found."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from support.offload_parts import PIECE, SIZES, candidates_of, tensor  # noqa: E402

from gpumem_otel.errors import YieldFailedError  # noqa: E402
from gpumem_otel.yielding.copy.checksums import checksums  # noqa: E402

pytestmark = pytest.mark.torch


def test_a_changed_bit_is_found_and_named(make):
    parts = make()
    one, other = tensor(PIECE), tensor(PIECE + 5)
    parts.out(candidates_of([one]) + candidates_of([other], tensor_class="kv_cache"), verify=True)
    parts.back()
    other[PIECE + 4] ^= 1
    with pytest.raises(YieldFailedError, match="1 of kv_cache") as failed:
        parts.offload.verify()
    assert "parameter" not in str(failed.value)


def test_checksums_see_every_byte_and_its_place():
    (base,) = checksums(torch, [tensor(1003)])
    for at in (0, 7, 8, 500, 999, 1000, 1002):
        changed = tensor(1003)
        changed[at] += 1
        assert checksums(torch, [changed]) != [base]
    words = tensor(1000).view(torch.int64)
    swapped = words.clone()
    swapped[[3, 90]] = words[[90, 3]]
    assert checksums(torch, [swapped.view(torch.uint8)]) != checksums(
        torch, [words.view(torch.uint8)]
    )


def test_checksums_do_not_depend_on_company():
    parts = [tensor(size, size) for size in SIZES]
    together = checksums(torch, [*parts, torch.empty(0, dtype=torch.uint8)])
    assert together == [*(checksums(torch, [one])[0] for one in parts), 0]
    assert len(set(together)) == len(together)


def test_checksums_of_more_than_one_slice(monkeypatch):
    monkeypatch.setattr("gpumem_otel.yielding.copy.checksums._SLICE_WORDS", 16)
    one = tensor(16 * 8 * 3 + 13)
    (before,) = checksums(torch, [one])
    swapped = one.clone()
    swapped[:128], swapped[128:256] = one[128:256], one[:128]
    assert checksums(torch, [swapped]) != [before]
    assert checksums(torch, [one.clone()]) == [before]
