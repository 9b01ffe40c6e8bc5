"""Generated snapshots of sizes that are hard for browsers."""

from __future__ import annotations

import random

from support.raw_snapshots import block, frame, segment, snapshot


def many_blocks(segments: int = 400, each: int = 50, stacks: int = 10_000) -> dict:
    """Live blocks whose flame graph has about ten nodes for each stack."""
    found = _stacks(stacks)
    made = []
    address = 1 << 40
    for i in range(segments):
        blocks = []
        for j in range(each):
            number = i * each + j
            blocks.append(block(512 * (1 + number % 97), found[number % stacks], address=address))
            address += blocks[-1]["size"]
        made.append(segment(blocks, address=blocks[0]["address"]))
    return snapshot(made)


def many_events(number: int, stacks: int = 3000) -> dict:
    """A trace of so many events, the blocks that live at its end included."""
    chance = random.Random(4)
    found = _stacks(stacks)
    events, live = [], []
    time_us, address = 1_700_000_000_000_000, 1 << 41
    while len(events) < number:
        time_us += chance.randrange(1, 40)
        if live and (len(live) > 30_000 or chance.random() < 0.49):
            index = chance.randrange(len(live))
            live[index], live[-1] = live[-1], live[index]
            gone, size, _ = live.pop()
            event = {"action": "free_completed", "addr": gone, "size": size, "stream": 0}
        else:
            size = chance.choice((512, 4096, 65536, 1 << 20)) * chance.randrange(1, 8)
            address += size
            stack = found[chance.randrange(stacks)]
            live.append((address, size, stack))
            event = {"action": "alloc", "addr": address, "size": size, "stream": 0}
            event["frames"] = stack
        events.append({**event, "time_us": time_us})
    live.sort(key=lambda item: item[0])
    blocks = [block(size, stack, address=start) for start, size, stack in live]
    return snapshot([segment(blocks, address=1 << 41)], [events])


def _stacks(number: int, depth: int = 18) -> list[list[dict]]:
    """Stacks, leaf first, that share their outer frames as those of a program do."""
    frames = [
        frame(f"function_{i}", f"/workspace/package{i % 37}/module_{i % 300}.py", i % 900 + 1)
        for i in range(4000)
    ]
    found = []
    for i in range(number):
        stack = [
            frames[d if d < 3 else (d * 131 + i % 3 ** min(d, 9) * 17) % len(frames)]
            for d in range(depth)
        ]
        found.append(stack[::-1])
    return found
