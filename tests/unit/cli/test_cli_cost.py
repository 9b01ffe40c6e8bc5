"""`cost`: counted by the METRICS table, with measured sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import observations as obs

from gpumem_otel.base.profile import ProfileKind
from gpumem_otel.cli import cost
from gpumem_otel.cli.cost import CostQuestion, estimate, series_of_a_rank
from gpumem_otel.metrics.table import Level, rows
from gpumem_otel.settings.options import resolve

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "overhead-h200.json"
ALL_KINDS = tuple(kind.value for kind in ProfileKind)


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("devices", [(0,), (0, 1)])
def test_it_counts_what_the_fullest_process_exports(level, devices):
    fullest = sum(1 for _ in rows(obs.full(devices), level))
    assert series_of_a_rank(level, len(devices), ALL_KINDS, can_yield=True) == fullest
    without_yields = sum(1 for _ in rows(obs.full(devices, yields=None), level))
    assert series_of_a_rank(level, len(devices), ALL_KINDS) == without_yields


def test_the_size_of_a_push_is_the_measured_one():
    measured = json.loads(RESULTS.read_text())["read_out"]
    assert max(row["gzip_bytes"] for row in measured.values()) == cost.PROFILE_BYTES


def test_defaults_add_up():
    metrics, profiles, assumptions = estimate(resolve({}), CostQuestion(4000))
    assert metrics.series == 4000 * (24 + 5)
    assert metrics.interval_seconds == 15
    assert metrics.per_second == pytest.approx(116_000 / 15)
    assert metrics.bytes_per_second == pytest.approx(2 * 116_000 / 15)
    assert metrics.gb_per_month == pytest.approx(2 * 116_000 / 15 * 2_592_000 / 1e9)
    assert profiles.series == 4000 * 3
    assert profiles.interval_seconds == 60
    assert profiles.per_second == pytest.approx(4000 / 60)
    assert profiles.bytes_per_second == pytest.approx(4000 / 60 * 3845)
    assert any("PYROSCOPE_SERVER_ADDRESS" in sentence for sentence in assumptions)


def test_the_environment_counts_and_the_command_line_counts_more():
    config = resolve(
        {
            "GPUMEM_OTEL_METRICS_LEVEL": "minimal",
            "GPUMEM_OTEL_INTERVAL": "30",
            "GPUMEM_OTEL_PROFILES": "live,allocated",
            "PYROSCOPE_SERVER_ADDRESS": "http://127.0.0.1:4040",
        }
    )
    metrics, profiles, assumptions = estimate(config, CostQuestion(8, devices_per_rank=2))
    assert metrics.series == 8 * (11 + 7 + 5)
    assert (profiles.series, profiles.interval_seconds) == (8 * 2 * 2 * 3, 30)
    assert profiles.per_second == pytest.approx(8 * 2 * 2 / 30)
    assert not any("PYROSCOPE_SERVER_ADDRESS" in sentence for sentence in assumptions)
    metrics, profiles, _ = estimate(
        config,
        CostQuestion(8, metrics_level="standard", scrape_interval=60, profile_interval=120),
    )
    assert (metrics.series, metrics.interval_seconds) == (8 * 29, 60)
    assert profiles.interval_seconds == 120


def test_the_budget_of_the_job_stretches_the_interval_as_it_does_in_a_job():
    """4,000 pushes of 50 kB are 200 MB, which 1 MB/s allows every 240 s."""
    _, profiles, assumptions = estimate(resolve({}), CostQuestion(4000, profile_bytes=50_000))
    assert profiles.interval_seconds == 240
    assert profiles.bytes_per_second <= 1_000_000
    assert any("every 240 s instead of 60 s" in sentence for sentence in assumptions)


def test_metrics_over_otlp_alone_come_at_its_interval_and_without_a_scrape():
    sent = {"GPUMEM_OTEL_OTLP": "1", "OTEL_METRIC_EXPORT_INTERVAL": "30000"}
    metrics, _, assumptions = estimate(resolve(sent), CostQuestion(10))
    assert (metrics.series, metrics.interval_seconds) == (10 * 24, 30)
    assert "sent over OTLP" in assumptions[0]
    both = resolve({**sent, "GPUMEM_OTEL_SERVE": "1"})
    metrics, _, assumptions = estimate(both, CostQuestion(10))
    assert (metrics.series, metrics.interval_seconds) == (10 * 29, 15)
    assert any("OTLP is on besides" in sentence for sentence in assumptions)


@pytest.mark.parametrize(("level", "more"), [("minimal", 1), ("standard", 1), ("full", 16)])
def test_yields_count_where_the_job_takes_commands(level, more):
    wanted = CostQuestion(10, metrics_level=level)
    off, _, said_off = estimate(resolve({}), wanted)
    on, _, said_on = estimate(resolve({"GPUMEM_OTEL_CONTROL": "1"}), wanted)
    assert on.series - off.series == 10 * more
    (sentence,) = set(said_on) - set(said_off) - {said_on[0]}
    assert sentence == f"metrics: {more} of them about yield and restore (GPUMEM_OTEL_CONTROL)"


def test_switched_off_is_an_assumption():
    _, _, assumptions = estimate(resolve({"GPUMEM_OTEL_DISABLED": "1"}), CostQuestion(1))
    assert any("GPUMEM_OTEL_DISABLED" in sentence for sentence in assumptions)
