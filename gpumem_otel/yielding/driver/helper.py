"""The helper process that locks, checkpoints and brings back its parent.

`HelperClient` starts it as `python -m gpumem_otel.yielding.driver.helper SETTINGS`. It needs
neither the parent's interpreter lock nor its allocator, so it can end a lease even while all Python
threads of the parent are blocked. torch is not imported.

It reads commands from standard input and answers on standard output, one JSON object per line:

    {"id": 1, "do": "state"}
    {"id": 2, "do": "adopt", "need": {uuid: bytes}, "lease_seconds": 60.0}
    {"id": 3, "do": "checkpoint", "lock_seconds": 10.0, "lease_seconds": null, "least": {}}
    {"id": 4, "do": "restore", "wait_seconds": 60.0}
    {"id": 3, "ok": true, "state": "checkpointed", "seconds": 1.9, "need": {uuid: bytes}}
    {"id": 4, "ok": false, "state": "checkpointed", "lost": false, "error": "..."}
    {"event": "restored", "by": "lease", "seconds": 0.9}
    {"event": "waiting", "error": "..."}

It brings the parent back by itself when the lease expires, when the pipe is closed while the parent
lives, and on SIGTERM (`kill PID`, for a parent that does not respond); while the device is full it
retries with growing pauses. It ends when the parent has ended.

A process that has loaded the driver holds a little memory of each device. So once the parent is
checkpointed, and if the driver keeps the devices initialized by itself, this process re-executes
itself (execve(2): same pid, same pipes) and loads the driver only when it is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.yielding.driver.driver_api import (
    DeviceRoom,
    DriverCalls,
    DriverError,
    bring_back,
    no_room,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_STDERR: Final = 2
_LOOK_SECONDS: Final = 1.0
"""Interval of checks for the parent if the kernel has no pidfd."""


class CheckpointHelper:
    """The helper without its loop.

    Args:
        calls: the driver's calls for the parent.
        room: makes a `DeviceRoom` from the bytes needed on each device.
        send: writes one message.
        first_pause_seconds: before a restore is retried; doubled each time.
        longest_pause_seconds: limit of the pause.
        monotonic: seconds of a clock that never goes back, the same in every process.
        loaded: whether `calls` were started; else they are started when needed.

    Attributes:
        ended: nothing is left to do.
    """

    def __init__(
        self,
        calls: DriverCalls,
        *,
        room: Callable[[dict[str, int]], DeviceRoom],
        send: Callable[[dict[str, Any]], object],
        first_pause_seconds: float = 0.25,
        longest_pause_seconds: float = 10.0,
        monotonic: Callable[[], float] = time.monotonic,
        loaded: bool = True,
    ) -> None:
        self.ended = False
        self._can_rest = False
        self._unloaded = calls
        self._loaded = loaded
        self._make_room = room
        self._room = room({})
        self._send = send
        self._pauses = first_pause_seconds, longest_pause_seconds
        self._pause = first_pause_seconds
        self._now = monotonic
        self._lease_end: float | None = None
        self._due = ""  # why the parent must be brought back without a command
        self._asked: tuple[int, float] | None = None  # restore command: id and deadline
        self._next_try = 0.0
        self._reported = ""

    @property
    def _calls(self) -> DriverCalls:
        """The driver's calls.

        Raises:
            ImportError: the driver cannot be loaded again. Not a `DriverError`, which would blame
                the parent: this helper must end and be replaced.
        """
        if not self._loaded:
            try:
                self._unloaded.start()
            except DriverError as error:
                raise ImportError(str(error)) from error
            self._loaded = True
        return self._unloaded

    @property
    def rests(self) -> bool:
        """Whether the driver can be unloaded: it is idle, and the devices stay initialized."""
        return self._can_rest and not (self.ended or self._due or self._asked)

    def stay(self) -> None:
        """Keep the driver loaded, since re-executing failed."""
        self._can_rest = False

    def kept(self) -> dict[str, Any]:
        """The state for `resume`."""
        return {"need": self._room.need, "lease_end": self._lease_end}

    def resume(self, need: dict[str, int], lease_end: float | None) -> None:
        """Continue for a checkpointed parent, with the state of `kept`."""
        self._room = self._make_room(need)
        self._lease_end = lease_end

    # commands

    def command(self, line: str) -> None:
        """Execute one line."""
        message = json.loads(line)
        number = int(message["id"])
        try:
            getattr(self, "_do_" + str(message["do"]))(number, message)
        except Exception as error:  # the helper must live on to end the lease
            self._answer(number, ok=False, state=self._state(), lost=False, error=str(error))

    def leave(self, why: str) -> None:
        """Bring the parent back and end, after a closed pipe or a signal."""
        self._bring_back_unasked(why)

    def _do_state(self, number: int, _message: dict[str, Any]) -> None:
        self._answer(number, ok=True, state=self._calls.state())

    def _do_adopt(self, number: int, message: dict[str, Any]) -> None:
        self._room = self._make_room(dict(message["need"]))
        self._set_lease(message["lease_seconds"])
        state = self._calls.state()
        self._answer(number, ok=True, state=state)
        self._can_rest = state == "checkpointed" and self._room.persistent()

    def _do_checkpoint(self, number: int, message: dict[str, Any]) -> None:
        started = self._now()
        seconds = float(message["lock_seconds"])
        try:
            self._calls.lock(seconds)
        except DriverError as error:
            self._not_locked(number, error, seconds)
            return
        self._set_lease(message["lease_seconds"])
        room = self._make_room({})
        room.note_before()
        try:
            self._calls.checkpoint()
        except DriverError as error:
            self._undo(number, error)
            return
        room.note_after(dict(message["least"]))
        self._room = room
        self._answer(
            number, ok=True, state="checkpointed", seconds=self._now() - started, need=room.need
        )
        self._can_rest = room.persistent()

    def _do_restore(self, number: int, message: dict[str, Any]) -> None:
        self._asked = (number, self._now() + float(message["wait_seconds"]))
        self._pause, self._next_try = self._pauses[0], 0.0

    # checkpoint

    def _not_locked(self, number: int, error: DriverError, seconds: float) -> None:
        why = str(error)
        if error.timed_out:
            why = f"the device's work did not end within {seconds:g} s ({error})"
        state = self._state()
        if state == "locked":  # by another process, or just after the timeout
            self._undo(number, error)
        else:
            self._answer(number, ok=False, state=state, lost=state == "failed", error=why)

    def _undo(self, number: int, error: DriverError) -> None:
        self._set_lease(None)
        why = str(error)
        try:
            bring_back(self._calls)
        except DriverError as second:
            why = f"{error}, and then {second}"
        state = self._state()
        lost = state not in {"running", "checkpointed"}
        self._answer(number, ok=False, state=state, lost=lost, error=why)

    # restore

    def _set_lease(self, seconds: float | None) -> None:
        self._lease_end = None if seconds is None else self._now() + float(seconds)

    def _bring_back_unasked(self, why: str) -> None:
        if not self._due:
            self._pause, self._next_try = self._pauses[0], 0.0
        if self._due in ("", "lease"):
            self._due = why

    def wait_seconds(self) -> float | None:
        """Until `turn` has something to do; None: until the next command."""
        moments = []
        if self._due or self._asked:
            moments.append(self._next_try)
        if self._asked:
            moments.append(self._asked[1])
        if self._lease_end is not None:
            moments.append(self._lease_end)
        return max(min(moments) - self._now(), 0.0) if moments else None

    def turn(self) -> None:
        """Do what is due now."""
        now = self._now()
        if self._lease_end is not None and now >= self._lease_end:
            self._lease_end = None
            self._bring_back_unasked("lease")
        if (self._due or self._asked) and now >= self._next_try:
            self._try()

    def _try(self) -> None:
        missing = self._room.missing_bytes()
        try:
            if missing:
                raise no_room(missing)
            seconds = bring_back(self._calls)
        except DriverError as error:
            self._not_back(str(error), lost=not error.out_of_memory)
        else:
            self._back(seconds)

    def _not_back(self, why: str, *, lost: bool) -> None:
        self._next_try = self._now() + self._pause
        self._pause = min(self._pause * 2, self._pauses[1])
        state = self._state()
        if self._asked and (lost or self._next_try > self._asked[1]):
            number, self._asked = self._asked[0], None
            self._answer(number, ok=False, state=state, lost=lost, error=why)
        if self._due and why != self._reported:
            self._reported = why
            self._send({"event": "waiting", "state": state, "lost": lost, "error": why})

    def _back(self, seconds: float) -> None:
        why, self._due, self._reported = self._due, "", ""
        self._lease_end, self._can_rest = None, False
        if self._asked:
            number, self._asked = self._asked[0], None
            self._answer(number, ok=True, state="running", seconds=seconds)
        else:
            self._send({"event": "restored", "by": why, "seconds": seconds})
        if why not in ("", "lease"):
            self.ended = True

    def _state(self) -> str:
        if not self._loaded:  # only we could have restored it: no need to load the driver
            return "checkpointed"
        try:
            return self._calls.state()
        except DriverError:
            return "unknown"

    def _answer(self, number: int, **fields: Any) -> None:
        self._send({"id": number, **fields})


def _serve(
    helper: CheckpointHelper, parent: int, commands: int, wake: int, reexecute: Callable[[], None]
) -> None:
    """Run until the parent has ended, or is back and we have to end."""
    watched = [commands, wake]
    alive: int | None = None
    with contextlib.suppress(OSError, AttributeError):
        alive = os.pidfd_open(parent)
        watched.append(alive)
    waiting = b""
    while os.getppid() == parent and not helper.ended:
        seconds = helper.wait_seconds()
        if alive is None:
            seconds = _LOOK_SECONDS if seconds is None else min(seconds, _LOOK_SECONDS)
        ready, _, _ = select.select(watched, [], [], seconds)
        if alive in ready:
            return
        if wake in ready:
            os.read(wake, 512)
            helper.leave("signal")
        if commands in ready:
            data = os.read(commands, 65536)
            if not data:
                watched.remove(commands)
                helper.leave("closed")
            *lines, waiting = (waiting + data).split(b"\n")
            for line in lines:
                helper.command(line.decode())
        helper.turn()
        if helper.rests and not waiting:
            reexecute()
            helper.stay()


def _reexecute(settings: dict[str, Any], kept: dict[str, Any], out: int, wake: int) -> None:
    """Replace this process by a new image without the driver; returns if that fails.

    No SIGTERM is lost: an earlier one is still in the pipe, a later one is blocked until the new
    image has its handler.
    """
    argument = json.dumps({**settings, "resume": kept})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        if select.select([wake], [], [], 0)[0]:
            raise InterruptedError
        for entry in Path("/proc/self/fd").iterdir():
            if int(entry.name) > _STDERR:
                with contextlib.suppress(OSError):  # the listing's own is closed by now
                    os.set_inheritable(int(entry.name), False)
        os.dup2(out, 1)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:-1], argument])  # noqa: S606 - ourselves
    except OSError:  # continue with the driver loaded
        os.dup2(_STDERR, 1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def main(argv: list[str]) -> int:
    """Run as the helper of the process that started us.

    Args:
        argv: one JSON object: `pid`, `driver`, `nvml`, `first_pause_seconds`,
            `longest_pause_seconds`; `resume` after a re-execution.

    Returns:
        0, or 1 if the driver cannot be used; the first message has the reason.
    """
    settings = json.loads(argv[0])
    parent = int(settings["pid"])
    # output of libraries must not mix with the messages
    out = os.dup(1)
    os.dup2(_STDERR, 1)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    resumed = settings.pop("resume", None)

    def send(message: dict[str, Any]) -> None:
        data = (json.dumps(message) + "\n").encode()
        with contextlib.suppress(OSError):  # the parent has closed the pipe
            while data:
                data = data[os.write(out, data) :]

    try:
        calls = DriverCalls(parent, driver=settings["driver"])
        if resumed is None:
            calls.start()
        helper = CheckpointHelper(
            calls,
            room=lambda need: DeviceRoom(parent, nvml=settings["nvml"], need=need),
            send=send,
            first_pause_seconds=settings["first_pause_seconds"],
            longest_pause_seconds=settings["longest_pause_seconds"],
            loaded=resumed is None,
        )
    except Exception as error:
        send({"event": "unusable", "error": str(error)})
        return 1
    if resumed is None:
        send({"event": "ready"})
    else:
        helper.resume(**resumed)
    _serve(helper, parent, 0, reading, lambda: _reexecute(settings, helper.kept(), out, reading))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
