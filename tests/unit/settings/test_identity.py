"""Identity from each launcher's variables."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import pytest

from gpumem_otel.settings.identity import identify, in_notebook


def fields(environ):
    found = identify(environ)
    return found.rank, found.local_rank, found.world_size, found.run_id, found.restart


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 0, 1, "", 0)),
        (
            {
                "RANK": "5",
                "LOCAL_RANK": "1",
                "WORLD_SIZE": "8",
                "TORCHELASTIC_RUN_ID": "abc",
                "TORCHELASTIC_RESTART_COUNT": "2",
            },
            (5, 1, 8, "abc", 2),
        ),
        # torchrun without a rendezvous id says `none`, which tells no two runs apart
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}, (0, 0, 2, "", 0)),
        # torchrun under Slurm: torchrun knows the ranks
        (
            {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "SLURM_PROCID": "0",
             "SLURM_NTASKS": "1", "SLURM_JOB_ID": "77"},
            (3, 3, 4, "77", 0),
        ),
        # the same without a rendezvous id, in a job that was queued once more: torchrun counts anew
        (
            {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "77",
             "TORCHELASTIC_RESTART_COUNT": "0", "SLURM_RESTART_COUNT": "2"},
            (0, 0, 2, "77", 2),
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none", "PET_RDZV_ID": "x",
             "TORCHELASTIC_RESTART_COUNT": "1", "SLURM_RESTART_COUNT": "2"},
            (0, 0, 2, "x", 3),
        ),
        (
            {"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "9",
             "SLURM_RESTART_COUNT": "1"},
            (2, 0, 4, "9", 1),
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "2"},
            (0, 0, 2, "", 0),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
             "OMPI_COMM_WORLD_SIZE": "2"},
            (1, 1, 2, "", 0),
        ),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}, (3, 1, 4, "", 0)),
        ({"JOB_COMPLETION_INDEX": "6"}, (6, 0, 7, "", 0)),
        # nonsense is as good as nothing
        ({"RANK": "first", "WORLD_SIZE": "-3"}, (0, 0, 1, "", 0)),
    ],
)  # fmt: skip
def test_launchers(environ, expected):
    assert fields(environ) == expected


def test_names():
    plain = identify({})
    assert plain.service_name == "unknown_service:python"
    assert plain.node == socket.gethostname()
    assert plain.pid == os.getpid()
    named = identify(
        {"NODE_NAME": "gpu-7"}, service_name="llm", namespace="team", tags=(("a", "b"),)
    )
    assert (named.service_name, named.namespace, named.node) == ("llm", "team", "gpu-7")
    assert named.tags == (("a", "b"),)


def ipython(get_shell):
    return {"IPython": SimpleNamespace(get_ipython=get_shell)}


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ({}, False),
        ({"ipykernel": SimpleNamespace(), "tqdm.notebook": SimpleNamespace()}, False),
        ({"IPython": SimpleNamespace()}, False),  # its import is not done
        (ipython(lambda: None), False),  # imported by a script
        (ipython(SimpleNamespace), False),  # the shell of a terminal
        (ipython(lambda: SimpleNamespace(kernel=None)), False),
        (ipython(lambda: SimpleNamespace(kernel=object())), True),
        (ipython(lambda: 1 // 0), False),
    ],
)
def test_a_notebook_is_told_by_its_kernel(modules, expected):
    assert in_notebook(modules) is expected
