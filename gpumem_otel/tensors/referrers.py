"""Finds how one object refers to another: key, index, attribute or variable, as code writes it.

No code of the objects runs: containers are read by the methods of their base types, attributes from
dicts and slots, variables from frames.
"""

from __future__ import annotations

import gc
import types
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from gpumem_otel.capture.objects.python_objects import instance_dict, undisturbed, variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

SUSPENDED: Final[dict[type, str]] = {
    types.GeneratorType: "gi_frame",
    types.CoroutineType: "cr_frame",
    types.AsyncGeneratorType: "ag_frame",
}
"""Types of objects with a frame of their own, and the attribute that has it."""

_OF_MODULES: Final = frozenset({"_parameters", "_buffers", "_modules"})
"""Dicts of an `nn.Module` that code does not name: their items are attributes of the module."""


@dataclass(slots=True, eq=False)
class Node:
    """An object that leads to the memory.

    Attributes:
        key: under which it holds the next object on the way, if it is a container.
        rest: the way from there on.
        after: the next object on the way.
    """

    item: Any
    rest: str = ""
    key: Any = None
    has_key: bool = False
    held: bool = False
    after: Node | None = None

    def leads_through(self, item: Any) -> bool:
        """Whether the object is on the way already: a cycle."""
        node: Node | None = self
        while node is not None:
            if node.item is item:
                return True
            node = node.after
        return False

    def tail(self) -> str:
        """The way from this object on, as code writes it after the object."""
        return f"[{key_text(self.key)}]{self.rest}" if self.has_key else self.rest

    def attribute_tail(self) -> str:
        """The same where this is the dict of an object's attributes."""
        key = str(self.key)
        return f".{key}{self.rest}" if key.isidentifier() else f"[{key}]{self.rest}"


Nodes: TypeAlias = "dict[int, list[Node]]"
"""The ways that lead from each object, by its id."""

Way: TypeAlias = "tuple[Node, str, tuple[Any, ...]]"
"""(node, rest of the way from the referrer on, key in the referrer if it is a container)."""

_WaysOf: TypeAlias = "Callable[[Any, Nodes], Iterator[Way]]"


def referrers_of(items: list[Any], not_these: set[int]) -> list[Any]:
    """The objects that refer to the items, but for nodes and tuples that are still being filled.

    `tuple()` fails in the thread that fills a tuple if anything else refers to it. Something refers
    to every complete tuple; those without a referrer are let go before another thread runs.

    Args:
        items: the objects.
        not_these: ids of objects that are left out.
    """
    with undisturbed():
        referrers = [
            referrer
            for referrer in gc.get_referrers(*items)
            if type(referrer) is not Node
            and referrer is not items
            and id(referrer) not in not_these
        ]
        tuples = [referrer for referrer in referrers if type(referrer) is tuple]
        if not tuples:
            return referrers
        ids = set(map(id, tuples))
        owned: set[int] = set()
        ours = {id(referrers), id(tuples), *not_these}
        for owner in gc.get_referrers(*tuples):
            if id(owner) not in ours:
                owned |= ids.intersection(map(id, gc.get_referents(owner)))
        kept = [item for item in referrers if type(item) is not tuple or id(item) in owned]
        referrers.clear()
        tuples.clear()
    return kept


def ways(referrer: Any, nodes: Nodes) -> Iterator[Way]:
    """Each way in which an object refers to one of the nodes."""
    by_base: _WaysOf = _ways_of_dict if issubclass(type(referrer), dict) else _ways_of_instance
    return _BY_KIND.get(type(referrer), by_base)(referrer, nodes)


def _keyed(pairs: Iterable[tuple[Any, Any]], nodes: Nodes) -> Iterator[Way]:
    for key, value in list(pairs):
        for node in nodes.get(id(value), ()):
            yield node, node.tail(), (key,)


def _ways_of_dict(referrer: dict[Any, Any], nodes: Nodes) -> Iterator[Way]:
    for node, rest, (key,) in _keyed(dict.items(referrer), nodes):
        # an attribute of a torch module, not of the dict that it keeps them in
        inner = type(key) is str and key in _OF_MODULES and node.has_key
        yield (node, node.rest, (node.key,)) if inner else (node, rest, (key,))


def _ways_of_sequence(referrer: Iterable[Any], nodes: Nodes) -> Iterator[Way]:
    yield from _keyed(enumerate(list(referrer)), nodes)


def _ways_of_tuple(referrer: tuple[Any, ...], nodes: Nodes) -> Iterator[Way]:
    if len(gc.get_referents(referrer)) == len(referrer):  # it is complete
        yield from _keyed(enumerate(referrer), nodes)


def _ways_of_set(referrer: Iterable[Any], nodes: Nodes) -> Iterator[Way]:
    for node, rest, _ in _keyed(enumerate(list(referrer)), nodes):
        yield node, f"{{...}}{rest}", ()


def _ways_of_cell(referrer: types.CellType, nodes: Nodes) -> Iterator[Way]:
    for node, rest, _ in _keyed(enumerate(_content(referrer)), nodes):
        yield node, rest, ()


def _ways_of_frame(referrer: types.FrameType, nodes: Nodes) -> Iterator[Way]:
    yield from _keyed(variables(referrer), nodes)


def _ways_of_suspended(referrer: Any, nodes: Nodes) -> Iterator[Way]:
    frame = getattr(referrer, SUSPENDED[type(referrer)])
    if frame is not None:
        yield from _keyed(variables(frame), nodes)


def _ways_of_method(referrer: types.MethodType, nodes: Nodes) -> Iterator[Way]:
    for node in nodes.get(id(referrer.__self__), ()):
        yield node, f".__self__{node.tail()}", ()


def _ways_of_function(function: types.FunctionType, nodes: Nodes) -> Iterator[Way]:
    names = function.__code__.co_freevars
    for node in nodes.get(id(function.__closure__), ()):
        yield node, node.rest, (names[node.key] if node.has_key else "",)
    for node in nodes.get(id(function.__defaults__), ()):
        yield node, node.tail(), ("__defaults__",)
    for node in nodes.get(id(instance_dict(function)), ()):
        yield node, node.rest, (node.key,)


def _ways_of_instance(referrer: Any, nodes: Nodes) -> Iterator[Way]:
    """Attributes, in the object's dict or in slots; where there is none, the type alone."""
    attributes = list(_ways_of_attributes(referrer, nodes))
    yield from attributes
    if attributes:
        return
    if isinstance(referrer, type):  # the dict of a class is not the one that it shows
        for node in (node for several in nodes.values() for node in several):
            if type(node.item) is dict:
                yield node, node.attribute_tail(), ()
        return
    for key in {*map(id, gc.get_referents(referrer))}.intersection(nodes):
        for node in nodes[key]:
            yield node, f".<{type(node.item).__name__}>{node.tail()}", ()


def _ways_of_attributes(referrer: Any, nodes: Nodes) -> Iterator[Way]:
    attributes = instance_dict(referrer)
    for node in nodes.get(id(attributes), ()):
        yield node, node.attribute_tail(), ()
    for name, value in [*attributes.items(), *_slots(referrer)]:
        for node in nodes.get(id(value), ()):
            inner = name in _OF_MODULES and node.has_key
            yield node, node.attribute_tail() if inner else f".{name}{node.tail()}", ()


def _slots(item: Any) -> Iterator[tuple[str, Any]]:
    for base in type(item).__mro__:
        for name, descriptor in list(vars(base).items()):
            if type(descriptor) is types.MemberDescriptorType:
                try:
                    yield name, descriptor.__get__(item)
                except AttributeError:  # empty
                    continue


def _content(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not bound yet
        return ()


def qualname(item: Any) -> str:
    """Its qualified name, else that of its type."""
    return str(getattr(item, "__qualname__", type(item).__name__))


def key_text(key: object) -> str:
    """How code writes the key; of one whose `repr` could run code, its type."""
    return repr(key) if type(key) in (int, str) else f"<{type(key).__name__}>"


_BY_KIND: Final[dict[type, _WaysOf]] = {
    list: _ways_of_sequence,
    tuple: _ways_of_tuple,
    deque: _ways_of_sequence,
    set: _ways_of_set,
    frozenset: _ways_of_set,
    types.CellType: _ways_of_cell,
    types.FrameType: _ways_of_frame,
    types.FunctionType: _ways_of_function,
    types.MethodType: _ways_of_method,
    **dict.fromkeys(SUSPENDED, _ways_of_suspended),
}
