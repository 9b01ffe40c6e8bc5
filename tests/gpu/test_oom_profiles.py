"""Out of memory on a GPU: the profile arrives, and the job ends as it would have without us.

Every scenario is a process of its own; where there are two, the first runs without us.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.fake_pyroscope import FakePyroscope
from support.oom_gpu import FORWARD, HEAD, JOBS, LOOP
from support.pyroscope_query import total

from gpumem_otel.profiles.pprof_reader import decode

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
OOM = "gpu_memory_oom:inuse_space:bytes:space:bytes"
SNAPSHOTS = "gpu_memory_oom:snapshots:count:space:bytes"


@pytest.fixture
def run(devices, tmp_path):
    """Run a job with us or without; what became of it."""

    def call(script, *, with_us=True, command=(sys.executable,), timeout=170, **environ):
        path = tmp_path / "job.py"
        install = "import gpumem_otel; gpumem_otel.install()\n" if with_us else ""
        path.write_text(install + HEAD + textwrap.dedent(script))
        known = os.environ.get("PYTHONPATH", "")
        return subprocess.run(
            [*command, str(path)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}:{known}" if known else str(ROOT),
                "GPUMEM_OTEL_RUN_DIR": str(tmp_path / "run"),
                "OTEL_SERVICE_NAME": "oom",
                **environ,
            },
        )

    return call


def last_error(done):
    """The line that ends a traceback, without numbers of this one run."""
    (*_, line) = [one for one in done.stderr.splitlines() if re.match(r"[\w.]+(Error|Exit)", one)]
    # who else is on the device changes from one moment to the next
    line = re.sub(r"Process \d+ has [\d.]+ [KMG]iB memory in use\. ", "", line)
    return re.sub(r"[\d.]+ ([KMG]iB|bytes)|process \d+", "...", line)


def frames(done):
    """The traceback's own places."""
    return re.findall(r'File ".*job\.py", line \d+, in \w+', done.stderr)


def lines(done):
    return [json.loads(one) for one in done.stderr.splitlines() if one.startswith('{"event"')]


def spooled(tmp_path):
    folder = tmp_path / "run" / "spool"
    return sorted(folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("job", JOBS)
def test_the_profile_arrives_and_the_end_is_the_jobs_own(run, tmp_path, job):
    plain = run(JOBS[job], with_us=False)
    with FakePyroscope() as server:
        done = run(JOBS[job], PYROSCOPE_SERVER_ADDRESS=server.url)
        stored = total(server.url, "oom", OOM)
        reported = lines(done)[-1]
        of_it = total(server.url, "oom", OOM, selector=f',oom_id="{reported["oom_id"]}"')
    assert done.returncode == plain.returncode, done.stderr
    if done.returncode == 1:
        assert last_error(done) == last_error(plain)
        # our line of install() moves the job's by one
        assert [re.sub(r"line \d+", "", one) for one in frames(done)] == [
            re.sub(r"line \d+", "", one) for one in frames(plain)
        ]
    assert of_it == reported["allocated_bytes"]
    assert stored == sum(one["allocated_bytes"] for one in lines(done))
    assert sum(reported["classes"].values()) == reported["allocated_bytes"]
    assert reported["classes"]["parameter"] >= 2 * 1024 * 4096 * 4
    assert reported["allocated_bytes"] + reported["cached_bytes"] <= reported["limit_bytes"] + (
        2 << 20
    )
    assert spooled(tmp_path) == []


def test_the_largest_holder_is_who_ate_the_memory(run):
    with FakePyroscope() as server:
        done = run(FORWARD, PYROSCOPE_SERVER_ADDRESS=server.url)
    (reported,) = lines(done)
    assert reported["asked_bytes"] == 256 << 20
    assert any("eat" in frame for frame in reported["top"][0]["stack"])
    assert reported["top"][0]["bytes"] == reported["top"][0]["objects"] * (256 << 20)
    assert reported["top"][0]["bytes"] > reported["allocated_bytes"] / 2
    assert "out of memory on device 0 of rank 0: asked for 256.0 MiB" in done.stderr


@pytest.mark.parametrize("job", ["forward", "survived", "thread"])
def test_while_pyroscope_hangs_the_end_is_bounded_and_the_profile_waits(run, tmp_path, job):
    plain = run(JOBS[job], with_us=False)
    with FakePyroscope() as server:
        server.fault = "hang"
        # a job that waited for the push as long as it may would be cut off
        done = run(
            JOBS[job], timeout=60, PYROSCOPE_SERVER_ADDRESS=server.url, PYROSCOPE_TIMEOUT="60"
        )
        assert done.returncode == plain.returncode
        (path,) = spooled(tmp_path)
        server.fault = ""
        server.down()
        server.up()
        reported = lines(done)[-1]
        assert decode(path.read_bytes()).total("inuse_space") == reported["allocated_bytes"]
        sent = subprocess.run(
            [
                sys.executable, "-c",
                "import sys; from gpumem_otel.cli.main import main; sys.exit(main())",
                "push", "--url", server.url,
            ],
            capture_output=True, text=True, timeout=60,
            env={**os.environ, "PYTHONPATH": str(ROOT),
                 "GPUMEM_OTEL_RUN_DIR": str(tmp_path / "run")},
        )  # fmt: skip
        assert sent.returncode == 0, sent.stderr
        selector = f',oom_id="{reported["oom_id"]}"'
        assert total(server.url, "oom", OOM, selector=selector) == reported["allocated_bytes"]
    assert spooled(tmp_path) == []


def test_a_thousand_survived_failures_are_counted_and_cost_next_to_nothing(run, record_property):
    plain = run(LOOP, with_us=False)
    with FakePyroscope() as server:
        done = run(
            LOOP + "agent = gpumem_otel.api.lifecycle.current()\n"
            "agent.queries.forget()\n"
            "tell(counted=agent.observe().devices[0].ooms)\n",
            PYROSCOPE_SERVER_ADDRESS=server.url,
        )
        pushes = total(server.url, "oom", SNAPSHOTS)
    assert done.returncode == 0, done.stderr
    (without,) = map(json.loads, plain.stdout.splitlines())
    ours, counted = map(json.loads, done.stdout.splitlines())
    assert ours["ooms"] == counted["counted"] == without["ooms"]
    assert len(lines(done)) == 1
    assert pushes == 1
    record_property("ratio", ours["seconds"] / without["seconds"])


def test_a_raising_observer_body_does_not_take_the_place_of_the_error(run):
    done = run("""
        from gpumem_otel.api import lifecycle
        def broken(*_, **__):
            raise RuntimeError("defect of ours")
        lifecycle.current().ooms._watch._look = broken
        eat()
        """)
    assert done.returncode == 1
    assert last_error(done).startswith("torch.OutOfMemoryError: CUDA out of memory")
    assert "During handling" not in done.stderr


def test_after_uninstall_the_observer_is_silent(run):
    done = run("import gpumem_otel; gpumem_otel.uninstall(); eat()")
    assert done.returncode == 1
    assert lines(done) == []


def test_in_one_of_two_ranks(run, devices):
    if devices < 2:
        pytest.skip("needs two CUDA devices")
    with FakePyroscope() as server:
        done = run(
            """
            import torch.distributed as dist
            rank = int(os.environ["LOCAL_RANK"])
            torch.cuda.set_device(rank)
            dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
            limit()
            dist.barrier()
            if rank == 1:
                eat()
            dist.barrier()
            """,
            command=(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            PYROSCOPE_SERVER_ADDRESS=server.url,
            NCCL_SOCKET_IFNAME="lo",
        )
        assert done.returncode == 1
        (reported,) = lines(done)
        assert (reported["rank"], reported["device"]) == (1, 1)
        selector = f',rank="1",device="1",oom_id="{reported["oom_id"]}"'
        assert total(server.url, "oom", OOM, selector=selector) == reported["allocated_bytes"]
        assert total(server.url, "oom", OOM, selector=',rank="0"') == 0


def test_the_snapshot_is_a_file_that_torch_reads(run, tmp_path):
    folder = tmp_path / "snapshots"
    run(FORWARD, GPUMEM_OTEL_OOM_SNAPSHOT_DIR=str(folder))
    (path,) = folder.iterdir()
    script = (
        "import pickle, sys; from torch.cuda._memory_viz import segsum\n"
        "print(segsum(pickle.load(open(sys.argv[1], 'rb'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
