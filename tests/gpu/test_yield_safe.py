"""Yields on a GPU leave graphs, streams, other threads and other ranks as they found them.

What a job computes is compared bit for bit with one that never yields: by `benchmarks/yield_exact`
for whole kinds of job, by a twin in the same process for small ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.yield_gpu import Jobs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def jobs(devices, tmp_path):
    made = Jobs(tmp_path)
    yield made
    made.close()


@pytest.fixture
def exact(devices, tmp_path):
    """Yields of a kind of job at random steps, by call and by command; its one run."""

    def call(name, yields, every):
        out = tmp_path / "runs.json"
        command = [sys.executable, str(ROOT / "benchmarks/yield_exact.py"), "--jobs", name]
        command += ["--yields", str(yields), "--others-every", str(every), "--workers", "1"]
        done = subprocess.run(
            [*command, "--seconds", "250", "--out", str(out)],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        (run,) = json.loads(out.read_text())["runs"]
        assert run["equal"]
        assert run["unexpected"] == []
        assert run["distinct_losses"] > 1
        return run

    return call


# graphs


@pytest.mark.parametrize("name", ["graphed", "reduce-overhead"])
def test_what_a_captured_graph_may_use_is_left_to_the_driver(exact, name):
    """Parameters in the default pool, whose addresses the graph holds: `auto` takes the driver."""
    run = exact(name, 3, 3)
    assert sum(count for kind, count in run["done"].items() if kind.endswith("auto")) >= 2


def test_tensors_of_a_device_with_a_graph_stay(jobs):
    reported = jobs.run("""
        job = Training()
        job.steps(2)
        static = torch.ones(1000, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = static * 2
        before = torch.cuda.memory_allocated()
        said = refused(gpumem_otel.yield_memory, level="tensors")
        kept = torch.cuda.memory_allocated() == before
        static.fill_(3)
        graph.replay()
        tell(said=said, kept=kept, state=state(), replayed=result.sum().item(),
             as_never=job.as_never())
    """)
    assert "graph" in reported["said"]
    assert (reported["kept"], reported["state"], reported["replayed"]) == (True, "running", 6000.0)
    assert reported["as_never"]


def test_thirty_captures_while_commands_come(jobs):
    """No capture is lost, whatever is asked for meanwhile: commands wait, or are refused."""
    reported = jobs.run("""
        job = Training()
        job.steps(2)
        over, outcomes = threading.Event(), []

        def ask():
            levels = (TENSORS, AUTO, PROCESS)
            while not over.is_set():
                level = levels[len(outcomes) % 3]
                try:
                    done = command(YieldRequest(level=level, wait_seconds=0.05))
                    outcomes.append(done.state.value)
                    if state() == "yielded":
                        command(RestoreRequest())
                except YieldRefusedError:
                    outcomes.append("refused at once")
                except Exception as error:
                    outcomes.append(repr(error))

        thread = threading.Thread(target=ask, name="asks")
        thread.start()
        x = torch.ones(100_000, device="cuda")
        torch.cuda.synchronize()
        right = number = 0
        while number < 30 or len(outcomes) < 9:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = x
                for _ in range(200):
                    y = (y * 2).relu() - y
                z = torch.cat([y, y]).sum()
            x.fill_(number % 7 + 1)
            graph.replay()
            right += z.item() == 200_000 * (number % 7 + 1)
            number += 1
            del graph, y, z
            job.step()
        over.set()
        while thread.is_alive():
            job.step()
        tell(right=right, number=number, outcomes=sorted(set(outcomes)), count=len(outcomes),
             state=state(), as_never=job.as_never())
    """)
    assert reported["right"] == reported["number"] >= 30, reported
    assert set(reported["outcomes"]) <= {"done", "refused", "refused at once"}, reported
    assert reported["state"] == "running"
    assert reported["as_never"]


# streams


@pytest.mark.parametrize("sides", [0, 1])
def test_fifty_cycles_reserve_no_more_than_before(jobs, sides):
    """Each block comes back on the stream that it had, so that its cache serves it again."""
    reported = jobs.run(f"""
        sides = {sides}
        job = Training()
        job.steps(2)
        kept = []
        stream = torch.cuda.Stream() if sides else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            for size in (1 << 12, 1 << 18, 3 << 20, 30 << 20):
                kept += [torch.full((size,), len(kept), dtype=torch.uint8, device="cuda")]
        torch.cuda.synchronize()
        def turn():
            with torch.cuda.stream(stream):
                total = sum((t.sum(dtype=torch.int64) for t in kept), start=torch.zeros(
                    (), dtype=torch.int64, device="cuda"))
            stream.synchronize()
            job.step()
            return total.item()
        first = turn()
        gpumem_otel.yield_memory(level="tensors")
        gpumem_otel.restore()
        turn()
        before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        equal = True
        for _ in range(50):
            gpumem_otel.yield_memory(level="tensors")
            gpumem_otel.restore()
            equal = equal and turn() == first
        after = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        tell(before=before, after=after, equal=equal, as_never=job.as_never())
    """)
    assert reported["equal"]
    assert reported["after"][0] <= reported["before"][0]
    assert reported["after"][1] == reported["before"][1]
    assert reported["as_never"]


@pytest.mark.parametrize("name", ["two-streams", "fsdp2"])
def test_jobs_with_streams_and_storages_of_their_own(exact, name):
    """A live communicator is left alone, too: the driver's level is refused."""
    run = exact(name, 4, 2)
    if name == "fsdp2":
        assert run["refused"]["process"] >= 2


# ranks


def test_one_of_two_ranks_is_refused_at_every_level(jobs):
    script = """
        import torch.distributed as dist
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method=f"file://{RUN_DIR}/store", rank=rank,
                                world_size=2)
        job = Training()
        job.steps(2)
        dist.barrier()
        said = []
        if rank == 0:
            for level in ("tensors", "process", "auto"):
                said.append(refused(gpumem_otel.yield_memory, level=level))
                done = beside(job.step, lambda: command(YieldRequest(level=YieldLevel(level))))
                assert done.state is REFUSED, done
                said.append(done.error)
        total = torch.ones(1) * (rank + 1)
        dist.all_reduce(total)
        tell(said=said, total=total.item(), state=state(), as_never=job.as_never())
        dist.destroy_process_group()
    """
    both = [jobs.start(script, RANK=str(rank), WORLD_SIZE="2") for rank in range(2)]
    first, second = [jobs.end(job) for job in both]
    assert len(first["said"]) == 6
    assert all("this job has 2 ranks" in line for line in first["said"]), first["said"]
    for reported in (first, second):
        assert (reported["total"], reported["state"], reported["as_never"]) == (
            3.0,
            "running",
            True,
        )


# other threads


def test_a_prefetcher_of_which_nothing_is_known_is_named(exact):
    run = exact("prefetcher", 2, 2)
    assert run["done"] == {}
    assert run["refused"]["tensors"] >= 2
    assert "prefetcher" in run["notes"]["refusal of tensors"]


def test_a_prefetcher_that_says_so_is_trusted(exact):
    run = exact("prefetcher-told", 4, 2)
    assert sum(run["done"].values()) >= 4


def test_a_thread_that_averages_weights_is_refused(jobs):
    """It allocates all the time, and would read storages that are empty."""
    reported = jobs.run("""
        job = Training()
        job.steps(2)
        over, turns = threading.Event(), threading.Semaphore(0)
        def average():
            kept = [p.detach().clone() for p in job.model.parameters()]
            while not over.is_set():
                for mean, p in zip(kept, job.model.parameters()):
                    mean.mul_(0.9).add_(p.detach() * 0.1)
                turns.release()
        thread = threading.Thread(target=average, name="averages")
        thread.start()
        turns.acquire()
        said = refused(gpumem_otel.yield_memory, level="tensors")
        done = beside(job.step, lambda: command(YieldRequest(level=TENSORS)))
        over.set()
        thread.join()
        del thread
        gpumem_otel.yield_memory(level="tensors")
        gpumem_otel.restore()
        tell(said=said, outcome=done.state.value, error=done.error, as_never=job.as_never())
    """)
    for line in (reported["said"], reported["error"]):
        assert "averages" in line or "so another thread uses it" in line
        assert "participant" in line
    assert reported["outcome"] == "refused"
    assert reported["as_never"]


def test_a_checkpoint_that_is_written_beside_the_job_is_whole(jobs):
    """Refused while it is read from the device, or done when it has all it needs: what is on the
    disk is what the job had when it asked for it."""
    reported = jobs.run("""
        import queue
        job = Training(extra=256 << 20)
        job.steps(2)
        asked, outcomes = queue.Queue(), []
        def save():
            while (name := asked.get()) is not None:
                held = {"extra": job.extra.cpu()}
                held |= {k: v.cpu() for k, v in job.model.state_dict().items()}
                torch.save(held, name)
                asked.task_done()
        thread = threading.Thread(target=save, name="saves", daemon=True)
        thread.start()
        right = 0
        for number in range(4):
            path = os.path.join(RUN_DIR, f"saved{number}.pt")
            expected = {k: v.cpu() for k, v in job.model.state_dict().items()}
            asked.put(path)
            try:
                gpumem_otel.yield_memory(level="tensors")
            except YieldRefusedError as error:
                outcomes.append(str(error))
            else:
                outcomes.append("done")
                gpumem_otel.restore()
            asked.join()
            found = torch.load(path)
            extra = found.pop("extra")
            right += (torch.equal(extra, torch.arange(extra.numel()))
                      and all(torch.equal(v, expected[k]) for k, v in found.items()))
            os.unlink(path)
        asked.put(None)
        thread.join()
        tell(right=right, outcomes=outcomes, state=state(), as_never=job.as_never())
    """)
    assert reported["right"] == 4, reported
    assert reported["state"] == "running"
    assert reported["as_never"]
    assert all(line == "done" or "saves" in line for line in reported["outcomes"]), reported


@pytest.mark.skipif(os.name != "posix", reason="forks")
def test_a_forked_child_can_not_yield_what_is_its_parents(jobs):
    reported = jobs.run("""
        job = Training()
        job.steps(2)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                gpumem_otel.yield_memory(level="tensors")
                said = "done"
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            os.write(writer, said.encode())
            os._exit(0)
        os.close(writer)
        said = os.read(reader, 10_000).decode()
        os.waitpid(pid, 0)
        gpumem_otel.yield_memory(level="tensors")
        gpumem_otel.restore()
        tell(said=said, as_never=job.as_never())
    """)
    assert reported["said"].startswith("YieldRefusedError: yield: a forked child")
    assert reported["as_never"]
