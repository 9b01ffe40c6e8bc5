"""Time per stage of profile -> pprof -> gzip, on the CPU alone.

    python benchmarks/encode.py [repeats]

Prints the best and the median of some repeats; the interpreter lock is held in `encode`, not in
`gzip`. The profiles are made up.
"""

from __future__ import annotations

import statistics
import sys
import time
import zlib
from typing import TYPE_CHECKING

from gpumem_otel.base.profile import Frame, HeapProfile, ProfileKind, Sample
from gpumem_otel.profiles import pprof

if TYPE_CHECKING:
    from collections.abc import Callable


def profile(blocks: int, stacks: int, depth: int) -> HeapProfile:
    """A live profile of so many blocks under so many distinct stacks.

    As in recordings of training jobs: all stacks begin alike, fan out towards the leaf, and share
    the frames they have in common, some three distinct frames for each stack.
    """
    shared = [Frame(f"train.loop.outer_{level}", "/job/train.py", level) for level in range(depth)]
    fan_out = [
        [_layer_frame(level, number) for number in range(max(1, stacks >> level))]
        for level in range(depth // 3)
    ]
    samples = []
    for number in range(stacks):
        own = [choices[number % len(choices)] for choices in fan_out]
        objects = blocks // stacks
        size_bytes = objects * 512 * (1 + number % 4096)
        samples.append(Sample((*own, *shared[len(own) :]), objects, size_bytes))
    return HeapProfile(ProfileKind.LIVE, 0, tuple(samples), time_ns=1_700_000_000_000_000_000)


def _layer_frame(level: int, number: int) -> Frame:
    module = number % 97
    return Frame(
        f"torch.nn.modules.layer_{module}.Layer{level}.forward",
        f"/venv/lib/python3.11/site-packages/torch/nn/modules/layer_{module}.py",
        100 + number,
    )


def _measure(work: Callable[[], bytes], repeats: int) -> tuple[str, bytes]:
    seconds = []
    result = b""
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - start)
    best, median = min(seconds) * 1e3, statistics.median(seconds) * 1e3
    return f"{best:8.2f} ms best {median:8.2f} ms median", result


def _deflate(data: bytes, level: int) -> bytes:
    deflate = zlib.compressobj(level, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return deflate.compress(data) + deflate.flush()


def main(repeats: int = 20) -> None:
    """Print the table."""
    for blocks, stacks, depth in ((10_000, 200, 30), (100_000, 2_000, 30), (100_000, 15_000, 40)):
        made = profile(blocks, stacks, depth)
        print(f"{blocks} blocks, {stacks} stacks of {depth} frames")
        text, data = _measure(lambda made=made: pprof.encode([made]), repeats)  # type: ignore[misc]
        print(f"  encode                {text} {len(data):9d} bytes")
        half = len(data) // 2
        text, small = _measure(
            lambda made=made, half=half: pprof.encode([made], max_bytes=half),  # type: ignore[misc]
            repeats,
        )
        print(f"  encode, half the size {text} {len(small):9d} bytes")
        for level in (1, 6):
            text, packed = _measure(
                lambda data=data, level=level: _deflate(data, level),  # type: ignore[misc]
                repeats,
            )
            print(f"  gzip level {level}          {text} {len(packed):9d} bytes")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
