"""What is said about whatever may end a job that stands still."""

from __future__ import annotations

import pytest

from gpumem_otel.yielding.engine.reports import risks_of

NOW_NS = 1_700_000_000 * 10**9


def of(environ=None, **more):
    return risks_of(environ or {}, now_ns=NOW_NS, **more)


def test_nothing_is_said_of_what_the_environment_does_not_show():
    assert of() == ()
    assert of({"PATH": "/bin", "CUDA_LAUNCH_BLOCKING": "1"}) == ()


@pytest.mark.parametrize(
    ("environ", "more", "said"),
    [
        ({}, {"world_size": 2}, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC seconds"),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "480"}, {"world_size": 2}, "480 s"),
        ({"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_ENABLE_FILE_TIMER": "1"}, {}, "file timer"),
        ({"TORCHELASTIC_RUN_ID": "1"}, {}, "restarts them all"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {}, "liveness probe"),
        ({"SLURM_JOB_ID": "7"}, {}, "time limit goes on"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1700000090"}, {}, "ends it in 90 s"),
        (
            {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1700000090"},
            {"lease_seconds": 120.0},
            "ends it in 90 s, the lease in 120 s",
        ),
    ],
)
def test_what_it_shows_is_said_in_a_line(environ, more, said):
    (line,) = of(environ, **more)
    assert said in line
    assert "\n" not in line


def test_a_lease_that_ends_before_the_time_limit_is_no_danger():
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1700000090"}
    assert of(environ, lease_seconds=60.0) == ()
