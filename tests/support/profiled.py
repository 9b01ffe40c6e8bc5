"""Functions of every kind that allocate, for the line profiler to follow."""

from __future__ import annotations

import functools

KIB = 1024


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
