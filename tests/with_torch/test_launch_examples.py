"""deploy/examples/torchrun.sh and slurm.sbatch as they are, two ranks each, on this machine's CPU.

Below torchrun.sh, `train.py` trains for real over gloo. What a GPU would add, memory to show, is
played from a recording; Slurm's `srun` and `scontrol` are stand-ins that give what the real ones
gave.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.deploy_files import EXAMPLES
from support.otlp_receiver import OtlpReceiver
from support.recordings import make_recording
from support.slurm_steps import NODES, batch, put_tools

pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

TESTS = Path(__file__).parents[1]
SNAPSHOT = "h200-torch2.11-train-python-stacks.pickle.gz"


class Place:
    """The folder a launcher is started in, its environment, and what its ranks wrote."""

    def __init__(self, folder: Path, processes: int) -> None:
        self.folder = folder
        (folder / "out").mkdir()
        (folder / "bin").mkdir()
        shutil.copy(TESTS / "support" / "played_training.py", folder / "train.py")
        (folder / "test.gpumem").write_bytes(make_recording(SNAPSHOT))
        # the torchrun of this Python, on a machine of so many cores
        torchrun = folder / "bin" / "torchrun"
        torchrun.write_text(
            "#!/bin/bash\n"
            f'exec "{sys.executable}" -m torch.distributed.run "${{@/#auto/{processes}}}"\n'
        )
        torchrun.chmod(0o755)
        ours = folder / "bin" / "gpumem-otel"
        ours.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m gpumem_otel "$@"\n')
        ours.chmod(0o755)
        self.environ = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(folder),
            "PYTHONPATH": f"{TESTS}:{TESTS.parent}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYROSCOPE_SERVER_ADDRESS": "http://127.0.0.1:9",  # no server
            "GPUMEM_OTEL_PORT": "0",
            "GPUMEM_OTEL_RUN_DIR": str(folder / "run"),
            "RECORDING": str(folder / "test.gpumem"),
            "OUT": str(folder / "out"),
        }

    def start(self, script: Path, *arguments: str, **environ: str) -> str:
        """Run it; what it printed."""
        done = subprocess.run(
            ["bash", script, *arguments],
            capture_output=True, text=True, timeout=280, cwd=self.folder,
            env={**self.environ, **environ},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ranks(self) -> list[dict]:
        """What each rank saw of itself: `gpumem_target_info`, and its memory."""
        found = []
        for path in sorted((self.folder / "out").iterdir()):
            seen = json.loads(path.read_text())
            (info,) = [one for one in seen["metrics"] if one.startswith("gpumem_target_info{")]
            seen["info"] = dict(re.findall(r'(\w+)="([^"]*)"', info))
            (seen["allocated"],) = [
                one for one in seen["metrics"] if one.startswith("gpumem_allocated_bytes{")
            ]
            found.append(seen)
        return found


def check_ranks(ranks, nodes):
    """Two ranks of one job, each under its own labels."""
    assert [one["info"]["rank"] for one in ranks] == ["0", "1"]
    assert sorted(one["info"]["node"] for one in ranks) == sorted(nodes)
    assert {one["info"]["world_size"] for one in ranks} == {"2"}
    assert [one["allocated"] for one in ranks] == [
        f'gpumem_allocated_bytes{{device="0",rank="{rank}"}} 1.2132352e+08' for rank in (0, 1)
    ]
    assert len({one["pid"] for one in ranks}) == len({one["port"] for one in ranks}) == 2


def test_torchrun_example(tmp_path):
    place = Place(tmp_path, processes=2)
    shutil.copy(EXAMPLES / "torchrun.sh", tmp_path)
    # it goes to its own folder, and gives a run the id that it has not got
    output = place.start(tmp_path / "torchrun.sh", "5")
    (line,) = (line for line in output.splitlines() if not line.startswith("[Gloo]"))  # torch 2.8's
    assert re.fullmatch(r"step 5: loss \d\.\d{4}", line)
    ranks = place.ranks()
    check_ranks(ranks, [socket.gethostname()] * 2)
    assert [one["info"]["local_rank"] for one in ranks] == ["0", "1"]
    (run,) = {one["info"]["run_id"] for one in ranks}
    assert run
    assert list((tmp_path / "run").iterdir()) == []


def test_slurm_example_requeued(tmp_path):
    """GIVEN a job that was requeued WHEN it runs on two nodes THEN each rank sends, as that run."""
    place = Place(tmp_path, processes=1)
    put_tools(tmp_path / "bin")
    job = free_job()
    with OtlpReceiver() as receiver:
        place.start(
            EXAMPLES / "slurm.sbatch",
            **batch(job, requeued=1),
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url,
            GPUMEM_OTEL_SERVE="1",
        )
        received = list(receiver.received)
    ranks = place.ranks()
    check_ranks(ranks, NODES)
    assert {one["info"]["run_id"] for one in ranks} == {f"{job}-1"}
    assert {one.resource()["service.name"] for one in received} == {"llm-train"}
    assert {one.resource()["service.instance.id"] for one in received} == {
        f"{socket.gethostname()}-{rank}-{one['pid']}" for rank, one in enumerate(ranks)
    }
    assert list((tmp_path / "run").iterdir()) == []


def free_job() -> int:
    """A job number whose port for the rendezvous is free."""
    for job in range(3_000, 9_000):
        with socket.socket() as taken:
            try:
                taken.bind(("127.0.0.1", 10_000 + job))
            except OSError:
                continue
            return job
    raise AssertionError("no free ports")
