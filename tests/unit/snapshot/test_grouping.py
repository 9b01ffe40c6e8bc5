"""Stacks by number: equal to interning by all identities, and never slow on strange frames."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpumem_otel.snapshot.grouping import StackTable


def frame(name, **more):
    return {"name": name, "filename": "f.py", "line": 1, **more}


def test_the_empty_stack_is_0():
    table = StackTable()
    assert table.index([]) == table.index(()) == 0
    assert table.all == [()]


def test_equal_lists_of_the_same_frames_are_one_stack():
    table = StackTable()
    a, b, c = frame("a"), frame("b"), frame("c")
    first = table.index([a, b, c])
    assert table.index([a, b, c]) == first
    assert table.index([a, c, b]) != first
    assert table.index([a, b]) != first
    # alike in length and in the two frames that are looked at
    assert table.index([a, b, a]) != first
    assert [len(stack) for stack in table.all] == [0, 3, 3, 2, 3]


def test_frames_that_would_take_for_ever_to_compare_are_known_by_identity():
    """GIVEN equal nests that take 2**60 steps to compare WHEN numbered THEN they are two."""

    def nest():
        x = []
        for _ in range(60):
            x = [x, x]
        return x

    table = StackTable()
    first, second = frame("f", extra=nest()), frame("f", extra=nest())
    assert table.index([first]) == table.index([first]) == 1
    assert table.index([second]) == table.index([second]) == 2
    # nor does a plain frame make a nest be walked into
    plain, same_shape = frame("f", extra=None), frame("f", extra=nest())
    assert table.index([plain, plain, plain]) == 3
    assert table.index([plain, plain, same_shape]) == 4
    assert table.index([plain, plain, same_shape]) == 4


class Compared(dict):
    """A frame that counts how often it is compared by value."""

    count = 0

    def __eq__(self, other):
        Compared.count += 1
        return dict.__eq__(self, other)

    __hash__ = None


def test_frames_are_never_compared_by_value():
    """GIVEN stacks alike but for the middle of their frames WHEN numbered THEN none is looked into.

    A file of strangers makes each such look as dear as it likes.
    """
    table = StackTable()
    shared = Compared(frame("f"))
    for number in range(100):
        stack = [shared, Compared(frame("g")), shared, shared]
        assert table.index(stack) == table.index(list(stack)) == number + 1
    assert Compared.count == 0


def test_more_alike_than_are_looked_at():
    """Stacks that differ only where nobody looks first all keep their own number."""
    table = StackTable()
    a, b = frame("a"), frame("b")
    stacks = [
        [a, a, a, a, a, *(b if number >> bit & 1 else a for bit in range(5))]
        for number in range(32)
    ]
    numbers = [table.index(stack) for stack in stacks]
    assert numbers == list(range(1, 33))
    assert [table.index(list(stack)) for stack in stacks] == numbers


FRAMES = [frame(name) for name in "abcd"] + [frame("n", extra=[])]


@given(st.lists(st.lists(st.sampled_from(FRAMES), max_size=6), max_size=30))
def test_as_by_all_identities(stacks):
    table, known = StackTable(), {(): 0}
    for stack in stacks:
        key = tuple(map(id, stack))
        assert table.index(stack) == known.setdefault(key, len(known))
    assert [tuple(map(id, stack)) for stack in table.all] == list(known)
