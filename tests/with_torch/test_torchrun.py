"""torchrun with four ranks on this machine, and data loader workers: which processes report.

The ranks play a recording through the real agent, so no GPU is needed; the launcher is started
as `gpumem-otel run -- torchrun ...` starts it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.otlp_receiver import OtlpReceiver
from support.recordings import make_recording

from gpumem_otel.cli.launch import site_hook_folder

pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

TESTS = Path(__file__).parents[1]
SNAPSHOT = "h200-torch2.11-train-python-stacks.pickle.gz"
RANKS = 4
INTERVAL_NS = 2_000_000_000
SPREAD_NS = 50_000_000


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    for base in range(21_000, 30_000, 16):
        with ExitStack() as stack:
            try:
                for port in range(base, base + count):
                    taken = stack.enter_context(socket.socket())
                    taken.bind(("127.0.0.1", port))
            except OSError:
                continue
            return base
    raise AssertionError("no free ports")


@pytest.fixture
def settings(tmp_path):
    """The environment of a job that `gpumem-otel run --serve` starts."""
    recording = tmp_path / "test.gpumem"
    recording.write_bytes(make_recording(SNAPSHOT))
    (tmp_path / "out").mkdir()
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join((site_hook_folder(), str(TESTS))),
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RECORDING": str(recording),
        "OUT": str(tmp_path / "out"),
        "OTEL_SERVICE_NAME": "train",
        "GPUMEM_OTEL_SERVE": "1",
        "GPUMEM_OTEL_PORT": str(free_ports(RANKS + 1)),  # one for the launcher
        "GPUMEM_OTEL_INTERVAL": "2",
        "GPUMEM_OTEL_RUN_DIR": str(tmp_path / "run"),
    }


def torchrun(settings, **environ):
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "1",
            "--nproc-per-node", str(RANKS), "--max-restarts", "1", "--rdzv-id", "trainjob",
            "--master-addr", "127.0.0.1",
            "--master-port", str(int(settings["GPUMEM_OTEL_PORT"]) + RANKS),
            str(TESTS / "support" / "torchrun_worker.py"),
        ],
        capture_output=True, text=True, timeout=380, env={**settings, **environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    output = (done.stdout + done.stderr).replace(
        sys.executable, "python"
    )  # its path may hold our name
    assert "gpumem" not in output, output
    return Path(settings["OUT"])


def labels(line: str) -> dict[str, str]:
    return dict(re.findall(r'(\w+)="([^"]*)"', line))


def check_look(seen, settings, *, restart):
    """One target per rank on base + local rank, and nothing else on this machine."""
    base = int(settings["GPUMEM_OTEL_PORT"])
    ports = list(range(base, base + RANKS))
    assert seen["ports"] == ports
    assert seen["local_ranks"] == list(range(RANKS))
    groups = seen["file_sd"]
    assert [group["targets"] for group in groups] == [[f"127.0.0.1:{port}"] for port in ports]
    assert [group["labels"]["__meta_gpumem_rank"] for group in groups] == ["0", "1", "2", "3"]
    assert {group["labels"]["__meta_gpumem_run_id"] for group in groups} == {"trainjob"}
    assert {group["labels"]["__meta_gpumem_service_name"] for group in groups} == {"train"}
    # run files: of these processes alone, neither of the launcher nor of the dead
    assert len(seen["files"]) == RANKS
    assert sorted(int(name.partition("-")[0]) for name in seen["files"]) == sorted(seen["pids"])
    assert seen["launcher"] not in seen["pids"]
    assert not set(seen["launcher_ports"]) & set(ports)
    series = set()
    for rank, lines in enumerate(seen["metrics"]):
        (info,) = [line for line in lines if line.startswith("gpumem_target_info{")]
        known = labels(info)
        assert known.pop("node") == socket.gethostname()
        assert known == {
            "rank": str(rank), "device": "0", "local_rank": str(rank), "world_size": "4",
            "run_id": "trainjob", "restart": str(restart), "gpu_uuid": "",
        }  # fmt: skip
        (allocated,) = [line for line in lines if line.startswith("gpumem_allocated_bytes{")]
        assert allocated == f'gpumem_allocated_bytes{{device="0",rank="{rank}"}} 1.2132352e+08'
        series |= {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}
    assert len(series) == sum(
        1 for lines in seen["metrics"] for line in lines if not line.startswith("#")
    )


def check_instances(received, prefix):
    """Every process is a resource of its own: nothing is overwritten at the receiver."""
    ranks: dict[str, set[str]] = {}
    for request in received:
        resource = request.resource()
        assert resource["service.name"] == "train"
        found = ranks.setdefault(resource["service.instance.id"], set())
        for metrics in request.message.resource_metrics:
            for scope in metrics.scope_metrics:
                for metric in scope.metrics:
                    data = metric.gauge if metric.HasField("gauge") else metric.sum
                    found |= {
                        attribute.value.string_value
                        for point in data.data_points
                        for attribute in point.attributes
                        if attribute.key == "rank"
                    }
    seen = []
    for instance, values in ranks.items():
        match = re.fullmatch(rf"{re.escape(prefix)}-(\d)-(\d+)", instance)
        assert match, instance
        assert values == {match[1]}
        seen.append((match[1], int(match[2])))
    return sorted(seen)


def test_four_ranks_are_four_targets_read_at_the_same_moments(settings):
    """GIVEN torchrun with 4 ranks WHEN they play THEN targets, series and moments are as meant."""
    with OtlpReceiver() as receiver:
        out = torchrun(
            settings, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url, OTEL_METRIC_EXPORT_INTERVAL="1000"
        )
        received = list(receiver.received)
    seen = json.loads((out / "look-0.json").read_text())
    check_look(seen, settings, restart=0)
    assert list(Path(settings["GPUMEM_OTEL_RUN_DIR"]).iterdir()) == []

    instances = check_instances(received, socket.gethostname())
    assert instances == [(str(rank), pid) for rank, pid in enumerate(seen["pids"])]

    reads = [json.loads((out / f"reads-{rank}.json").read_text()) for rank in range(RANKS)]
    moments = [{time // INTERVAL_NS: time % INTERVAL_NS for time in times} for times in reads]
    common = set.intersection(*(set(by_multiple) for by_multiple in moments))
    assert common, reads  # the same wall-clock multiples, on all ranks
    # each rank's offset is how late its thread woke up on this machine; the best round counts,
    # since a busy machine may hold up any single one
    spreads = [
        max(by_multiple[one] for by_multiple in moments)
        - min(by_multiple[one] for by_multiple in moments)
        for one in common
    ]
    assert min(spreads) < SPREAD_NS, spreads


def test_an_elastic_restart_comes_back_on_the_same_ports(settings):
    """GIVEN a rank that fails once WHEN torchrun starts all anew THEN ports stay, files do not."""
    with OtlpReceiver() as receiver:
        out = torchrun(
            settings,
            FAIL="2",
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url,
            OTEL_METRIC_EXPORT_INTERVAL="1000",
            OTEL_RESOURCE_ATTRIBUTES="service.instance.id=pod-7",
        )
        received = list(receiver.received)
    first = json.loads((out / "look-0.json").read_text())
    second = json.loads((out / "look-1.json").read_text())
    check_look(first, settings, restart=0)
    check_look(second, settings, restart=1)
    assert not set(first["pids"]) & set(second["pids"])
    assert first["launcher"] == second["launcher"]
    assert list(Path(settings["GPUMEM_OTEL_RUN_DIR"]).iterdir()) == []
    instances = set(check_instances(received, "pod-7"))
    after = {(str(rank), pid) for rank, pid in enumerate(second["pids"])}
    before = {(str(rank), pid) for rank, pid in enumerate(first["pids"])}
    assert after <= instances <= after | before


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_eight_persistent_loader_workers_are_invisible(settings, method):
    done = subprocess.run(
        [sys.executable, str(TESTS / "support" / "loader_job.py"), method],
        capture_output=True, text=True, timeout=380, env=settings,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "workers": 8,
        "held": [[0, 0, False, False]],  # threads, sockets, values, listener
        "files": 1,
        "own": [True, True, True],
    }
