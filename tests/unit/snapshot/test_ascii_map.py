"""Segments drawn: exact cells, exact widths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_otel.base.profile import BlockState
from gpumem_otel.snapshot.layout import (
    ALLOCATED,
    FREE,
    LEGEND,
    MIXED,
    NEXT_ALLOCATED,
    WAITING,
    strip,
)

HELD, PENDING, INACTIVE = BlockState
BLOCKS = st.lists(st.tuples(st.integers(0, 2**40), st.sampled_from(list(BlockState))), max_size=12)


@pytest.mark.parametrize(
    ("blocks", "size", "width", "drawn"),
    [
        ([(8, HELD)], 8, 8, "########"),
        ([(4, HELD), (4, HELD)], 8, 8, "####===="),
        ([(2, HELD), (2, INACTIVE), (2, HELD), (2, HELD)], 8, 8, "##..==##"),
        ([(4, PENDING), (4, INACTIVE)], 8, 4, "~~.."),
        ([(4, HELD)], 8, 4, "##.."),  # what no block covers is free
        ([(1, HELD), (7, INACTIVE)], 8, 4, "+..."),
        ([(1, HELD), (1, PENDING), (6, INACTIVE)], 8, 4, "+..."),
        ([(1, PENDING), (7, INACTIVE)], 8, 4, "+..."),
        ([(1, HELD), (7, HELD)], 8, 4, "#==="),  # a tie goes to the first
        ([(3, HELD), (5, HELD)], 8, 2, "#="),
        ([(8, INACTIVE)], 8, 3, "..."),
        ([(1, HELD)], 1, 5, "#####"),  # smaller than the strip is wide
        ([(0, HELD), (2, HELD)], 2, 2, "##"),
        ([], 2, 3, "..."),
        ([], 0, 3, "   "),
        ([(8, HELD)], 8, 0, "#"),
    ],
)
def test_cells(blocks, size, width, drawn):
    assert strip(blocks, size, width) == drawn


@given(blocks=BLOCKS, more=st.integers(0, 2**30), width=st.integers(1, 200))
def test_width_is_exact_and_no_state_is_hidden(blocks, more, width):
    size = more + sum(size for size, _ in blocks)
    drawn = strip(blocks, size, width)
    assert len(drawn) == width
    if not size:
        assert drawn.isspace()
        return
    start = 0
    for length, state in blocks:
        # the cells that a block reaches into say so
        cells = drawn[start * width // size : -(-(start + length) * width // size)]
        own = {HELD: ALLOCATED + NEXT_ALLOCATED, PENDING: WAITING, INACTIVE: FREE}[state] + MIXED
        if length:
            assert cells
            assert set(cells) <= set(own)
        start += length


def test_the_legend_names_every_character():
    marks = "".join(mark for mark, _ in LEGEND)
    assert sorted(marks) == sorted(ALLOCATED + NEXT_ALLOCATED + WAITING + FREE + MIXED)
