"""`gpumem-otel trace IN`: the recorded events, one line each, filtered."""

from __future__ import annotations

import json
import re
from collections import deque
from datetime import datetime, timedelta, timezone
from itertools import islice
from typing import TYPE_CHECKING

import click

from gpumem_otel.base.text import human_bytes, printable
from gpumem_otel.cli.inputs import open_source, pick_devices, stack_builder
from gpumem_otel.cli.output import CommandFailed, fields_of, frames_of, warn, warn_of
from gpumem_otel.cli.shared_options import DEVICE, ROWS, SOURCE, json_option
from gpumem_otel.profiles.stack_text import short_line
from gpumem_otel.profiles.tables import stack_lines
from gpumem_otel.snapshot.labels import pool_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gpumem_otel.base.profile import Stack
    from gpumem_otel.snapshot.events import EventFilter, EventLine
    from gpumem_otel.snapshot.snapshot import TorchSnapshot
    from gpumem_otel.snapshot.torch_format import RawEvent, RawFrame

_EPILOG = """\b
Examples:
  gpumem-otel trace snapshot.pickle | less
  gpumem-otel trace --action alloc --min-size 100MiB --stack 'attention' snapshot.pickle
  gpumem-otel trace --address 0x7f5012000000 --frames snapshot.pickle
  gpumem-otel trace --since 2.5 --until 3 --json snapshot.pickle | jq -s 'map(.size_bytes)|add'

Sizes are requested bytes: 10MiB or 10M is 1024 * 1024 * 10, 10MB is 10 million. --json prints one
object a line, so that it can be read while it is written.
"""

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)
_SECONDS = re.compile(r"[+-]?\d{1,12}(\.\d*)?")
_SECONDS_WIDTH = 12
_DAY_WIDTH = 32
_BATCH = 4096
"""Lines written at once."""


def _size(value: str) -> int:
    from gpumem_otel.snapshot.events import size_from_text

    try:
        return size_from_text(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _address(value: str) -> int:
    try:
        return int(value, 0)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is not an address: write it as 0x7f5012000000"
        ) from None


def _pattern(value: str) -> re.Pattern[str]:
    try:
        return re.compile(value)
    except re.error as error:
        raise click.BadParameter(f"{value!r} is not a regular expression: {error}") from None


def _plain_iso(value: str) -> str:
    """The same time as Python 3.10 accepts it: no Z, and six digits after the point."""
    value = re.sub(r"[Zz]$", "+00:00", value)
    return re.sub(r"\.(\d{1,6})\d*", lambda digits: f".{digits[1]:0<6}", value)


def _time(value: str) -> timedelta | datetime:
    """Seconds since the start of the trace, or a moment."""
    if _SECONDS.fullmatch(value):
        return timedelta(seconds=float(value))
    try:
        moment = datetime.fromisoformat(_plain_iso(value))
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is not a time: write seconds since the start of the trace, or "
            "2026-11-29T17:50:00+00:00"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


@click.command("trace", epilog=_EPILOG, short_help="Print the recorded events, filtered.")
@SOURCE
@DEVICE
@click.option("--min-size", type=_size, metavar="SIZE", help="Only events of at least so much.")
@click.option("--max-size", type=_size, metavar="SIZE", help="Only events of at most so much.")
@click.option(
    "--stack", type=_pattern, metavar="REGEX", help="Only where a function or file matches."
)
@click.option(
    "--since",
    type=_time,
    metavar="TIME",
    help="Seconds since the first event, or an ISO time (UTC unless it says otherwise).",
)
@click.option("--until", type=_time, metavar="TIME", help="As --since; not included.")
@click.option(
    "--address", type=_address, metavar="0x..", help="Only of memory that this address lies in."
)
@click.option(
    "--action",
    "actions",
    multiple=True,
    metavar="WORD",
    help="alloc, free (both halves), segment (all four), oom, or as torch writes it; repeatable.",
)
@click.option("-n", "--number", type=ROWS, metavar="N", help="Only the first N of each device.")
@click.option("--tail", type=ROWS, metavar="N", help="Only the last N of each device.")
@click.option("--frames", is_flag=True, help="Whole stacks, leaf first.")
@click.option("--absolute", is_flag=True, help="Times of day (UTC) instead of seconds.")
@json_option("One JSON object a line.")
def command(
    source: str,
    *,
    device: int | None,
    min_size: int | None,
    max_size: int | None,
    stack: re.Pattern[str] | None,
    since: timedelta | datetime | None,
    until: timedelta | datetime | None,
    address: int | None,
    actions: tuple[str, ...],
    number: int | None,
    tail: int | None,
    frames: bool,
    absolute: bool,
    as_json: bool,
) -> None:
    """Print the events of the snapshot IN, or of the last window of the recording IN.

    A free whose allocation is not in the trace is marked [alloc not seen]: recording began after
    it, or the ring of events was full and dropped it.
    """
    from gpumem_otel.snapshot.events import EventFilter, first_time_us

    if number is not None and tail is not None:
        raise click.UsageError("-n and --tail exclude each other")
    opened = open_source(source)
    window = opened.window()
    snapshot = opened.snapshot if window is None else window[0]
    devices = pick_devices(snapshot, device)
    starts = [first_time_us(snapshot.raw_events(number)) for number in devices]
    # devices share one clock, so that their times can be compared
    start_us = min((start for start in starts if start is not None), default=None)
    wanted = EventFilter(
        min_size_bytes=min_size,
        max_size_bytes=max_size,
        stack=stack,
        since_us=_absolute(snapshot, since, start_us),
        until_us=_absolute(snapshot, until, start_us),
        address=address,
        actions=_actions(snapshot, devices, actions),
    )
    warn_of(snapshot.source, [*snapshot.warnings, *_overflows(snapshot, devices)])
    if not any(map(snapshot.raw_events, devices)):
        warn(
            f"{snapshot.source}: holds no events; record history "
            "(torch.cuda.memory._record_memory_history()) to have them"
        )
    stacks = _Stacks(snapshot)
    from_us = None if absolute else start_us or 0
    for index in devices:
        if events := snapshot.raw_events(index):
            chosen = _some(events, wanted, number, tail)
            _write(
                _json_lines(stacks, index, chosen, frames=frames)
                if as_json
                else _text_lines(stacks, index, events, chosen, frames=frames, start_us=from_us)
            )


def _overflows(snapshot: TorchSnapshot, devices: Sequence[int]) -> Iterator[str]:
    from gpumem_otel.snapshot.events import recorded_before

    for device in devices:
        events = snapshot.raw_events(device)
        count = recorded_before(snapshot.raw_segments(device), events)
        if count and len(events) > 1:
            yield (
                f"device {device}: {count} live blocks were recorded before the first event in "
                f"the trace: its ring of {len(events)} events was full, or was cleared"
            )


def _absolute(
    snapshot: TorchSnapshot, value: timedelta | datetime | None, start_us: int | None
) -> int | None:
    """Microseconds since 1970.

    Raises:
        CommandFailed: no event has a time.
    """
    if value is None:
        return None
    if start_us is None:
        raise CommandFailed(
            f"{snapshot.source}: its events have no time (torch before 2.2, or none recorded): "
            "leave --since and --until out"
        )
    if isinstance(value, timedelta):
        return start_us + value // _MICROSECOND
    return (value - _EPOCH) // _MICROSECOND


def _actions(
    snapshot: TorchSnapshot, devices: Sequence[int], words: Sequence[str]
) -> frozenset[str] | None:
    """Torch's names of the actions; None for any.

    Raises:
        click.BadParameter: neither torch nor this trace has such an action.
    """
    from gpumem_otel.snapshot.events import ACTIONS, KNOWN_ACTIONS

    if not words:
        return None
    chosen = {action for word in words for action in ACTIONS.get(word, (word,))}
    if unknown := chosen - KNOWN_ACTIONS:
        used = {event.get("action") for device in devices for event in snapshot.raw_events(device)}
        if not unknown <= used:
            word = min(unknown - {text for text in used if text is not None})
            known = ", ".join([*ACTIONS, *sorted(KNOWN_ACTIONS)])
            raise click.BadParameter(
                f"no event of {snapshot.source} is a {word!r} (known: {known})",
                param_hint="'--action'",
            )
    return frozenset(chosen)


def _some(
    events: Sequence[RawEvent], wanted: EventFilter, number: int | None, tail: int | None
) -> Iterable[EventLine]:
    from gpumem_otel.snapshot.events import pick

    lines = pick(events, wanted)
    return islice(lines, number) if tail is None else deque(lines, maxlen=tail)


def _write(lines: Iterator[str]) -> None:
    while batch := list(islice(lines, _BATCH)):
        click.echo("".join(batch), nl=False)


def _day_time(time_us: int) -> str:
    """ISO in UTC; the plain number where no calendar date has it."""
    try:
        return (_EPOCH + timedelta(microseconds=time_us)).isoformat(timespec="microseconds")
    except OverflowError:
        return f"{time_us} us"


class _Stacks:
    """The names of stacks, built once for each distinct stack."""

    def __init__(self, snapshot: TorchSnapshot) -> None:
        self._builder = stack_builder(snapshot)
        self._known: dict[tuple[int, ...], tuple[str, Stack]] = {}

    def __call__(self, frames: Sequence[RawFrame]) -> tuple[str, Stack]:
        """A stack in one line, and in full."""
        key = tuple(map(id, frames))  # frames live as long as their snapshot
        if key not in self._known:
            stack = self._builder.build(frames)
            self._known[key] = (short_line(stack), stack)
        return self._known[key]


def _text_lines(
    stacks: _Stacks,
    device: int,
    events: Sequence[RawEvent],
    chosen: Iterable[EventLine],
    *,
    frames: bool,
    start_us: int | None,
) -> Iterator[str]:
    """A title, headers and the chosen events; times of day where `start_us` is None."""
    digits = max(len(str(len(events))), len("event"))
    width = _DAY_WIDTH if start_us is None else _SECONDS_WIDTH
    yield f"device {device}: {len(events):,} events{_span(events)}\n"
    yield (
        f"{'event':>{digits}}  {'time (UTC)' if start_us is None else 'seconds':>{width}}  "
        f"{'action':14}  {'size':>10}  {'address':14}  {'stream':>14}  {'pool':7}  where\n"
    )
    event = None
    for event in chosen:
        where, stack = stacks(event.frames)
        address = "-" if event.address is None else f"{event.address:#x}"
        pool = "-" if event.pool_id is None else pool_name(event.pool_id)
        line = (
            f"{event.number:>{digits}}  {_time_text(event.time_us, start_us):>{width}}  "
            f"{printable(event.action):14}  {human_bytes(event.size_bytes):>10}  "
            f"{address:14}  {event.stream:>#14x}  {pool:7}  {_notes(event)}{where}"
        )
        yield line.rstrip() + "\n"
        if frames:
            yield from (f"{'':{digits + 4}}{line}\n" for line in stack_lines(stack))
    if event is None:
        yield "no event matches\n"


def _time_text(time_us: int | None, start_us: int | None) -> str:
    if time_us is None:
        return "-"
    return _day_time(time_us) if start_us is None else f"{(time_us - start_us) / 1e6:.6f}"


def _span(events: Sequence[RawEvent]) -> str:
    from gpumem_otel.snapshot.events import first_time_us

    first, last = first_time_us(events), first_time_us(events[::-1])
    if first is None or last is None:
        return ""
    return f" in {(last - first) / 1e6:.6f} s from {_day_time(first)}"


def _notes(event: EventLine) -> str:
    """Notes on an event, each in brackets with a blank after it."""
    note = "[alloc not seen] " if event.unseen else ""
    if event.device_free_bytes is not None:
        note += f"[device had {human_bytes(event.device_free_bytes)} free] "
    if event.user_metadata:
        note += f"[{printable(event.user_metadata)}] "
    return note


def _json_lines(
    stacks: _Stacks, device: int, chosen: Iterable[EventLine], *, frames: bool
) -> Iterator[str]:
    """An object a line."""
    encode = json.JSONEncoder(ensure_ascii=False).encode
    for event in chosen:
        where, stack = stacks(event.frames)
        form: dict[str, object] = {
            "device": device,
            "event": event.number,
            **fields_of(event, "action", "time_us", "size_bytes", "address", "stream"),
            "pool": event.pool_id,
            "allocation_seen": not event.unseen,
            **fields_of(event, "device_free_bytes", "compile_context", "user_metadata"),
            "where": where,
        }
        if frames:
            form["frames"] = frames_of(stack)
        yield encode(form) + "\n"
