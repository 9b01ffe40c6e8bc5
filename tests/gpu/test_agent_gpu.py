"""The whole agent inside real jobs on a GPU: pushed, pulled, scraped; the job is unharmed.

Every scenario is a process of its own that trains, and prints one line of JSON at its end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.fake_pyroscope import FakePyroscope
from support.pyroscope_query import SNAPSHOTS, total

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]

JOB = """
import json, os, sys, threading, time, urllib.request
import gpumem_otel
from gpumem_otel.api import lifecycle

def net(torch, width=256, layers=4):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.0)
    return torch.nn.TransformerEncoder(layer, layers).cuda()

def train(torch, model, steps, seconds=0.0, batch=8):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator(device="cuda").manual_seed(1)
    losses, end = [], time.monotonic() + seconds
    while len(losses) < steps or time.monotonic() < end:
        x = torch.randn(batch, 64, 256, device="cuda", generator=generator)
        loss = (model(x) - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if len(losses) < steps:
            losses.append(loss.item())
        else:
            loss.item()
    return losses

def scrape():
    agent = lifecycle.current()
    url = f"http://127.0.0.1:{agent.address[1]}"
    return urllib.request.urlopen(url + "/metrics", timeout=10).read().decode()

def tell(**facts):
    sys.stdout.flush()
    os.write(1, (json.dumps(facts) + "\\n").encode())  # in one piece: ranks share the pipe
"""


@pytest.fixture
def run(devices, tmp_path):
    """Run a job; what it reported."""

    def call(script, *, command=(sys.executable,), **environ):
        path = tmp_path / "job.py"
        path.write_text(JOB + textwrap.dedent(script))
        known = os.environ.get("PYTHONPATH", "")
        settings = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{known}" if known else str(ROOT),
            "GPUMEM_OTEL_RUN_DIR": str(tmp_path / "run"),
            "GPUMEM_OTEL_PORT": "0",
            "OTEL_SERVICE_NAME": "gpu-test",
            **environ,
        }
        try:
            done = subprocess.run(
                [*command, str(path)], capture_output=True, text=True, timeout=170, env=settings
            )
        except subprocess.TimeoutExpired as late:
            pytest.fail(f"{late}\n{late.stdout!r}\n{late.stderr!r}", pytrace=False)
        assert done.returncode == 0, done.stdout + done.stderr
        reported = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return (reported[0] if len(reported) == 1 else reported), done.stderr

    return call


def test_every_push_that_was_not_raced_is_the_allocators_own_number(run, record_property):
    with FakePyroscope() as server:
        reported, _ = run(
            """
            gpumem_otel.install()
            import torch
            train(torch, net(torch), 10, seconds=20)
            agent = lifecycle.current()
            tell(
                reads=agent.counters.get("exporter_runs", stage="read"),
                raced=agent.counters.get("readouts_raced"),
                breached=agent.counters.get("readouts_breached"),
                steps=agent.observe().steps.steps,
                errors={"/".join(map(str, k)): v for k, v in agent.counters.snapshot().items()
                        if k[0] == "exporter_errors"},
            )
            """,
            PYROSCOPE_SERVER_ADDRESS=server.url,
            GPUMEM_OTEL_INTERVAL="0.5",
            GPUMEM_OTEL_MAX_STALL_RATIO="1",
            GPUMEM_OTEL_JOB_PUSH_BYTES_PER_SECOND="1e9",
        )
        assert reported["breached"] == 0
        assert reported["errors"] == {}
        assert reported["reads"] >= 10
        assert reported["steps"] > 10
        assert total(server.url, "gpu-test", SNAPSHOTS) >= reported["reads"] - 2
        record_property("reads", reported["reads"])
        record_property("raced", reported["raced"])


def test_the_job_computes_the_same_with_and_without(run):
    job = """
        import torch
        torch.use_deterministic_algorithms(False)
        tell(losses=train(torch, net(torch), 60))
        """
    plain, _ = run("gpumem_otel.uninstall()" + textwrap.dedent(job))
    with FakePyroscope() as server:
        watched, _ = run(
            "gpumem_otel.install(serve=True)\n" + textwrap.dedent(job),
            PYROSCOPE_SERVER_ADDRESS=server.url,
            GPUMEM_OTEL_INTERVAL="0.1",
            GPUMEM_OTEL_MAX_STALL_RATIO="1",
        )
    assert watched["losses"] == plain["losses"]


def test_graphs_streams_and_out_of_memory_beside_the_agent(run):
    reported, _ = run(
        """
        gpumem_otel.install(serve=True)
        import torch
        model = net(torch).eval()
        agent = lifecycle.current()
        assert agent.wait_listening(20)
        stop, scrapes = threading.Event(), []
        def scraper():
            while not stop.wait(0.05):
                scrapes.append(len(scrape()))
        thread = threading.Thread(target=scraper)
        thread.start()
        x = torch.randn(8, 64, 256, device="cuda")
        side = torch.cuda.Stream()
        with torch.no_grad():
            with torch.cuda.stream(side):
                for _ in range(3):
                    model(x)
            torch.cuda.synchronize()
            expected = model(x).sum().item()
            replayed = 0
            for _ in range(30):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y = model(x)
                graph.replay()
                torch.cuda.synchronize()
                replayed += abs(y.sum().item() - expected) < 1e-2
        ooms = 0
        for _ in range(5):
            try:
                torch.empty(10**15, device="cuda", dtype=torch.uint8)
            except torch.OutOfMemoryError:
                ooms += 1
        for _ in range(5):
            with torch.cuda.stream(side):
                held = torch.empty(1 << 26, device="cuda", dtype=torch.uint8)
            held.record_stream(torch.cuda.current_stream())
            del held
            torch.cuda.empty_cache()
        stop.set()
        thread.join()
        agent.queries._observed = (float("-inf"), None)
        stats = agent.observe().devices[0]
        tell(replayed=replayed, ooms=ooms, counted=stats.ooms, scrapes=len(scrapes),
             breached=agent.counters.get("readouts_breached"))
        """,
        GPUMEM_OTEL_INTERVAL="0.1",
        GPUMEM_OTEL_MAX_STALL_RATIO="1",
    )
    assert reported["replayed"] == 30
    assert reported["ooms"] == reported["counted"] == 5
    assert reported["breached"] == 0
    assert reported["scrapes"] > 0


def test_a_forked_worker_that_owns_the_gpu_is_seen_and_its_parent_is_not(run):
    with FakePyroscope() as server:
        reported, _ = run(
            """
            gpumem_otel.install(serve=True)
            import torch
            pipe = os.pipe()
            child = os.fork()
            if child == 0:
                train(torch, net(torch), 20)
                agent = lifecycle.current()
                assert agent.wait_listening(20)
                text = scrape()
                assert agent.flush(10)
                os.write(pipe[1], json.dumps({
                    "pid": os.getpid() == agent.queries.identity().pid,
                    "metrics": 'gpumem_allocated_bytes{device="0",rank="0"}' in text,
                }).encode())
                gpumem_otel.uninstall()
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            agent = lifecycle.current()
            tell(child=json.loads(os.read(pipe[0], 1000)), parent_silent=agent.observe() is None,
                 parent_threads=threading.active_count(), listening=agent.address is not None)
            """,
            PYROSCOPE_SERVER_ADDRESS=server.url,
        )
        assert reported["child"] == {"pid": True, "metrics": True}
        assert reported["parent_silent"]
        assert reported["parent_threads"] == 1
        assert not reported["listening"]
        assert total(server.url, "gpu-test") > 0


def test_compile_makes_the_same_graphs_breaks_and_recompiles(run):
    job = """
        import torch, torch._dynamo
        from torch._dynamo.utils import counters
        model = torch.compile(net(torch, layers=2))
        train(torch, model, 3, batch=4)
        train(torch, model, 3, batch=6)
        tell(stats=dict(counters["stats"]), breaks=dict(counters["graph_break"]),
             frames=dict(counters["frames"]))
        """
    plain, _ = run(job)
    watched, _ = run(
        "gpumem_otel.install(serve=True)\n" + textwrap.dedent(job),
        GPUMEM_OTEL_INTERVAL="0.2",
        GPUMEM_OTEL_MAX_STALL_RATIO="1",
    )
    assert watched == plain


def test_allocated_profile_of_a_running_job(run):
    reported, _ = run(
        """
        gpumem_otel.install(serve=True)
        import torch
        model = net(torch)
        train(torch, model, 2)  # the first steps load kernels for seconds
        agent = lifecycle.current()
        assert agent.wait_listening(20)
        thread = threading.Thread(target=train, args=(torch, model, 10, 6))
        thread.start()
        from gpumem_otel.profiles.pprof_reader import decode
        url = f"http://127.0.0.1:{agent.address[1]}/debug/pprof/gpumem"
        def requested():
            raw = torch._C._cuda_memoryStats(0)
            return raw["requested_bytes"]["all"]["allocated"]
        before = requested()
        got = decode(urllib.request.urlopen(url + "?seconds=2", timeout=30).read())
        after = requested()
        live = decode(urllib.request.urlopen(url, timeout=30).read())
        thread.join()
        names = {frame.name for sample in got.samples for frame in sample.frames}
        tell(total=got.total("alloc_space"), most=after - before, duration_ns=got.duration_ns,
             names=sorted(names)[:400], live=live.total("inuse_space"))
        """
    )
    assert 0 < reported["total"] <= reported["most"]
    assert reported["duration_ns"] >= 1_900_000_000
    assert "__main__.train" in reported["names"]
    assert "torch.nn.modules.linear.Linear.forward" in reported["names"]
    assert reported["live"] > 0


def test_without_a_change_to_the_code(run, tmp_path):
    with FakePyroscope() as server:
        run(
            """
            import torch
            train(torch, net(torch), 5)
            tell(installed=lifecycle.current() is not None)
            """,
            command=(
                sys.executable, "-c",
                "import sys; from gpumem_otel.cli.main import main; sys.exit(main())",
                "run", "--", sys.executable,
            ),
            PYROSCOPE_SERVER_ADDRESS=server.url,
        )  # fmt: skip
        assert total(server.url, "gpu-test") > 0


def test_two_ranks_on_two_gpus(run, devices):
    if devices < 2:
        pytest.skip("needs two CUDA devices")
    with FakePyroscope() as server:
        reported, _ = run(
            """
            import torch, torch.distributed as dist
            gpumem_otel.install(serve=True)
            rank = int(os.environ["LOCAL_RANK"])
            torch.cuda.set_device(rank)
            dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
            model = torch.nn.parallel.DistributedDataParallel(net(torch), device_ids=[rank])
            ends, late = time.monotonic() + 6, torch.zeros(1, device="cuda")
            while not late.item():  # all ranks agree on the last step, or one would wait forever
                train(torch, model, 10)
                late += time.monotonic() > ends
                dist.all_reduce(late)
            agent = lifecycle.current()
            assert agent.wait_listening(20)
            text = scrape()
            flag = os.path.join(os.environ["GPUMEM_OTEL_RUN_DIR"], "..", f"failed-{rank}")
            restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            tell(rank=rank, port=agent.address[1], restart=restart, used=list(
                     s.device for s in agent.observe().devices),
                 read_ns=agent.queries.last_read_ns, info=[
                     line for line in text.splitlines() if line.startswith("gpumem_target_info")],
                 breached=agent.counters.get("readouts_breached"))
            dist.barrier()
            if rank == 1 and restart == 0:
                os._exit(9)
            dist.destroy_process_group()
            """,
            command=(
                sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node", "2", "--max-restarts", "1",
            ),
            PYROSCOPE_SERVER_ADDRESS=server.url,
            # a store of its own per attempt: else a restarted rank may read NCCL's address of the
            # attempt before
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            NCCL_SOCKET_IFNAME="lo",  # one host; its other addresses may not reach themselves
            GPUMEM_OTEL_PORT="19464",
            GPUMEM_OTEL_INTERVAL="2",
            GPUMEM_OTEL_MAX_STALL_RATIO="1",
        )  # fmt: skip
        assert len(reported) == 4
        for turn in (0, 1):
            ranks = sorted((t for t in reported if t["restart"] == turn), key=lambda t: t["rank"])
            assert [t["rank"] for t in ranks] == [0, 1]
            assert [t["port"] for t in ranks] == [19464, 19465]
            assert [t["used"] for t in ranks] == [[0], [1]]
            assert all(t["breached"] == 0 for t in ranks)
            for t in ranks:
                assert f'rank="{t["rank"]}"' in t["info"][0]
                assert f'restart="{turn}"' in t["info"][0]
        for rank in ("0", "1"):
            assert total(server.url, "gpu-test", selector=f',rank="{rank}"') > 0
