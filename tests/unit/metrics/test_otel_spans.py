"""Spans of yields, as the SDK's own exporter in memory gets them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from gpumem_otel.metrics.spans import YieldSpans
from gpumem_otel.yielding.values import Operation, OperationState, Phase, YieldLevel, YieldReport

RUNNING = Operation(id="a1", kind="yield", state=OperationState.RUNNING, who="uid 1000")


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return YieldSpans(3, provider)


def test_an_operation_is_a_span_and_its_phases_stand_below_it(spans, exporter):
    spans.phase_ended(RUNNING, Phase.PREPARE, 1_000, 2_000, "")
    spans.phase_ended(RUNNING, Phase.RELEASE, 2_000, 9_000, "")
    report = YieldReport(level=YieldLevel.TENSORS, moved_bytes={"parameter": 5, "buffer": 2})
    spans.operation_ended(replace(RUNNING, state=OperationState.DONE, report=report), 9_500)

    prepare, release, whole = exporter.get_finished_spans()
    assert [s.name for s in (prepare, release, whole)] == [
        "gpumem.yield.prepare", "gpumem.yield.release", "gpumem.yield",
    ]  # fmt: skip
    assert (prepare.start_time, prepare.end_time) == (1_000, 2_000)
    assert (whole.start_time, whole.end_time) == (1_000, 9_500)
    assert prepare.parent.span_id == release.parent.span_id == whole.context.span_id
    assert whole.parent is None
    assert dict(whole.attributes) == {
        "gpumem.rank": 3,
        "gpumem.yield.operation": "a1",
        "gpumem.yield.who": "uid 1000",
        "gpumem.yield.outcome": "done",
        "gpumem.yield.level": "tensors",
        "gpumem.yield.moved_bytes": 7,
    }
    assert whole.status.status_code is StatusCode.UNSET


def test_a_failure_is_on_the_span_where_it_happened(spans, exporter):
    spans.phase_ended(RUNNING, Phase.PREPARE, 1, 2, "2 GiB of host memory are missing")
    refused = replace(RUNNING, state=OperationState.REFUSED, error="refused: 2 GiB are missing")
    spans.operation_ended(refused, 3)

    prepare, whole = exporter.get_finished_spans()
    assert prepare.status.description == "2 GiB of host memory are missing"
    assert (whole.status.status_code, whole.status.description) == (
        StatusCode.ERROR, "refused: 2 GiB are missing",
    )  # fmt: skip


def test_phases_driven_by_a_caller_make_no_spans(spans, exporter):
    spans.phase_ended(None, Phase.RELEASE, 1, 2, "")
    spans.operation_ended(RUNNING, 3)
    assert exporter.get_finished_spans() == ()


def test_what_never_ends_does_not_pile_up(spans, exporter):
    for number in range(20):
        operation = replace(RUNNING, id=f"op{number}")
        spans.phase_ended(operation, Phase.PREPARE, number, number + 1, "")
    ended = [span for span in exporter.get_finished_spans() if span.name == "gpumem.yield"]
    assert len(ended) == 12
