"""A large snapshot as torch 2.11 writes it, made up and always the same.

    python benchmarks/large_snapshot.py OUT.pickle [--events 1000000] [--live 100000]

A training job of many steps: state that stays, activations that live for a moment, stacks that
share their outer frames, a small-object and several large-object segment sizes. What is alive by
the events is what the segments hold, so that every total can be checked from both ends:

* every block is the one allocation of its address that no event frees, with the same list of
  frames; a share of them is older than the trace and has no event;
* a free is `free_requested` and then `free_completed`, at once or (one in 64) a little later;
* `reserved` is what `segment_alloc` and `segment_free` leave.
"""

from __future__ import annotations

import argparse
import pickle
import random
import sys
from collections import deque
from pathlib import Path
from typing import Any

_MIB = 1 << 20
_START_US = 1_783_874_495_854_988
_SETTINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "max_split_size": -1,
    "garbage_collection_threshold": 0.0,
    "expandable_segments": False,
    "pinned_num_register_threads": 1,
    "release_lock_on_cudamalloc": False,
    "pinned_use_cuda_host_register": False,
    "graph_capture_record_stream_reuse": False,
    "roundup_power2_divisions": {str(1 << power): 0 for power in range(16)},
}
# block size -> size of the segments it is cut from, in c10's steps: 2 MiB up to 1 MiB, then
# 20 MiB, from 10 MiB on whole multiples of 2 MiB
_CLASSES = {
    512: 2 * _MIB,
    4_096: 2 * _MIB,
    65_536: 2 * _MIB,
    524_288: 2 * _MIB,
    2 * _MIB: 20 * _MIB,
    5 * _MIB: 20 * _MIB,
    16 * _MIB: 16 * _MIB,
}
_WEIGHTS = (30, 25, 25, 12, 5, 2, 1)
_PASSING = 100
_MOST_PER_PAIR = 5  # events: a segment, the allocation, its free of two, the segment's end


class Heap:
    """An allocator that cuts segments into equal slots, and writes down what it does.

    Attributes:
        events: the trace.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._time_us = _START_US
        self._next_address = 0x7F_5000_0000_00
        self._free: dict[int, list[int]] = {size: [] for size in _CLASSES}
        self._segments: dict[int, int] = {}  # address -> block size
        self._home: dict[int, int] = {}  # address of a slot -> of its segment
        self._used: dict[int, int] = {}  # address of a segment -> allocations in it
        self._live: dict[int, tuple[int, int, list[Any]]] = {}  # (requested, size, frames)
        self._later: deque[dict[str, Any]] = deque()

    def alloc(self, requested: int, frames: list[Any], *, recorded: bool = True) -> int:
        """The address of a new allocation."""
        size = next(size for size in _CLASSES if requested <= size)
        free = self._free[size]
        if not free:
            self._grow(size, frames, recorded)
        address = free.pop()
        self._live[address] = (requested, size, frames)
        self._used[self._home[address]] += 1
        if recorded:
            self._write("alloc", address, requested, frames)
        return address

    def free(self, address: int, frames: list[Any], *, late: bool = False) -> None:
        """Give an allocation back; `late`: another stream still uses it for a while."""
        requested, size, _ = self._live.pop(address)
        self._write("free_requested", address, requested, frames)
        completed = self._event("free_completed", address, requested, frames)
        if late:
            self._later.append({**completed, "_slot": size})
            return
        self.events.append(completed)
        self._give_back(address, size)

    def settle(self) -> None:
        """The other stream has passed: what was freed late is free."""
        while self._later:
            completed = self._later.popleft()
            size = completed.pop("_slot")
            self._time_us += 1
            completed["time_us"] = self._time_us
            self.events.append(completed)
            self._give_back(completed["addr"], size)

    def pad(self, count: int) -> None:
        """Fill the trace with segments that nothing uses."""
        for _ in range(count):
            self._grow(512, [], recorded=True)

    @property
    def alive(self) -> int:
        """How many allocations are alive."""
        return len(self._live)

    def segments(self) -> list[dict[str, Any]]:
        """The segments with their blocks, free neighbours merged into one block."""
        found = []
        for address, size in self._segments.items():
            total = _CLASSES[size]
            blocks: list[dict[str, Any]] = []
            end = address + total
            for at in range(address, end - size + 1, size):
                live = self._live.get(at)
                if live is not None:
                    blocks.append(
                        {
                            "address": at,
                            "size": size,
                            "requested_size": live[0],
                            "state": "active_allocated",
                            "frames": live[2],
                        }
                    )
                elif blocks and blocks[-1]["state"] == "inactive":
                    blocks[-1]["size"] += size
                else:
                    blocks.append(
                        {
                            "address": at,
                            "size": size,
                            "requested_size": 0,
                            "state": "inactive",
                            "frames": [],
                        }
                    )
            rest = total % size
            if rest and blocks[-1]["state"] == "inactive":
                blocks[-1]["size"] += rest
            elif rest:
                at = end - rest
                blocks.append(
                    {
                        "address": at,
                        "size": rest,
                        "requested_size": 0,
                        "state": "inactive",
                        "frames": [],
                    }
                )
            active = [block for block in blocks if block["state"] == "active_allocated"]
            held = sum(block["size"] for block in active)
            found.append(
                {
                    "device": 0,
                    "address": address,
                    "total_size": total,
                    "allocated_size": held,
                    "active_size": held,
                    "requested_size": sum(block["requested_size"] for block in active),
                    "stream": 0,
                    "segment_type": "small" if total == 2 * _MIB else "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": False,
                    "frames": [],
                    "blocks": blocks,
                }
            )
        found.sort(key=lambda segment: segment["address"])
        return found

    def _grow(self, size: int, frames: list[Any], recorded: bool) -> None:
        total = _CLASSES[size]
        address = self._next_address
        self._next_address += total
        self._segments[address] = size
        self._used[address] = 0
        slots = range(address, address + total - size + 1, size)
        self._home.update(dict.fromkeys(slots, address))
        self._free[size] += reversed(slots)
        if recorded:
            self._write("segment_alloc", address, total, frames)

    def _give_back(self, address: int, size: int) -> None:
        home = self._home[address]
        self._used[home] -= 1
        self._free[size].append(address)
        if size == 16 * _MIB and not self._used[home]:  # what cudaMalloc gave goes back whole
            self._free[size].remove(address)
            del self._segments[home], self._used[home], self._home[address]
            self._write("segment_free", home, _CLASSES[size], [])

    def _write(self, action: str, address: int, size: int, frames: list[Any]) -> None:
        self.events.append(self._event(action, address, size, frames))

    def _event(self, action: str, address: int, size: int, frames: list[Any]) -> dict[str, Any]:
        self._time_us += 1
        return {
            "action": action,
            "addr": address,
            "size": size,
            "stream": 0,
            "time_us": self._time_us,
            # a string of its own in each event, as torch makes them
            "compile_context": b"N/A".decode(),
            "user_metadata": "",
            "frames": frames,
        }


def make(
    events: int = 1_000_000,
    live: int = 100_000,
    *,
    stacks: int = 2_000,
    depth: int = 30,
    older: int | None = None,
    seed: int = 1,
) -> dict[str, Any]:
    """A snapshot with exactly so many events and live blocks.

    Args:
        events: length of the trace; at least seven for each live block and 2,000.
        live: allocated blocks at the end.
        stacks: distinct stacks.
        depth: frames of each.
        older: how many of the live blocks are from before the trace, by default a tenth.
        seed: of all that is random.
    """
    if events < 7 * live + 2_000:
        raise ValueError(f"{events} events are too few for {live} live blocks")
    job = _Job(_stacks(stacks, depth, random.Random(seed)), random.Random(seed))
    for _ in range(live // 10 if older is None else older):
        job.alloc(recorded=False)
    heap = job.heap
    # of each batch, how many stay; the last sixth of the trace is a job in balance
    staying = round(_PASSING * 1.7 * 3 * live / (events + 2 * live)) + 1
    burst = max(_PASSING, events // 100)
    batches = 0
    # room for what is still to come: the frees, the new ones, and the segments these may need
    while events - len(heap.events) > 6 * burst + 3 * job.passing + 2 * (live - heap.alive):
        batches += 1
        if batches % 256 == 0:
            job.batch(burst, 0)  # more memory is needed than at the end
        else:
            job.batch(_PASSING, min(staying, live - (heap.alive - job.passing)))
    job.free_all()
    while heap.alive < live:
        job.alloc()
    while events - len(heap.events) >= _MOST_PER_PAIR:
        job.free(job.alloc())
    heap.pad(events - len(heap.events))
    first, last = heap.events[0]["time_us"], heap.events[-1]["time_us"]
    return {
        "segments": heap.segments(),
        "device_traces": [heap.events],
        "allocator_settings": _SETTINGS,
        "external_annotations": _annotations(first, last, 100),
    }


class _Job:
    """A training loop: some of what it allocates stays, the rest passes."""

    def __init__(self, stacks: list[list[dict[str, Any]]], dice: random.Random) -> None:
        self.heap = Heap()
        self._stacks = stacks
        self._dice = dice
        self._passing: list[int] = []

    @property
    def passing(self) -> int:
        return len(self._passing)

    def alloc(self, *, recorded: bool = True) -> int:
        size = self._dice.choices(list(_CLASSES), _WEIGHTS)[0]
        # most requests are a little below the slot they get
        requested = size - self._dice.choice((0, 0, 0, 4, 64, size // 8))
        return self.heap.alloc(requested, self._stack(), recorded=recorded)

    def free(self, address: int, *, late: bool = False) -> None:
        self.heap.free(address, self._stack(), late=late)

    def batch(self, count: int, staying: int) -> None:
        """Allocate so many; some stay, the others go, most of them last in, first out."""
        self.heap.settle()
        made = [self.alloc() for _ in range(count)]
        self._dice.shuffle(made)
        self._passing += made[staying:]
        while len(self._passing) > _PASSING:
            nearly_last = -1 - min(self._dice.randrange(8), len(self._passing) - 1)
            self.free(self._passing.pop(nearly_last), late=not self._dice.randrange(64))

    def free_all(self) -> None:
        while self._passing:
            self.free(self._passing.pop())
        self.heap.settle()

    def _stack(self) -> list[dict[str, Any]]:
        # a list of its own for each event, as torch makes them; the frames are shared
        return list(self._dice.choice(self._stacks))


def _stacks(count: int, depth: int, dice: random.Random) -> list[list[dict[str, Any]]]:
    """Stacks that begin alike at the root and fan out towards the leaf, leaf first."""
    package = "/venv/lib/python3.11/site-packages/torch/nn/modules/"

    def frame(name: str, filename: str, line: int) -> dict[str, Any]:
        return {"name": name, "filename": filename, "line": line}

    outer = [frame(f"step_{n}", "/workspace/train.py", 10 + n) for n in range(depth // 3)]
    middle = [
        [frame(f"_call_impl_{n % 7}", f"{package}module.py", 1_500 + n) for n in range(16)]
        for _ in range(depth // 3)
    ]
    inner = [
        frame("forward", f"{package}layer_{n % 97}.py", 20 + n)
        for n in range(max(depth, count // 3))
    ]
    found: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    while len(found) < count:
        leaf = dice.sample(inner, depth - len(outer) - len(middle))
        stack = [*leaf, *(dice.choice(level) for level in middle), *outer]
        found.setdefault(tuple(map(id, stack)), stack)
    return list(found.values())


def _annotations(first_us: int, last_us: int, count: int) -> list[dict[str, Any]]:
    step = max(2, (last_us - first_us) // count)
    return [
        {
            "name": "Optimizer.step#AdamW.step",
            "stage": stage,
            "device": 0,
            "time_us": first_us + number * step + (0 if stage == "START" else step // 2),
        }
        for number in range(count)
        for stage in ("START", "END")
    ]


def main() -> int:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--live", type=int, default=100_000)
    options = parser.parse_args()
    options.out.write_bytes(pickle.dumps(make(options.events, options.live), protocol=4))
    print(f"{options.out}: {options.out.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
