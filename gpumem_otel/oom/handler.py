"""Handles an allocation that failed, from torch's observer to the push.

The job's thread takes the snapshot and queues it, nothing else. A thread of ours that exists only
then (`urgent_queue.py`) exports the metrics first, since a counter is soon sent, then makes the
profile, writes it into the log and as a line of JSON, and sends it. The end of the process waits
for that thread, for two seconds at most, and then leaves the profile in the spool.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from gpumem_otel.base.clock import SystemClock
from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import PushError
from gpumem_otel.oom import handover
from gpumem_otel.oom.observer import ExceptHooks, Failure, OomWatch, is_out_of_memory
from gpumem_otel.oom.report import Account, json_line, log_block
from gpumem_otel.oom.urgent_queue import UrgentQueue
from gpumem_otel.profiles.pprof import gzip_bytes
from gpumem_otel.push.pyroscope import OOM_PROFILE_NAME, PyroscopeSink, series_labels
from gpumem_otel.push.spool import Spool, label_comments
from gpumem_otel.recording import torch_dump

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.base.profile import HeapProfile, Identity, StepStats
    from gpumem_otel.capture.profile_reader import LiveProfileReader
    from gpumem_otel.metrics.observation import Observation
    from gpumem_otel.metrics.otlp import OtelMetrics
    from gpumem_otel.oom.observer import SnapshotSource
    from gpumem_otel.oom.report import OutOfMemory
    from gpumem_otel.push.transport import Transport
    from gpumem_otel.serve.listener import Listener
    from gpumem_otel.settings.config import Config
    from gpumem_otel.snapshot.reading import Reading

WAIT_SECONDS = 2.0
"""How long the end of a process waits for its profiles in total."""

MAX_SNAPSHOTS = 8
"""Snapshot files that one process keeps: a job may fail and survive for days."""

PUSHING_RANKS = 8
"""Only lower ranks push: the server would refuse a thousand ranks that fail together."""

_log = named_logger("gpumem_otel.oom")


class OomQueries(Protocol):
    """What the handler asks of its process; `runtime.queries` has the meaning of each."""

    step_stats: Callable[[], StepStats]

    def identity(self) -> Identity: ...  # noqa: D102
    def observe(self) -> Observation | None: ...  # noqa: D102
    def forget(self) -> None: ...  # noqa: D102
    def encode(self, profile: HeapProfile) -> bytes: ...  # noqa: D102


class _Event(Enum):
    """What is queued besides failures."""

    COUNTED = "failures were counted and not read"
    ENDING = "the process ends"


_Item: TypeAlias = "Failure | _Event"


class OomHandler:
    """Handles failed allocations of this process, from `start` to `stop`.

    Args:
        config: everything resolved.
        environ: the proxy variables.
        source: read at the moment of a failure.
        reader: makes the profiles.
        queries: identity, steps and metrics of this process.
        counters: `exporter_errors` of stage `oom`, `exporter_dropped` for reason `spool`.
        listener: its last /metrics go to a supervisor, if there is one.
        otel: exports metrics at once.

    Attributes:
        hurried: the job waits: no rest between slices of work.
        gave_up: the wait for the last failure was in vain.
    """

    def __init__(
        self,
        config: Config,
        *,
        environ: Mapping[str, str],
        source: SnapshotSource,
        reader: LiveProfileReader,
        queries: OomQueries,
        counters: Counters,
        listener: Listener | None = None,
        otel: OtelMetrics | None = None,
    ) -> None:
        self.hurried = False
        self.gave_up = False
        self._waited_seconds = 0.0
        self._config = config
        self._source = source
        self._reader = reader
        self._queries = queries
        self._counters = counters
        self._listener = listener if config.serve.handover_dir else None
        self._otel = otel
        self._transport: Transport | None = None
        self._sink: PyroscopeSink | None = None
        if config.pyroscope.url:
            from gpumem_otel.push.transport import Transport  # noqa: PLC0415 - heavy

            # not that of the regular pushes, which may be inside one that hangs
            self._transport = Transport(config.pyroscope, environ=environ)
            self._sink = PyroscopeSink(
                self._transport, config.pyroscope, queries.identity, counters
            )
        self._spool = Spool(config.spool_dir, on_dropped=self._dropped)
        self._sending = ""  # the spool's file of the profile that is being sent
        self._logged: set[type[Exception]] = set()
        self._snapshots: deque[Path] = deque()
        self._urgent: UrgentQueue[_Item] = UrgentQueue(
            self._handle, seconds=config.pyroscope.timeout_seconds, on_dropped=self._dropped
        )
        self._watch = OomWatch(
            source, counters=counters, on_failure=self._put, on_counted=self._put_counted
        )
        self._excepthooks = ExceptHooks(self._before_exit)

    # life

    def start(self) -> None:
        """Observe failures. CUDA is up."""
        self._watch.start()

    def stop(self, timeout: float) -> None:
        """Wait for what is under way, then stop observing."""
        if self._listener is not None and not self.gave_up:
            self._urgent.put(_Event.ENDING)
        self.wait(timeout)
        self._watch.stop()
        self._excepthooks.stop()
        self._close_connection()

    @property
    def busy(self) -> bool:
        """Whether a failure is being read or reported."""
        return self._watch.busy or not self._urgent.wait(0.0)

    def abandon_after_fork(self) -> None:
        """In a forked child: wait for nothing, drop the parent's connection."""
        self._watch.stop()
        if self._transport is not None:
            self._transport.abandon_after_fork()

    def wait(self, timeout: float = WAIT_SECONDS) -> bool:
        """Wait until all failures are reported and sent; whether they are.

        All calls since the last failure wait for two seconds at most together.
        """
        started = time.monotonic()
        self.hurried = True
        done = self._urgent.wait(max(min(timeout, WAIT_SECONDS - self._waited_seconds), 0.0))
        if done:
            self.hurried = False
            return True
        self._waited_seconds += time.monotonic() - started
        self.gave_up = True
        # a push that is under way may never end: `gpumem-otel push` can send its file
        self._run("oom", self._release_file)
        return False

    # on the job's threads

    def _put(self, failure: Failure) -> None:
        self.gave_up, self._waited_seconds = False, 0.0
        self._excepthooks.start()
        self._urgent.put(failure)

    def _put_counted(self) -> None:
        self._excepthooks.start()
        # behind a push that hangs, many of these would displace the failures
        self._urgent.put(_Event.COUNTED, once=True)

    def _dropped(self) -> None:
        self._counters.add("exporter_dropped", reason="spool")

    def _before_exit(self, error: BaseException | None, ending: bool) -> None:
        """An exception ends the process or a thread: the last moment at which memory is held."""
        self._watch.on_uncaught(error)
        if ending or is_out_of_memory(error):
            self.wait()

    # on the thread of `UrgentQueue`

    def _handle(self, item: _Item, seconds: float) -> None:
        if self._listener is not None:
            listener = self._listener
            self._run("oom", lambda: self._leave_final_metrics(listener))
        if item is _Event.ENDING:
            return
        if self._otel is not None:
            self._queries.forget()
            self._run("push", self._otel.flush)
        if isinstance(item, Failure):
            account = self._account(item)
            self._run("oom", lambda: _write_to_stderr(json_line(account)))
            self._run("oom", lambda: _log.warning("%s", log_block(account)))
            self._run("oom", lambda: self._deliver(account, seconds))
            if self._config.oom.snapshot_dir and item.reading is not None:
                reading = item.reading
                self._run("oom", lambda: self._write_snapshot(account.oom, reading))

    def _run(self, stage: str, action: Callable[[], object]) -> None:
        """Do one thing; a failure is counted, logged once, and does not stop the others."""
        try:
            action()
        except Exception as error:
            self._counters.add("exporter_errors", stage=stage)
            kind = type(error)  # not its text, which may hold the name of a file
            if kind not in self._logged:
                self._logged.add(kind)
                _log.warning(
                    "an out-of-memory was not fully reported: %s: %s", kind.__name__, error
                )

    def _leave_final_metrics(self, listener: Listener) -> None:
        """Leave /metrics as it is now to the supervisor, which serves it after this process."""
        address, serve = listener.address, self._config.serve
        if address is None:
            return
        from gpumem_otel.metrics.prometheus import Exposition  # noqa: PLC0415 - by the listener

        self._queries.forget()
        observation = self._queries.observe()
        exposition = Exposition(
            lambda: observation,
            self._config.metrics.level,
            clock=SystemClock(),
            counters=self._counters,
        )
        content_type, body = exposition.render()
        final = handover.FinalMetrics(
            pid=os.getpid(),
            host=address[0],
            port=address[1],
            scheme=listener.scheme,
            guarded=handover.is_guarded(serve),
            ooms=sum(s.ooms for s in observation.devices) if observation is not None else 0,
            content_type=content_type,
            body=body.decode(),
        )
        handover.leave(serve.handover_dir, final)

    def _account(self, failure: Failure) -> Account:
        account = Account(
            oom=failure.oom,
            rank=self._queries.identity().rank,
            steps=self._queries.step_stats().steps,
        )
        try:
            return self._with_profile(account, failure)
        except Exception as error:
            self._counters.add("exporter_errors", stage="oom")
            return replace(account, note=f"the profile could not be made: {error}")

    def _with_profile(self, account: Account, failure: Failure) -> Account:
        device, reading = failure.oom.device, failure.reading
        if reading is not None:
            profiles = self._reader.profiles_of(self._source.completed(reading))
            note = (
                "taken after the exception: memory freed by then is missing" if failure.late else ""
            )
        else:
            last = self._reader.last()
            if last is None:
                return replace(account, note="a snapshot would have stopped the job for too long")
            age_seconds, profiles = last
            note = f"of {age_seconds:.0f} s before: a snapshot would have stopped the job too long"
        profile = next((each for each in profiles if each.device == device), None)
        totals = None if reading is None else reading.snapshot.totals(device)
        return replace(account, profile=profile, totals=totals, note=note)

    def _deliver(self, account: Account, seconds: float) -> None:
        """Send the profile; it stays in the spool if this rank does not push, or that fails."""
        if account.profile is None:
            return
        oom, identity = account.oom, self._queries.identity()
        labels = series_labels(
            identity, device=oom.device, name=OOM_PROFILE_NAME, extra=(("oom_id", oom.oom_id),)
        )
        comments = (*account.profile.comments, *_comments(account), *label_comments(labels))
        data = self._queries.encode(replace(account.profile, comments=comments))
        sink = self._sink if identity.rank < PUSHING_RANKS else None
        name = f"{oom.oom_id}-rank{identity.rank}-device{oom.device}"
        kept = ""
        with contextlib.suppress(Exception):  # reported below, if the push fails as well
            kept = self._spool.write(name, gzip_bytes(data), sending=sink is not None)
        if sink is None:
            self._log_kept(oom, kept, "this rank does not push" if self._sink else "no server")
            return
        self._sending = kept
        try:
            sink.send(data, labels, seconds)
        except PushError as error:
            self._counters.add("exporter_errors", stage="push")
            self._release_file()  # `wait` may have done so before
            self._log_kept(oom, self._spool.free_name(kept), str(error))
        else:
            self._sending = ""
            self._counters.set("last_push_timestamp_seconds", oom.time_ns / 1e9, kind="oom")
            if kept:
                self._spool.delete(kept)  # both names: it may have been released meanwhile
                self._spool.delete(self._spool.free_name(kept))
            _log.info("the profile of oom_id %s is stored in Pyroscope", oom.oom_id)
        finally:
            self._close_connection()  # the next failure is a minute away, if there is one

    def _close_connection(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _release_file(self) -> None:
        """Let `gpumem-otel push` send the file that was being sent."""
        kept, self._sending = self._sending, ""
        if kept:
            self._spool.release(kept)

    def _log_kept(self, oom: OutOfMemory, kept: str, why: str) -> None:
        if not kept:
            self._dropped()
            _log.warning(
                "the profile of oom_id %s is lost: %s, and %s cannot be written",
                oom.oom_id, why, self._spool.folder,
            )  # fmt: skip
            return
        _log.warning(
            "the profile of oom_id %s waits in %s (%s): `gpumem-otel push` sends it",
            oom.oom_id, f"{self._spool.folder}/{kept}", why,
        )  # fmt: skip

    def _write_snapshot(self, oom: OutOfMemory, reading: Reading) -> None:
        snapshot = reading.snapshot
        devices = range(max(snapshot.devices(), default=-1) + 1)
        raw = {
            "segments": list(snapshot.raw_segments()),
            "device_traces": [list(snapshot.raw_events(device)) for device in devices],
            "allocator_settings": dict(snapshot.settings),
        }
        folder = Path(self._config.oom.snapshot_dir)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{oom.oom_id}-rank{self._queries.identity().rank}.pickle"
        data = torch_dump.dumped(raw, target.name)
        temporary = target.with_suffix(".part")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            temporary.rename(target)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._snapshots.append(target)
        if len(self._snapshots) > MAX_SNAPSHOTS:
            self._snapshots.popleft().unlink(missing_ok=True)
        _log.warning("the snapshot of oom_id %s is %s", oom.oom_id, target)


def _comments(account: Account) -> tuple[str, ...]:
    oom = account.oom
    numbers = (
        f"out of memory: asked for {oom.asked_bytes} bytes, {oom.free_bytes} free on the device, "
        f"limit {oom.limit_bytes}, thread {oom.thread}, step {account.steps}"
    )
    return (numbers, account.note) if account.note else (numbers,)


def _write_to_stderr(line: str) -> None:
    """Write a line in one piece: ranks share stderr."""
    stream = sys.stderr
    if stream is None:
        return
    try:
        # not through Python's buffer: a daemon thread that holds its lock when the process ends
        # turns the exit code into an abort
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):
        stream.write(f"{line}\n")
        stream.flush()
    else:
        os.write(descriptor, f"{line}\n".encode())
