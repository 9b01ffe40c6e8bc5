"""The parts that send: metrics over OTLP, profiles of memory, profiles of the host's CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpumem_otel.answers import Answers
    from gpumem_otel.capture.beside import Beside
    from gpumem_otel.capture.readout import Reader
    from gpumem_otel.config import Config
    from gpumem_otel.core.counters import Counters
    from gpumem_otel.core.model import HeapProfile, ProfileKind
    from gpumem_otel.core.ports import Observer, ProfileSink
    from gpumem_otel.export.otel import OtelMetrics
    from gpumem_otel.export.pusher import Pusher
    from gpumem_otel.export.transport import Transport
    from gpumem_otel.readparts import Armed
    from gpumem_otel.undoing import Undoing

__all__ = ["ExportParts"]


class ExportParts:
    """Starts what sends by itself.

    Args:
        config: everything resolved.
        environ: the process's environment, for proxies.
        counters: what the parts count about themselves.
        undoing: told of each part that starts.
        armed: what is read, once CUDA is there.
        observe: where the metrics get their values.
        on_profiles: called on the background thread with each set of profiles read.

    Attributes:
        otel: exports metrics; None where nobody wants them.
    """

    def __init__(
        self,
        config: Config,
        *,
        environ: Mapping[str, str],
        counters: Counters,
        undoing: Undoing,
        armed: Callable[[], Armed],
        observe: Observer,
        on_profiles: Sequence[Callable[[ProfileKind, tuple[HeapProfile, ...]], None]] = (),
    ) -> None:
        self._config = config
        self._environ = environ
        self._counters = counters
        self._undoing = undoing
        self._armed = armed
        self._observe = observe
        self._on_profiles = on_profiles
        self._pusher: Pusher | None = None
        self._transport: Transport | None = None
        self.otel: OtelMetrics | None = None

    def start_metrics(self) -> None:
        """Export over OTLP, where that is wanted."""
        if not self._config.metrics.otlp:
            return
        from gpumem_otel.export.otel import OtelMetrics

        otel = OtelMetrics(
            self._observe,
            self._config.metrics.level,
            self._armed().answers.identity(),
            dict(self._config.metrics.otlp_environ),
            self._config.metrics.otlp_interval_seconds,
            self._counters,
        )
        self._undoing.begin("push", otel.start, otel.stop)
        self.otel = otel

    def start_host_profiles(self) -> None:
        """Push the host's CPU profiles, where that is wanted."""
        if not self._config.host_profiles or not self._config.pyroscope.url:
            return
        from gpumem_otel.export.hostprofiles import start_host_profiles, stop_host_profiles

        if start_host_profiles(self._config.pyroscope, self._armed().answers.identity()):
            self._undoing.defer("push", lambda _: stop_host_profiles())

    def start_pusher(self) -> None:
        """Read at the cadence of the configuration, in the background, and push where to."""
        from gpumem_otel.export.pusher import Pusher

        armed = self._armed()
        source, reader, answers = armed
        sinks: list[ProfileSink] = []
        if self._config.pyroscope.url:
            # without a sink read-outs still go on: for metrics, recordings and callbacks
            self._undoing.guard.run("push", lambda: sinks.append(self._make_sink(answers)))
        pusher = Pusher(
            _ForPushes(reader, answers.beside),
            sinks[0] if sinks else None,
            config=self._config.profiles,
            identity=answers.identity,
            status=source.status,
            encode=answers.encode,
            counters=self._counters,
            stall_seconds=lambda: reader.last_stall_seconds,
            on_profiles=self._on_profiles,
            push_timeout_seconds=self._config.pyroscope.timeout_seconds,
            final_read=bool(sinks or self._on_profiles or self._config.record_path),
        )
        answers.interval_seconds = lambda: pusher.interval_seconds
        tensors = armed.tensors
        if tensors is not None:
            reader.tap.append(lambda _: tensors.want(pusher.interval_seconds))
        self._undoing.begin("push", pusher.start, pusher.stop)
        self._pusher = pusher

    def _make_sink(self, answers: Answers) -> ProfileSink:
        from gpumem_otel.export.pyroscope import PyroscopeSink
        from gpumem_otel.export.transport import Transport

        transport = Transport(self._config.pyroscope, environ=self._environ)
        self._transport = transport
        self._undoing.defer("push", lambda _: transport.close())
        return PyroscopeSink(transport, self._config.pyroscope, answers.identity, self._counters)

    def flush(self, timeout: float) -> bool:
        """Read and send now; whether everything was stored in time."""
        return self._pusher is not None and self._pusher.flush(timeout)

    def abandon_after_fork(self) -> None:
        """In a forked child: thread and connections are the parent's."""
        for part in (self._pusher, self._transport):
            if part is not None:
                self._undoing.guard.run("fork", part.abandon_after_fork)


class _ForPushes:
    """The reader as pushes use it: nothing shared, and windows that tell of all since the last."""

    def __init__(self, reader: Reader, beside: Beside) -> None:
        self.live = reader.live_now
        self.windowed = reader.windows.pushed
        self.beside = beside.make
