"""Yields and restores as OpenTelemetry spans: one per operation, one below it per phase.

They go through the API to whichever TracerProvider the job has set; without one nothing is made.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from opentelemetry import trace

from gpumem_otel._version import __version__
from gpumem_otel.yielding.values import OperationState

if TYPE_CHECKING:
    from gpumem_otel.yielding.values import Operation, Phase

_MOST_OPEN = 8
"""Operations under way at once. Normally there is one; those that never end must not pile up."""


class YieldSpans:
    """Makes a span of each phase and operation that ends, on any thread.

    Args:
        rank: of this process.
        provider: takes the spans; the job's by default.
    """

    def __init__(self, rank: int, provider: trace.TracerProvider | None = None) -> None:
        self._rank = rank
        self._tracer = trace.get_tracer("gpumem_otel", __version__, tracer_provider=provider)
        self._lock = threading.Lock()
        self._open: dict[str, trace.Span] = {}

    def phase_ended(
        self, operation: Operation | None, phase: Phase, began_ns: int, ended_ns: int, failure: str
    ) -> None:
        """Make the span of a phase; see `PhaseEnded` of the yield engine."""
        if operation is None:
            return  # driven phase by phase, by a caller that has its own spans
        parent = self._span_of(operation, began_ns)
        span = self._tracer.start_span(
            f"gpumem.{operation.kind}.{phase.value}",
            context=trace.set_span_in_context(parent),
            start_time=began_ns,
        )
        if failure:
            span.set_status(trace.StatusCode.ERROR, failure)
        span.end(ended_ns)

    def operation_ended(self, operation: Operation, ended_ns: int) -> None:
        """End the span of an operation that had at least one phase."""
        with self._lock:
            span = self._open.pop(operation.id, None)
        if span is None:
            return
        span.set_attribute("gpumem.yield.outcome", operation.state.value)
        if operation.report is not None:
            span.set_attribute("gpumem.yield.level", operation.report.level.value)
            moved = sum(operation.report.moved_bytes.values())
            span.set_attribute("gpumem.yield.moved_bytes", moved)
        if operation.state is not OperationState.DONE:
            span.set_status(trace.StatusCode.ERROR, operation.error)
        span.end(ended_ns)

    def _span_of(self, operation: Operation, began_ns: int) -> trace.Span:
        with self._lock:
            span = self._open.get(operation.id)
            if span is None:
                span = self._tracer.start_span(f"gpumem.{operation.kind}", start_time=began_ns)
                span.set_attribute("gpumem.rank", self._rank)
                span.set_attribute("gpumem.yield.operation", operation.id)
                span.set_attribute("gpumem.yield.who", operation.who)
                while len(self._open) >= _MOST_OPEN:
                    self._open.pop(next(iter(self._open))).end(began_ns)
                self._open[operation.id] = span
            return span
