"""Gives everything on the device back, the context included, and takes it again, by the driver.

The work is done by a keeper (`keeper.py`), a process of its own, since while this process is locked
its interpreter may stand still. If the keeper dies meanwhile, another takes its place, and where
none can be started this process brings itself back. Nobody may call torch or CUDA from here on
until `restore` has returned: close the `QuietGate` first, and open it last.
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
"""A keeper that answers no call for so long hangs: 140 GiB take 70 s at the driver's speed."""
_STATE_SECONDS: Final = 20.0
_TURN_SECONDS: Final = 0.1
_NEW_KEEPERS: Final = 3
_OWN_PAUSE_SECONDS: Final = 5.0
_END_IT: Final = "its device memory is lost: end it and start it from its last checkpoint"
_STAYS: Final = "the process stays checkpointed, restore it once there is room"


class DriverCheckpoint:
    """The driver level of one process. From any thread; one call at a time.

    Args:
        environ: the process's environment; of the keeper too.
        communicators: how many NCCL communicators of this process live.
        foreign: a clause about memory that is shared with others (CUDA IPC, exported or
            imported), "" where there is none.
        uuids: of the devices in use; all that NVML shows if there are none.
        reserved: bytes that this process is known to have on each, by UUID.
        settings: how keepers are started; from `environ` if None.
        call_seconds: when a keeper that does not answer is taken to hang.

    Attributes:
        state: `running`, `locked`, `checkpointed` or `failed`.
        size_bytes: what the process gave up, where NVML could tell.
        on_restored: called on a thread of ours when the lease has brought the process back.
        on_waiting: called there when the lease has run out and it can not come back yet; says why.
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
    def keeper_pid(self) -> int | None:
        """SIGTERM to it brings this process back, whatever state it is in."""
        link = self._link
        return link.pid if link is not None and link.alive else None

    def refusal(self) -> str:
        """Why it would not come back here, "" where it would. Starts nothing, makes no context."""
        return refusal(
            environ=self._environ,
            communicators=self._communicators(),
            foreign=self._foreign(),
            uuids=tuple(self._uuids()),
            driver=self._settings.driver,
            nvml=self._settings.nvml,
        )

    def prepare(self) -> None:
        """Start the keeper and let it ask for our state: may run beside copies, takes 0.2 to 1 s.

        Raises:
            YieldRefusedError: there is no keeper, or it may not act on this process.
        """
        with self._operating:
            if self._link is not None and self._link.alive:
                return
            try:
                self._link = self._start_keeper()
            except HelperError as error:
                reason = why_not_permitted(str(error))
                raise YieldRefusedError(f"driver checkpoint: {error}{reason}") from error

    def lock_and_checkpoint(
        self, timeout_seconds: float, lease_seconds: float | None = None
    ) -> PhaseTime:
        """Lock this process and move all its device memory to the host. Done already: 0 s.

        Args:
            timeout_seconds: for the lock, which waits for work that was submitted.
            lease_seconds: the keeper brings it back by itself after so long.

        Raises:
            YieldRefusedError: it runs, as before.
            YieldFailedError: it does not; `state` and the text say what it is.
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
                self._took,
                lock_seconds=timeout_seconds,
                lease_seconds=lease_seconds,
                least=least,
            )
        except HelperError as error:
            raise self._undone_without_keeper(str(error)) from error
        if answer["ok"]:
            size = sum(answer["need"].values())  # a lease may be over by now
            return PhaseTime(Phase.CHECKPOINT, time.monotonic() - started, size)
        said = f"driver checkpoint: {answer['error']}"
        if answer["state"] == "running":
            self._end()
            raise YieldRefusedError(f"{said}; the process runs on")
        raise self._stuck(said, answer)

    def _least(self) -> dict[str, int]:
        try:
            return dict(self._reserved())
        except Exception:  # an allocator that does not count: it is a lower bound, no more
            return {}

    def _took(self, answer: dict[str, Any]) -> None:
        """On the link's thread: the lease's own end may be the next thing that is heard."""
        if answer["ok"]:
            self._need = dict(answer["need"])
            self.state = "checkpointed"

    def restore(self, wait_seconds: float) -> PhaseTime:
        """Take everything back and run on. Done already: 0 s.

        Args:
            wait_seconds: for room on the devices.

        Raises:
            YieldRefusedError: there is no room; it stays checkpointed, try again.
            YieldFailedError: the driver can not bring it back.
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
        """Another lease from now on; None: none. Nothing where the process runs."""
        with self._operating:
            if self.state in {"checkpointed", "locked"}:
                self._renew(lease_seconds)

    def close(self, wait_seconds: float = 0.0) -> bool:
        """Send the keeper away, which brings the process back first.

        Returns:
            Whether it runs, after at most so long. If not, the keeper goes on trying.
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
        """In a forked child: its parent's keeper, lock and state are not its own."""
        self._pid = os.getpid()
        self._operating = threading.RLock()
        self._changed = threading.Event()
        self._link = None
        self._garbage.let_go()
        self.state = "running"

    # keepers

    def _start_keeper(self) -> HelperClient:
        link = HelperClient(self._settings, on_event=self._heard, on_gone=self._keeper_gone)
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
            # Yama lets a process be acted on by its ancestors alone, unless it names another one
            self._named_tracer = allow_tracing(link.pid)
            answer = link.ask("state", _STATE_SECONDS)
        if not answer["ok"]:
            raise HelperError(str(answer["error"]))

    def _replacement(self, dead: HelperClient | None) -> str:
        """A new keeper that goes on with lease and needs; the state that it finds."""
        self._link = None
        if dead is not None:
            dead.kill()
        link = self._start_keeper()
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
            _log.warning("the lease could not be changed: %s", error)

    def _ask_back(self, wait_seconds: float) -> dict[str, Any]:
        """Restore by the keeper at hand, else a new one, else by this process itself."""
        said, silent = "", 0
        for _ in range(_NEW_KEEPERS):
            link = self._link
            if self.state == "running":  # a lease has ended meanwhile
                return {"ok": True}
            try:
                if link is None or not link.alive:
                    self._replacement(link)
                    link = self._link
                if link is not None:
                    timeout = wait_seconds + self._call_seconds
                    return link.ask("restore", timeout, wait_seconds=wait_seconds)
            except HelperError as error:
                said = str(error)
                self._link = None
                if link is not None:
                    link.kill()
                silent += error.silent
                if silent > 1:  # a new one too: whoever calls the driver, hangs
                    return {"ok": False, "lost": True, "state": "unknown", "error": said}
        _log.warning("no keeper brings the process back, it does so itself: %s", said)
        return self._back_by_ourselves(wait_seconds)

    def _back_by_ourselves(self, wait_seconds: float) -> dict[str, Any]:
        try:
            calls = DriverCalls(os.getpid(), driver=self._settings.driver)
        except ImportError as error:
            return {"ok": False, "lost": True, "state": self.state, "error": str(error)}
        room = DeviceRoom(os.getpid(), need=self._need, ask_smi=True)
        why_not = bring_back_within(calls, room, wait_seconds)
        if why_not is None:
            return {"ok": True}
        lost = not why_not.out_of_memory
        return {"ok": False, "lost": lost, "state": "checkpointed", "error": str(why_not)}

    def _undone_without_keeper(self, said: str) -> Exception:
        """The keeper died or hangs in the middle of a checkpoint."""
        self._lease_end = None
        link, self._link = self._link, None
        if link is not None:
            link.kill()
        answer = self._ask_back(0.0)
        if answer["ok"]:
            self._end()
            return YieldRefusedError(f"driver checkpoint: {said}; undone, the process runs on")
        return self._stuck(f"driver checkpoint: {said}; {answer['error']}", answer)

    def _stuck(self, said: str, answer: dict[str, Any]) -> Exception:
        """It does not run, though it should."""
        if answer["state"] == "checkpointed" and not answer["lost"]:
            self.state = "checkpointed"
            return YieldFailedError(f"{said}; {_STAYS}")
        self.state = "failed"
        return YieldFailedError(f"{said}; the process is {answer['state']}, {_END_IT}")

    def _end(self) -> None:
        """The process runs; the keeper has nothing left to keep."""
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

    # what the keeper says by itself, on the link's thread

    def _heard(self, link: HelperClient, message: dict[str, Any]) -> None:
        if link is not self._link:
            return  # it says so as it goes
        try:
            if message["event"] == "restored":
                self._came_back(float(message["seconds"]), str(message["by"]))
            elif message["event"] == "waiting":
                told = str(message["error"])
                _log.warning("the lease is over, the process can not come back yet: %s", told)
                if self.on_waiting is not None:
                    self.on_waiting(told)
        except Exception:
            _log.warning("a message of the keeper was lost", exc_info=True)

    def _came_back(self, seconds: float, why: str) -> None:
        size = self.size_bytes
        self._end()
        self._tell_back(PhaseTime(Phase.RESTORE, seconds, size), why)

    def _tell_back(self, phase: PhaseTime, why: str) -> None:
        _log.info("brought back (%s) in %.2f s", why, phase.seconds)
        if self.on_restored is not None:
            self.on_restored(phase)

    def _keeper_gone(self, link: HelperClient, said: str) -> None:
        """It ended though there is something to keep: somebody else must end the lease."""
        if link is not self._link or self.state not in {"checkpointed", "failed"}:
            return
        _log.warning("%s; another takes its place", said)
        for _ in range(_NEW_KEEPERS):
            while not self._operating.acquire(timeout=_TURN_SECONDS):
                if self._link is not link:
                    return  # whoever operates has seen it
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
                _log.warning("no other keeper: %s", error)
                self._link = link  # its place is still to be taken
            finally:
                self._operating.release()
            if back is not None:
                self._tell_back(back, "somebody else")
                return
        self._end_lease_ourselves()

    def _end_lease_ourselves(self) -> None:
        """No keeper can be started: this thread takes its place, as long as it gets a turn."""
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
                self._tell_back(PhaseTime(Phase.RESTORE, seconds, size), "lease")
                return
            if self.on_waiting is not None:
                self.on_waiting(str(answer["error"]))
            self._changed.wait(_OWN_PAUSE_SECONDS)


def _there(link: HelperClient | None) -> HelperClient:
    if link is None:
        raise HelperError("there is no keeper")
    return link
