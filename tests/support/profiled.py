"""Functions of every kind that allocate, for the line profiler to follow."""

from __future__ import annotations

import functools
import sys

from gpumem_otel.api.line_profiler import line_profiler, profile

KIB = 1024
MONITORING = hasattr(sys, "monitoring")


class Job:
    """Code under profile; `memory` is where it allocates."""

    def __init__(self, memory):
        self.memory = memory
        self.held = []

    def hold(self, size):
        self.held.append(self.memory.alloc(size))

    def functions(self):
        """Fresh function objects with code of their own, so that tests do not share them."""
        memory, hold = self.memory, self.hold

        def plain(count=1):
            hold(count * KIB)
            memory.alloc(8 * KIB).free()
            return count

        def calls_plain():
            plain(1)
            return plain(2)

        def recursive(depth):
            hold(KIB)
            if depth:
                recursive(depth - 1)

        def raises():
            hold(KIB)
            raise KeyError("lost")

        def generator():
            hold(KIB)
            got = yield 1
            hold(got * KIB)
            return "end"

        async def coroutine(pause):
            hold(KIB)
            await pause()
            hold(2 * KIB)
            return "done"

        async def stream(pause):
            hold(KIB)
            yield 1
            await pause()
            hold(2 * KIB)
            yield 2

        found = locals()
        return {
            name: found[name]
            for name in (
                "plain", "calls_plain", "recursive", "raises", "generator", "coroutine", "stream",
            )
        }  # fmt: skip

    def make_class(self):
        """A class with members of every kind."""
        hold = self.hold

        class Net:
            scale = 3

            def __init__(self):
                hold(KIB)

            def forward(self, count):
                hold(count * KIB)
                return count

            @staticmethod
            def helper():
                hold(4 * KIB)
                return "static"

            @classmethod
            def build(cls):
                hold(5 * KIB)
                return cls()

            @property
            def size(self):
                hold(6 * KIB)
                return 6

            @size.setter
            def size(self, value):
                hold(value * KIB)

            @functools.cached_property
            def table(self):
                hold(7 * KIB)
                return 7

        return Net


def allocated(profiler, name=None, device=0):
    """Function -> {line from its first: bytes allocated}, of the lines that allocated."""
    found = {}
    for function in profiler.display().functions:
        rows = {
            row.line - function.first_line: row.devices[device].allocation_bytes
            for row in function.rows
            if device in row.devices and row.devices[device].allocation_bytes
        }
        if function.rows:
            found[function.name.rpartition(".")[2]] = rows
    return found if name is None else found.get(name)


def row(profiler, name, line):
    """(hits, use on device 0) of a line, counted from the function's first."""
    (function,) = (f for f in profiler.display().functions if f.name.endswith(name))
    (found,) = (r for r in function.rows if r.line - function.first_line == line)
    return found.hits, found.devices[0]


def decorated(function):
    """`@profile` on a function of the job, its profiler beside it."""
    return profile(show=False)(function), line_profiler()
