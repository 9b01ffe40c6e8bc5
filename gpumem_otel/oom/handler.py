"""What is done about an allocation that failed, from torch's observer to the push.

On the job's thread the snapshot is taken and queued, nothing else. A thread of ours that exists
only then (`oom/urgent_queue.py`) tells the metrics first, since a counter is soon sent, then makes
the profile, writes it into the log and as a line of JSON, and sends it. Whoever ends the process
waits for that thread, for two seconds at most, and then leaves the profile in the spool.
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
"""What the way out of a process waits for its profiles, all in all."""

MAX_SNAPSHOTS = 8
"""Files of one process in the folder for torch's snapshots; a job may fail and survive for days."""

PUSHING_RANKS = 8
"""Ranks below it send; a thousand ranks that fail together would be refused."""

_log = named_logger("gpumem_otel.oom")


class OomQueries(Protocol):
    """What the handler asks of its process; see `runtime.queries`."""

    def identity(self) -> Identity:
        """Who this process is."""
        ...

    def step_stats(self) -> StepStats:
        """Its steps."""
        ...

    def observe(self) -> Observation | None:
        """The values of all metrics."""
        ...

    def forget(self) -> None:
        """Answer the next question for metrics from values of now."""
        ...

    def encode(self, profile: HeapProfile) -> bytes:
        """One profile as uncompressed pprof within the budget."""
        ...


class _Told(Enum):
    """What is queued beside failures."""

    COUNTED = "failures were counted and not looked at"
    ENDING = "the process ends"


_Item: TypeAlias = "Failure | _Told"


class OomHandler:
    """Looks at failed allocations of this process, from `start` to `stop`.

    Args:
        config: everything resolved.
        environ: the proxy variables.
        source: read at the moment of a failure.
        reader: makes the profiles.
        queries: who this process is, its steps; encodes.
        counters: `exporter_errors` of stage `oom`, `exporter_dropped` for reason `spool`.
        listener: its /metrics are left to a supervisor, where there is one.
        otel: exports at once.

    Attributes:
        hurried: somebody waits: no resting between slices of work.
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

            # its own: that of the regular pushes may be inside one that hangs
            self._transport = Transport(config.pyroscope, environ=environ)
            self._sink = PyroscopeSink(
                self._transport, config.pyroscope, queries.identity, counters
            )
        self._spool = Spool(config.spool_dir, on_dropped=self._dropped)
        self._sending = ""
        self._said: set[type[Exception]] = set()
        self._snapshots: deque[Path] = deque()
        self._urgent: UrgentQueue[_Item] = UrgentQueue(
            self._handle, seconds=config.pyroscope.timeout_seconds, on_dropped=self._dropped
        )
        self._watch = OomWatch(
            source, counters=counters, on_failure=self._put, on_counted=self._put_counted
        )
        self._way_out = ExceptHooks(self._before_exit)

    # life

    def start(self) -> None:
        """Hear of failures. CUDA is up."""
        self._watch.start()

    def stop(self, timeout: float) -> None:
        """Wait for what is under way, then hear of nothing any more."""
        if self._listener is not None and not self.gave_up:
            self._urgent.put(_Told.ENDING)
        self.wait(timeout)
        self._watch.stop()
        self._way_out.stop()
        self._close_connection()

    @property
    def busy(self) -> bool:
        """Whether a failure is looked at just now, or told of."""
        return self._watch.busy or not self._urgent.wait(0.0)

    def abandon_after_fork(self) -> None:
        """In a forked child: nothing is waited for, the parent's connection is let go."""
        self._watch.stop()
        if self._transport is not None:
            self._transport.abandon_after_fork()

    def wait(self, timeout: float = WAIT_SECONDS) -> bool:
        """Wait until all failures are told of and sent; whether they are.

        Whoever waits, and how often: two seconds at most since the last failure.
        """
        started = time.monotonic()
        self.hurried = True
        done = self._urgent.wait(max(min(timeout, WAIT_SECONDS - self._waited_seconds), 0.0))
        if done:
            self.hurried = False
            return True
        self._waited_seconds += time.monotonic() - started
        self.gave_up = True
        # a push that is under way may never end: its file waits for `gpumem-otel push`
        self._run("oom", self._give_back)
        return False

    # on the job's threads

    def _put(self, failure: Failure) -> None:
        self.gave_up, self._waited_seconds = False, 0.0
        self._way_out.start()
        self._urgent.put(failure)

    def _put_counted(self) -> None:
        self._way_out.start()
        # behind a push that hangs, many of them would crowd out the failures
        self._urgent.put(_Told.COUNTED, once=True)

    def _dropped(self) -> None:
        self._counters.add("exporter_dropped", reason="spool")

    def _before_exit(self, error: BaseException | None, ending: bool) -> None:
        """An exception ends the process, or a thread: the last moment at which memory is held."""
        self._watch.on_way_out(error)
        if ending or is_out_of_memory(error):
            self.wait()

    # on the thread of `UrgentQueue`

    def _handle(self, item: _Item, seconds: float) -> None:
        if self._listener is not None:
            listener = self._listener
            self._run("oom", lambda: self._leave_last_words(listener))
        if item is _Told.ENDING:
            return
        if self._otel is not None:
            self._queries.forget()
            self._run("push", self._otel.flush)
        if isinstance(item, Failure):
            account = self._account(item)
            self._run("oom", lambda: _write_error(json_line(account)))
            self._run("oom", lambda: _log.warning("%s", log_block(account)))
            self._run("oom", lambda: self._deliver(account, seconds))
            if self._config.oom.snapshot_dir and item.reading is not None:
                reading = item.reading
                self._run("oom", lambda: self._write_snapshot(account.oom, reading))

    def _run(self, stage: str, action: Callable[[], object]) -> None:
        """Do one thing; what fails is counted, logged once, and holds up nothing else."""
        try:
            action()
        except Exception as error:
            self._counters.add("exporter_errors", stage=stage)
            kind = type(error)  # not its text, which may hold the name of a file
            if kind not in self._said:
                self._said.add(kind)
                _log.warning(
                    "an out-of-memory could not be told of in full: %s: %s", kind.__name__, error
                )

    def _leave_last_words(self, listener: Listener) -> None:
        """Leave /metrics as it is now to who serves it once this process is gone."""
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
        words = handover.FinalMetrics(
            pid=os.getpid(),
            host=address[0],
            port=address[1],
            scheme=listener.scheme,
            guarded=handover.is_guarded(serve),
            ooms=sum(s.ooms for s in observation.devices) if observation is not None else 0,
            content_type=content_type,
            body=body.decode(),
        )
        handover.leave(serve.handover_dir, words)

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
            note = "of the way out: what had unwound by then is missing" if failure.late else ""
        else:
            last = self._reader.last()
            if last is None:
                return replace(account, note="the snapshot would have held up the job for too long")
            age_seconds, profiles = last
            note = f"of {age_seconds:.0f} s before: a snapshot would have held up the job too long"
        profile = next((one for one in profiles if one.device == device), None)
        books = None if reading is None else reading.snapshot.books(device)
        return replace(account, profile=profile, books=books, note=note)

    def _deliver(self, account: Account, seconds: float) -> None:
        """Send the profile; keep it in the spool where that is not for this rank, or fails."""
        if account.profile is None:
            return
        oom, identity = account.oom, self._queries.identity()
        labels = series_labels(
            identity, device=oom.device, name=OOM_PROFILE_NAME, extra=(("oom_id", oom.oom_id),)
        )
        comments = (*_comments(account), *label_comments(labels))
        data = self._queries.encode(_with_comments(account.profile, comments))
        sink = self._sink if identity.rank < PUSHING_RANKS else None
        name = f"{oom.oom_id}-rank{identity.rank}-device{oom.device}"
        kept = ""
        with contextlib.suppress(Exception):  # said below, where the push fails as well
            kept = self._spool.write(name, gzip_bytes(data), sending=sink is not None)
        if sink is None:
            self._say_kept(oom, kept, "this rank does not push" if self._sink else "no server")
            return
        self._sending = kept
        try:
            sink.send(data, labels, seconds)
        except PushError as error:
            self._counters.add("exporter_errors", stage="push")
            self._give_back()  # who waited for it in vain may have done so before
            self._say_kept(oom, self._spool.free_name(kept), str(error))
        else:
            self._sending = ""
            self._counters.set("last_push_timestamp_seconds", oom.time_ns / 1e9, kind="oom")
            if kept:
                self._spool.delete(kept)  # by both names: it may have been given back meanwhile
                self._spool.delete(self._spool.free_name(kept))
            _log.info("the profile of oom_id %s is stored in Pyroscope", oom.oom_id)
        finally:
            self._close_connection()  # the next one is a minute away, or never comes

    def _close_connection(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _give_back(self) -> None:
        """The file that was being sent waits for `gpumem-otel push`."""
        kept, self._sending = self._sending, ""
        if kept:
            self._spool.release(kept)

    def _say_kept(self, oom: OutOfMemory, kept: str, why: str) -> None:
        if not kept:
            self._dropped()
            _log.warning(
                "the profile of oom_id %s is lost: %s, and %s can not be written",
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
    told = (
        f"out of memory: asked for {oom.asked_bytes} bytes, {oom.free_bytes} free on the device, "
        f"limit {oom.limit_bytes}, thread {oom.thread}, step {account.steps}"
    )
    return (told, account.note) if account.note else (told,)


def _with_comments(profile: HeapProfile, comments: tuple[str, ...]) -> HeapProfile:
    return replace(profile, comments=(*profile.comments, *comments))


def _write_error(line: str) -> None:
    """One line on stderr, in one piece: ranks share it."""
    stream = sys.stderr
    if stream is None:
        return
    try:
        # past Python's own buffer: a daemon thread that holds its lock at the end of the process
        # would turn the exit code into an abort
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):
        stream.write(f"{line}\n")
        stream.flush()
    else:
        os.write(descriptor, f"{line}\n".encode())
