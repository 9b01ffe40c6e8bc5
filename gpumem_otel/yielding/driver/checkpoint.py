"""The driver level: gives back all device memory, the context included, and restores it.

A helper process (`helper.py`) does the work, since this process's interpreter may be blocked while
it is locked. If the helper dies, another replaces it; if none can be started, this process brings
itself back. No thread may call torch or CUDA until `restore` has returned: close the `QuietGate`
first, and open it last.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import YieldFailedError, YieldRefusedError
from gpumem_otel.settings.config import process_environ
from gpumem_otel.yielding.copy.gc_control import HeldGarbage
from gpumem_otel.yielding.driver.driver_api import DeviceRoom, DriverCalls, bring_back_within
from gpumem_otel.yielding.driver.helper_client import HelperClient, HelperError, HelperSettings
from gpumem_otel.yielding.driver.preflight import (
    allow_tracing,
    refusal,
    why_not_permitted,
    yama_scope,
)
from gpumem_otel.yielding.values import Phase, PhaseTime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_log = named_logger("gpumem_otel.yield")

_CALL_SECONDS: Final = 300.0
"""A helper that does not answer for this long hangs: 140 GiB take 70 s at the driver's speed."""
_STATE_SECONDS: Final = 20.0
_TURN_SECONDS: Final = 0.1
_NEW_HELPERS: Final = 3
_OWN_PAUSE_SECONDS: Final = 5.0
_END_IT: Final = "its device memory is lost: end it and start it from its last checkpoint"
_STAYS: Final = "the process stays checkpointed, restore it once there is enough device memory"


class DriverCheckpoint:
    """The driver level of one process. From any thread; one call at a time.

    Args:
        environ: the environment of this process and of the helper.
        communicators: number of living NCCL communicators of this process.
        foreign: a clause about memory that is shared with others (CUDA IPC, exported or
            imported), "" for none.
        uuids: of the devices in use; if empty, all that NVML lists.
        reserved: bytes that this process is known to have on each, by UUID.
        settings: how helpers are started; from `environ` if None.
        call_seconds: after which a helper that does not answer counts as hanging.

    Attributes:
        state: `running`, `locked`, `checkpointed` or `failed`.
        size_bytes: what the process gave up, as far as NVML reports it.
        on_restored: called on a thread of ours when the lease has brought the process back.
        on_waiting: called there, with the reason, when an expired lease cannot be ended yet.
    """

    def __init__(
        self,
        *,
        environ: Mapping[str, str] | None = None,
        communicators: Callable[[], int] = int,
        foreign: Callable[[], str] = str,
        uuids: Callable[[], Iterable[str]] = tuple,
        reserved: Callable[[], Mapping[str, int]] = dict,
        settings: HelperSettings | None = None,
        call_seconds: float = _CALL_SECONDS,
    ) -> None:
        self.state = "running"
        self.on_restored: Callable[[PhaseTime], object] | None = None
        self.on_waiting: Callable[[str], object] | None = None
        self._environ = process_environ() if environ is None else environ
        self._settings = settings or HelperSettings(environ=self._environ)
        self._communicators = communicators
        self._foreign = foreign
        self._uuids = uuids
        self._reserved = reserved
        self._call_seconds = call_seconds
        self._pid = os.getpid()
        self._operating = threading.RLock()
        self._link: HelperClient | None = None
        self._need: dict[str, int] = {}
        self._lease_end: float | None = None
        self._changed = threading.Event()
        self._named_tracer = False
        self._garbage = HeldGarbage()

    @property
    def size_bytes(self) -> int:
        """See the class."""
        return sum(self._need.values())

    @property
    def helper_pid(self) -> int | None:
        """The helper's pid; SIGTERM to it brings this process back, whatever its state."""
        link = self._link
        return link.pid if link is not None and link.alive else None

    def refusal(self) -> str:
        """Why a restore would fail here, "" if it would not. Starts nothing, makes no context."""
        return refusal(
            environ=self._environ,
            communicators=self._communicators(),
            foreign=self._foreign(),
            uuids=tuple(self._uuids()),
            driver=self._settings.driver,
            nvml=self._settings.nvml,
        )

    def prepare(self) -> None:
        """Start the helper and query our state; takes 0.2 to 1 s, may run during copies.

        Raises:
            YieldRefusedError: no helper can be started, or it has no permission.
        """
        with self._operating:
            if self._link is not None and self._link.alive:
                return
            try:
                self._link = self._start_helper()
            except HelperError as error:
                reason = why_not_permitted(str(error))
                raise YieldRefusedError(f"driver checkpoint: {error}{reason}") from error

    def lock_and_checkpoint(
        self, timeout_seconds: float, lease_seconds: float | None = None
    ) -> PhaseTime:
        """Lock this process and move all its device memory to the host; 0 s if already done.

        Args:
            timeout_seconds: for the lock, which waits for submitted work.
            lease_seconds: after which the helper brings it back by itself.

        Raises:
            YieldRefusedError: the process keeps running.
            YieldFailedError: the process does not run; see `state` and the message.
        """
        with self._operating:
            if self.state == "checkpointed":
                self._renew(lease_seconds)
                return PhaseTime(Phase.CHECKPOINT, 0.0, self.size_bytes)
            if self.state != "running":
                raise YieldFailedError(f"driver checkpoint: the process is {self.state}; {_END_IT}")
            reason = self.refusal()
            if reason:
                raise YieldRefusedError(f"driver checkpoint: {reason}")
            self.prepare()
            return self._checkpoint(timeout_seconds, lease_seconds)

    def _checkpoint(self, timeout_seconds: float, lease_seconds: float | None) -> PhaseTime:
        started = time.monotonic()
        link = self._link
        least = self._least()
        self._lease_end = None if lease_seconds is None else started + lease_seconds
        self._need = {}
        self.state = "locked"
        self._changed.clear()
        self._garbage.hold()
        try:
            answer = _there(link).ask(
                "checkpoint",
                timeout_seconds + self._call_seconds,
                self._on_checkpointed,
                lock_seconds=timeout_seconds,
                lease_seconds=lease_seconds,
                least=least,
            )
        except HelperError as error:
            raise self._undone_without_helper(str(error)) from error
        if answer["ok"]:
            size = sum(answer["need"].values())  # not `size_bytes`: the lease may have ended
            return PhaseTime(Phase.CHECKPOINT, time.monotonic() - started, size)
        why = f"driver checkpoint: {answer['error']}"
        if answer["state"] == "running":
            self._end()
            raise YieldRefusedError(f"{why}; the process keeps running")
        raise self._stuck(why, answer)

    def _least(self) -> dict[str, int]:
        try:
            return dict(self._reserved())
        except Exception:  # an allocator without counters: this is only a lower bound
            return {}

    def _on_checkpointed(self, answer: dict[str, Any]) -> None:
        """On the client's thread, since the end of the lease may be the next message."""
        if answer["ok"]:
            self._need = dict(answer["need"])
            self.state = "checkpointed"

    def restore(self, wait_seconds: float) -> PhaseTime:
        """Restore everything and continue; 0 s if already done.

        Args:
            wait_seconds: for memory on the devices.

        Raises:
            YieldRefusedError: not enough device memory; it stays checkpointed, try again.
            YieldFailedError: the driver cannot bring it back.
        """
        started = time.monotonic()
        with self._operating:
            if self.state == "running":
                return PhaseTime(Phase.RESTORE, 0.0, 0)
            answer = self._ask_back(wait_seconds)
            if answer["ok"]:
                size = self.size_bytes
                self._end()
                return PhaseTime(Phase.RESTORE, time.monotonic() - started, size)
            if answer["lost"]:
                raise self._stuck(f"restore: {answer['error']}", answer)
            self.state = "checkpointed"
            raise YieldRefusedError(f"restore: {answer['error']}; {_STAYS}")

    def renew(self, lease_seconds: float | None) -> None:
        """Replace the lease, None for none; does nothing if the process runs."""
        with self._operating:
            if self.state in {"checkpointed", "locked"}:
                self._renew(lease_seconds)

    def close(self, wait_seconds: float = 0.0) -> bool:
        """End the helper, which brings the process back first.

        Returns:
            Whether the process runs, after at most `wait_seconds`. If not, the helper keeps trying.
        """
        with self._operating:
            link = self._link
            if self.state == "running":
                self._link = None
                self._name_no_tracer()
        if link is not None and self._pid == os.getpid():
            link.close()
            if self.state != "running":
                self._changed.wait(wait_seconds)
        return self.state == "running"

    def forget_parent(self) -> None:
        """In a forked child: drop the parent's helper, lock and state."""
        self._pid = os.getpid()
        self._operating = threading.RLock()
        self._changed = threading.Event()
        self._link = None
        self._garbage.let_go()
        self.state = "running"

    # helpers

    def _start_helper(self) -> HelperClient:
        link = HelperClient(self._settings, on_event=self._on_event, on_gone=self._helper_gone)
        try:
            self._try_out(link)
        except BaseException:
            link.kill()
            self._name_no_tracer()
            raise
        return link

    def _try_out(self, link: HelperClient) -> None:
        answer = link.ask("state", _STATE_SECONDS)
        if not answer["ok"] and yama_scope() == 1 and why_not_permitted(answer["error"]):
            # Yama allows only ancestors to trace a process, unless it names another one
            self._named_tracer = allow_tracing(link.pid)
            answer = link.ask("state", _STATE_SECONDS)
        if not answer["ok"]:
            raise HelperError(str(answer["error"]))

    def _replacement(self, dead: HelperClient | None) -> str:
        """Start a new helper with our lease and needs; returns the state of this process."""
        self._link = None
        if dead is not None:
            dead.kill()
        link = self._start_helper()
        lease = self._lease_end
        left = None if lease is None else max(lease - time.monotonic(), 0.0)
        try:
            answer = link.ask("adopt", _STATE_SECONDS, need=self._need, lease_seconds=left)
        except HelperError:
            link.kill()
            raise
        self._link = link
        return str(answer["state"])

    def _renew(self, lease_seconds: float | None) -> None:
        self._lease_end = None if lease_seconds is None else time.monotonic() + lease_seconds
        try:
            _there(self._link).ask(
                "adopt", _STATE_SECONDS, need=self._need, lease_seconds=lease_seconds
            )
        except HelperError as error:
            _log.warning("changing the lease failed: %s", error)

    def _ask_back(self, wait_seconds: float) -> dict[str, Any]:
        """Restore by the current helper, else by a new one, else by this process itself."""
        why, hanging = "", 0
        for _ in range(_NEW_HELPERS):
            link = self._link
            if self.state == "running":  # the lease has ended meanwhile
                return {"ok": True}
            try:
                if link is None or not link.alive:
                    self._replacement(link)
                    link = self._link
                if link is not None:
                    timeout = wait_seconds + self._call_seconds
                    return link.ask("restore", timeout, wait_seconds=wait_seconds)
            except HelperError as error:
                why = str(error)
                self._link = None
                if link is not None:
                    link.kill()
                hanging += error.silent
                if hanging > 1:  # the new one too: the driver hangs
                    return {"ok": False, "lost": True, "state": "unknown", "error": why}
        _log.warning("no helper available, the process brings itself back: %s", why)
        return self._back_by_ourselves(wait_seconds)

    def _back_by_ourselves(self, wait_seconds: float) -> dict[str, Any]:
        try:
            calls = DriverCalls(os.getpid(), driver=self._settings.driver)
        except ImportError as error:
            return {"ok": False, "lost": True, "state": self.state, "error": str(error)}
        room = DeviceRoom(os.getpid(), need=self._need, ask_smi=True)
        failure = bring_back_within(calls, room, wait_seconds)
        if failure is None:
            return {"ok": True}
        lost = not failure.out_of_memory
        return {"ok": False, "lost": lost, "state": "checkpointed", "error": str(failure)}

    def _undone_without_helper(self, why: str) -> Exception:
        """Undo after the helper died or hung during a checkpoint; returns the error to raise."""
        self._lease_end = None
        link, self._link = self._link, None
        if link is not None:
            link.kill()
        answer = self._ask_back(0.0)
        if answer["ok"]:
            self._end()
            return YieldRefusedError(f"driver checkpoint: {why}; undone, the process keeps running")
        return self._stuck(f"driver checkpoint: {why}; {answer['error']}", answer)

    def _stuck(self, why: str, answer: dict[str, Any]) -> Exception:
        """The error for a process that could not be brought back."""
        if answer["state"] == "checkpointed" and not answer["lost"]:
            self.state = "checkpointed"
            return YieldFailedError(f"{why}; {_STAYS}")
        self.state = "failed"
        return YieldFailedError(f"{why}; the process is {answer['state']}, {_END_IT}")

    def _end(self) -> None:
        """The process runs again: end the helper and reset."""
        self.state = "running"
        self._lease_end, self._need = None, {}
        link, self._link = self._link, None
        if link is not None:
            link.close()
        self._name_no_tracer()
        self._garbage.let_go()
        self._changed.set()

    def _name_no_tracer(self) -> None:
        if self._named_tracer:
            self._named_tracer = False
            allow_tracing()

    # events of the helper, on the client's thread

    def _on_event(self, link: HelperClient, message: dict[str, Any]) -> None:
        if link is not self._link:
            return  # a helper that was replaced
        try:
            if message["event"] == "restored":
                size = self.size_bytes
                self._end()
                phase = PhaseTime(Phase.RESTORE, float(message["seconds"]), size)
                self._report_restored(phase, str(message["by"]))
            elif message["event"] == "waiting":
                why = str(message["error"])
                _log.warning("the lease has expired, the process cannot be restored yet: %s", why)
                if self.on_waiting is not None:
                    self.on_waiting(why)
        except Exception:
            _log.warning("handling a message of the helper failed", exc_info=True)

    def _report_restored(self, phase: PhaseTime, why: str) -> None:
        _log.info("brought back (%s) in %.2f s", why, phase.seconds)
        if self.on_restored is not None:
            self.on_restored(phase)

    def _helper_gone(self, link: HelperClient, why: str) -> None:
        """The helper ended while needed: replace it, so that the lease is ended."""
        if link is not self._link or self.state not in {"checkpointed", "failed"}:
            return
        _log.warning("%s; it is replaced", why)
        for _ in range(_NEW_HELPERS):
            while not self._operating.acquire(timeout=_TURN_SECONDS):
                if self._link is not link:
                    return  # the running operation has replaced it
            back = None
            try:
                if self._link is not link or self.state != "checkpointed":
                    return
                size = self.size_bytes
                if self._replacement(None) != "running":
                    return
                self._end()
                back = PhaseTime(Phase.RESTORE, 0.0, size)
            except HelperError as error:
                _log.warning("the helper could not be replaced: %s", error)
                self._link = link  # still to be replaced
            finally:
                self._operating.release()
            if back is not None:
                self._report_restored(back, "somebody else")
                return
        self._end_lease_ourselves()

    def _end_lease_ourselves(self) -> None:
        """If no helper can be started, this thread ends the lease, unless it is blocked."""
        lease = self._lease_end
        if lease is None or sys.is_finalizing():
            return
        if self._changed.wait(max(lease - time.monotonic(), 0.0)):
            return
        started = time.monotonic()
        while self.state == "checkpointed":
            with self._operating:
                if self.state != "checkpointed":
                    return
                size = self.size_bytes
                answer = self._back_by_ourselves(0.0)
                if answer["ok"]:
                    self._end()
            if answer["ok"]:
                seconds = time.monotonic() - started
                self._report_restored(PhaseTime(Phase.RESTORE, seconds, size), "lease")
                return
            if self.on_waiting is not None:
                self.on_waiting(str(answer["error"]))
            self._changed.wait(_OWN_PAUSE_SECONDS)


def _there(link: HelperClient | None) -> HelperClient:
    if link is None:
        raise HelperError("there is no helper")
    return link
