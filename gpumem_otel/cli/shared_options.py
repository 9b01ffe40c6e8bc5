"""Options and arguments that several verbs declare."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable

_F = TypeVar("_F", bound="Callable[..., object]")

ROWS = click.IntRange(1, 2**31)
"""How many rows to show; a number above the range of C integers is a typing error."""

SOURCE = click.argument("source", metavar="IN")

OUTPUT = click.option(
    "-o", "--output", required=True, metavar="OUT", help='File, or "-" for stdout.'
)

DEVICE = click.option("--device", type=int, metavar="N", help="Only this device.")


def options(*decorators: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """Several options as one decorator; the help lists them in this order."""

    def decorate(function: _F) -> _F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def json_option(text: str) -> Callable[[_F], _F]:
    """The option that prints JSON instead of text."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def kind_option(text: str, *kinds: str) -> Callable[[_F], _F]:
    """The option that chooses the kind of profile."""
    choice = click.Choice(kinds)
    return click.option("--kind", type=choice, default="live", show_default=True, help=text)
