"""Who a process is in a job of Slurm, by the variables that a real one had."""

from __future__ import annotations

import pytest
from support.slurm_steps import NODES, batch, task

from gpumem_otel.settings.identity import identify


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("requeued", [0, 2])
def test_a_task_of_srun_is_known(number, requeued):
    who = identify(task(batch(77, requeued), number))
    assert (who.rank, who.local_rank, who.world_size) == (number, 0, len(NODES))
    assert (who.run_id, who.restart, who.node) == ("77", requeued, NODES[number])


def test_torchrun_below_srun_knows_better():
    torchrun = {
        "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "TORCHELASTIC_RUN_ID": "77-1",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    who = identify({**task(batch(77, requeued=1), 1), **torchrun})
    assert (who.rank, who.local_rank, who.world_size) == (5, 1, 16)
    assert (who.run_id, who.restart, who.node) == ("77-1", 1, "n2")
