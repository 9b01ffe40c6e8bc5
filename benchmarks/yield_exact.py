"""Whether a job that yields and restores at random steps computes what one does that never yields.

    python benchmarks/yield_exact.py --out benchmarks/results/yield-exact-h200.json

Every job runs in processes of its own: once without `gpumem_otel`, once with yields at steps drawn
from a seed, half of them calls between two steps, half commands from another thread while the loop
runs. Every loss and every tensor of the end state is compared bit for bit. Between a yield and its
restore the freed memory is overwritten, so that nothing comes back by luck. Levels that cannot
hold for a job (a captured graph, a live communicator, a prefetcher of which nothing is known) are
asked for too, and have to be refused without touching the job.

The file is rewritten after every pair of processes and read again at the start: kill it at will,
call it again, and it goes on with new seeds until each job has had its yields. `--table FILE`
prints what a file holds. `--way idle` does nothing at the chosen steps and `--way corrupt` flips
one bit instead: with them and `--device cpu` the comparison itself is shown to work, and then exit
code 1 is right for `corrupt`; 2 says that a process did not end. Yields themselves need a GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import faulthandler
import hashlib
import importlib.util
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    import torch

GIB = 1 << 30
WAYS_OF_ASKING = ("call", "command")
STEPS_PER_YIELD = 4
"""So that a command that had to wait for its safe point still finds steps to run in."""

SAFE_POINT_SECONDS = 20.0
SCRIBBLE_BYTES = 512 << 20
CHILD_SECONDS = 150.0


# -- the parent: which processes to run, and what they said ---------------------------------------


def jobs() -> ModuleType:
    """The jobs, which need torch."""
    from support import yield_jobs

    return yield_jobs


def why_not(arguments: argparse.Namespace) -> str:
    """Why nothing can be run here, "" where it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if arguments.device == "cpu":
        return "yields need a GPU; --way idle or corrupt do not" * (arguments.way == "yields")
    import torch as torch_

    if torch_.cuda.is_available():
        return ""
    return "torch finds no CUDA device; --device cpu --way corrupt tries the comparison alone"


def plan(name: str, number: int, yields: int, every: int) -> dict[str, Any]:
    """The steps at which run `number` of a job yields, how, and on which level.

    At every so many (`every`, 0 for the job's own number) another level than the usual one.
    """
    spec = jobs().JOBS[name]
    every = every or spec.others_every
    chosen = random.Random(f"{name} {number}")
    steps = STEPS_PER_YIELD * yields + 8
    at = sorted(chosen.sample(range(2, steps - 4), yields))
    first, *others = [*spec.levels, *spec.refused] or [""]
    rows = []
    usual = number
    for index, step in enumerate(at):
        # in turn, not drawn: half of them each way, and all levels both ways over the runs
        if others and (index + 1) % every == 0:
            turn = (index + 1) // every - 1 + number
            level, way = others[turn % len(others)], turn // len(others) + turn
        else:
            level, way = first, usual
            usual += 1
        rows.append([step, WAYS_OF_ASKING[way % 2], level])
    return {"job": name, "seed": number, "steps": steps, "yields": rows}


def child(plan_: dict[str, Any], way: str, device: str, seconds: float) -> dict[str, Any]:
    """Run one process of a job; what it found, or `error`."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        about = {"way": way, "device": device, "run_dir": folder, "seconds": seconds - 5}
        asked = json.dumps({**plan_, **about})
        try:
            done = subprocess.run(
                [sys.executable, str(HERE), "--child", asked, "--out", str(result)],
                capture_output=True,
                text=True,
                timeout=seconds,
                env={**os.environ, **jobs().ENVIRON},
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done in time, {seconds:.0f} s"}
        if done.returncode or not result.exists():
            late = "not done in time, " * ("Timeout (" in done.stderr)
            return {"error": f"{late}exit code {done.returncode}", "stderr": done.stderr[-6000:]}
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def pair(plan_: dict[str, Any], way: str, device: str, seconds: float) -> dict[str, Any]:
    """One run: the job that never yields and the one that does, at once, compared."""
    with concurrent.futures.ThreadPoolExecutor(2) as both:
        other = both.submit(child, plan_, "never", device, seconds)
        row = child(plan_, way, device, seconds)
        never = other.result()
    started = {"job": plan_["job"], "seed": plan_["seed"], "steps": plan_["steps"]}
    broken = never if "error" in never else row if "error" in row else None
    if broken is not None:
        which = "never yields" if broken is never else "yields"
        return {
            **started,
            "equal": False,
            **broken,
            "error": f"job that {which}: {broken['error']}",
        }
    losses = row.pop("losses"), never.pop("losses")
    tensors = row.pop("tensors"), never.pop("tensors")
    differ = [i for i, (a, b) in enumerate(zip(*losses, strict=True)) if a != b]
    found = {**started, "equal": losses[0] == losses[1] and tensors[0] == tensors[1], **row}
    found["distinct_losses"] = len(set(losses[1]))
    found["losses_sha256"] = hashlib.sha256(" ".join(losses[0]).encode()).hexdigest()
    if differ:
        found["first_difference"] = {
            "step": differ[0],
            "losses": [one[differ[0]] for one in losses],
        }
    elif not found["equal"]:
        found["first_difference"] = {"tensors": [a == b for a, b in zip(*tensors, strict=False)]}
    return found


def good(run: dict[str, Any]) -> int:
    """Yields and expected refusals of a run that count."""
    if not run["equal"] or run.get("unexpected"):
        return 0
    return sum(run["done"].values()) + sum(run["refused"].values())


class Results:
    """The file: one entry per run, rewritten whole after each."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.held: dict[str, Any] = {"runs": []}
        self.lock = threading.Lock()
        if path is not None and path.exists():
            self.held = json.loads(path.read_text())

    def of(self, name: str) -> list[dict[str, Any]]:
        """Runs of a job."""
        return [run for run in self.held["runs"] if run["job"] == name]

    def add(self, run: dict[str, Any]) -> None:
        """Keep a run, on the disk before this returns."""
        with self.lock:
            self.held["runs"].append(run)
            if self.path is not None:
                beside = self.path.with_name(self.path.name + ".part")
                beside.write_text(json.dumps(self.held, indent=1) + "\n")
                beside.replace(self.path)


def table(held: dict[str, Any]) -> str:
    """Markdown of what was found so far."""
    lines = [
        "| job | yields | by command | by level | refused, as it must be | losses | equal |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in sorted({run["job"] for run in held["runs"]}):
        runs = [run for run in held["runs"] if run["job"] == name]
        sums: dict[str, int] = {}
        refused: dict[str, int] = {}
        for run in runs:
            for kind, count in run.get("done", {}).items():
                sums[kind] = sums.get(kind, 0) + count
            for level, count in run.get("refused", {}).items():
                refused[level] = refused.get(level, 0) + count
        levels: dict[str, int] = {}
        for kind, count in sums.items():
            level = kind.split()[1]
            levels[level] = levels.get(level, 0) + count
        commands = sum(count for kind, count in sums.items() if kind.startswith("command"))
        wrong = [run for run in runs if not run["equal"] or run.get("unexpected")]
        broken = [run for run in runs if "error" in run]
        verdict = "bit for bit" if not wrong else f"**{len(wrong)} of {len(runs)} runs are not**"
        if broken:  # nothing was compared
            verdict = f"**{len(broken)} of {len(runs)} runs did not end**"
        listed = ", ".join(f"{level} {count}" for level, count in sorted(levels.items()))
        not_done = ", ".join(f"{level} {count}" for level, count in sorted(refused.items()))
        compared = sum(run["steps"] for run in runs if "done" in run)
        lines.append(
            f"| {name} | {sum(sums.values())} | {commands} | {listed or '-'} | {not_done or '-'} "
            f"| {compared} | {verdict} |"
        )
    return "\n".join(lines)


def run_all(arguments: argparse.Namespace) -> int:
    """Run what is missing; 1 where a run was not equal, 2 where one did not end."""
    reason = why_not(arguments)
    if reason:
        raise SystemExit(f"yield_exact.py: {reason}")
    known = jobs().JOBS
    results = Results(arguments.out)
    end = time.monotonic() + arguments.seconds
    names = arguments.jobs.split(",") if arguments.jobs else list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no such job: {', '.join(unknown)}; known: {', '.join(known)}")
    names = [n for n in names if arguments.device == "cuda" or not known[n].cuda_only]
    took: dict[str, float] = {}

    def all_of(name: str) -> bool:
        right = True
        while True:
            spec = known[name]
            asked = arguments.yields or spec.yields
            missing = asked - sum(good(run) for run in results.of(name))
            left = end - time.monotonic()
            if missing <= 0 or left < max(20.0, 1.3 * took.get(name, 0.0)) or not right:
                return right
            seed = 1 + max((run["seed"] for run in results.of(name)), default=-1)
            # two more than are missing: a command may find that the loop has ended
            number = min(missing + 2, spec.per_process)
            began = time.monotonic()
            seconds = min(CHILD_SECONDS, left)
            todo = plan(name, seed, number, arguments.others_every)
            run = pair(todo, arguments.way, arguments.device, seconds)
            took[name] = run["seconds_whole"] = round(time.monotonic() - began, 2)
            if "not done in time" in run.get("error", "") and left < CHILD_SECONDS:
                # which says nothing about the job
                print(f"{name:<16} run {seed}: out of time after {seconds:.0f} s", flush=True)
                return right
            right = run["equal"] and not run.get("unexpected") and good(run) > 0
            results.held.setdefault("machine", run.pop("machine", None))
            run.pop("machine", None)
            results.add(run)
            print(
                f"{name:<16} run {seed}: {'ok' if right else json.dumps(run, indent=1)}", flush=True
            )

    with concurrent.futures.ThreadPoolExecutor(arguments.workers) as pool:
        right = list(pool.map(all_of, names))
    print(table(results.held))
    if any("error" in run for name in names for run in results.of(name)):
        return 2
    return 0 if all(right) else 1


# -- a child: one job, with or without yields ------------------------------------------------------


class Way:
    """What happens at the chosen steps; as it stands: nothing."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked
        self.done: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.unexpected: list[str] = []
        self.notes: dict[str, Any] = {}

    hooks: Any = None
    """What the job registers of its threads and models."""

    def install(self) -> None:
        """Before the job is built."""

    def busy(self) -> bool:
        """Whether a command still runs."""
        return False

    def call(self, level: str) -> None:
        """Yield and restore between two steps."""
        self.count("call", level)

    def command(self, level: str) -> None:
        """Have another thread do it while the loop goes on."""
        self.count("command", level)

    def boundary(self) -> None:
        """A step has ended, which no optimizer's hook says."""

    def finish(self) -> None:
        """After the loop."""

    def count(self, way: str, level: str) -> None:
        """One more yield that was restored."""
        self.done[f"{way} {level}"] = self.done.get(f"{way} {level}", 0) + 1


class Corrupt(Way):
    """Flips one bit of the first parameter instead: the comparison has to find it."""

    job: Any = None

    def call(self, level: str) -> None:
        import torch as torch_

        tensor = next(iter(self.job.tensors())).detach()
        tensor.view(torch_.int32).view(-1)[:1] ^= 1
        self.count("call", level)


class Yields(Way):
    """Yields and restores for real."""

    def install(self) -> None:
        import gpumem_otel
        from gpumem_otel.api import lifecycle, yields
        from gpumem_otel.errors import YieldRefusedError
        from gpumem_otel.yielding.values import (
            OperationState,
            RestoreRequest,
            YieldLevel,
            YieldRequest,
        )

        class Registered(jobs().Hooks):  # type: ignore[misc]
            def watch(self, *objects: Any, **named: Any) -> None:
                gpumem_otel.watch(*objects, **named)

            def participant(self, thread: threading.Thread) -> None:
                gpumem_otel.participant(thread)

        self.hooks = Registered()
        self.api, self.refusal = gpumem_otel, YieldRefusedError
        self.yields, self.state = yields, OperationState
        self.current_agent = lifecycle.current
        self.request, self.back, self.level = YieldRequest, RestoreRequest, YieldLevel
        gpumem_otel.install(
            interval_seconds=3600, profiles=("live",), run_dir=self.asked["run_dir"], port=0
        )
        self.thread: threading.Thread | None = None
        self.may_be_refused = jobs().JOBS[self.asked["job"]].refused
        self.moved = 0
        self.over = False

    def busy(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def call(self, level: str) -> None:
        index = sum(self.done.values())
        try:
            if index % 3 == 2:
                with self.api.yielded(level=level) as report:
                    self.between(level, report)
            else:
                self.between(level, self.api.yield_memory(level=level, verify=index % 4 == 1))
                back = self.api.restore()
                self.compared(back)
        except self.refusal as error:
            self.was_refused(level, str(error))
        else:
            self.count("call", level)

    def compared(self, report: Any) -> None:
        """Keep what a restore says of its checksums."""
        if report is not None and report.checksums:
            self.notes["checksums"] = self.notes.get("checksums", 0) + 1

    def between(self, level: str, report: Any) -> None:
        """While it is yielded: what was moved, and overwrite what was freed."""
        moved = sum(report.moved_bytes.values()) if report is not None else 0
        if level == "tensors":
            if moved <= 0:
                self.unexpected.append("a yield of tensors moved nothing")
            scribble(SCRIBBLE_BYTES)
        elif self.context_left():
            self.unexpected.append(f"level {level}: the device still shows this process")
        self.moved = max(self.moved, moved)

    @staticmethod
    def context_left() -> bool:
        """Whether the driver still lists this process, which must not ask for it itself."""
        ask = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True)
            return str(os.getpid()) in done.stdout.split()
        return False

    def was_refused(self, level: str, text: str) -> None:
        """A refusal: expected where its reason is the one that the job has."""
        word = self.may_be_refused.get(level)
        if word is not None and word in text.lower():
            self.refused[level] = self.refused.get(level, 0) + 1
            self.notes[f"refusal of {level}"] = text
        elif not self.over:
            self.unexpected.append(f"{level}: {text}")

    def command(self, level: str) -> None:
        submitted = threading.Event()
        self.thread = threading.Thread(
            target=self.from_outside, args=(level, submitted), name="commands", daemon=True
        )
        self.thread.start()
        submitted.wait()

    def from_outside(self, level: str, submitted: threading.Event) -> None:
        """As the control listener does: submit, watch, submit the restore."""
        try:
            engine = self.yields.engine_of(self.current_agent())
            wanted = self.request(level=self.level(level), wait_seconds=SAFE_POINT_SECONDS)
            ended = self.ended(engine, engine.submit(wanted, "benchmark"), submitted)
            if ended.state is self.state.REFUSED:
                self.was_refused(level, ended.error)
                return
            if ended.state is not self.state.DONE:
                self.unexpected.append(f"{level}: {ended.state.value}: {ended.error}")
                return
            self.between(level, ended.report)
            back = self.ended(engine, engine.submit(self.back(), "benchmark"), submitted)
            if back.state is self.state.DONE:
                self.count("command", level)
            else:
                self.unexpected.append(f"restore: {back.state.value}: {back.error}")
        except self.refusal as error:
            self.was_refused(level, str(error))
        except Exception as error:
            self.unexpected.append(repr(error))
        finally:
            submitted.set()

    def ended(self, engine: Any, operation: Any, submitted: threading.Event) -> Any:
        """The operation once it has ended."""
        submitted.set()
        version = -1
        while operation.state is self.state.RUNNING:
            version = engine.wait(version, 10.0).version
            operation = engine.operation(operation.id)
        return operation

    def boundary(self) -> None:
        self.api.step()

    def finish(self) -> None:
        # a command that found the loop at its end has no safe point to wait for
        self.over = True
        if self.thread is not None:
            self.thread.join()
        self.notes["moved_bytes"] = self.moved
        self.api.uninstall()


def scribble(size_bytes: int) -> None:
    """Take device memory that is free and overwrite it, past torch's allocator."""
    with contextlib.suppress(ImportError):
        from cuda.bindings import runtime

        runtime.cudaSetDevice(0)
        error, address = runtime.cudaMalloc(size_bytes)
        if int(error):
            return
        runtime.cudaMemset(address, 0xA5, size_bytes)
        runtime.cudaDeviceSynchronize()
        runtime.cudaFree(address)


WAYS: dict[str, Callable[[dict[str, Any]], Way]] = {
    "never": Way,
    "idle": Way,
    "corrupt": Corrupt,
    "yields": Yields,
}


def digest(tensor: torch.Tensor) -> str:
    """Of a tensor's bytes."""
    import torch as torch_

    flat = tensor.detach().cpu().contiguous().view(-1)
    return hashlib.sha256(flat.view(torch_.uint8).numpy().tobytes()).hexdigest()[:16]


def run_child(asked: dict[str, Any], path: Path) -> None:
    """Run one job and write what it computed."""
    import torch as torch_

    began = time.perf_counter()
    faulthandler.dump_traceback_later(asked["seconds"], exit=True)  # says where it hangs
    way = WAYS[asked["way"]](asked)
    way.install()
    job = jobs().make_job(asked["job"], asked["device"], asked["seed"], way.hooks or jobs().Hooks())
    if isinstance(way, Corrupt):
        way.job = job
    due = [] if asked["way"] == "never" else list(asked["yields"])
    losses = []
    looped = time.perf_counter()
    for number in range(asked["steps"]):
        if due and number >= due[0][0] and not way.busy():
            _, how, level = due.pop(0)
            (way.call if how == "call" else way.command)(level)
        losses.append(float(job.step()).hex())
        if job.boundary:
            way.boundary()
    seconds = time.perf_counter() - looped
    way.finish()
    job.check()
    tensors = [digest(one) for one in job.tensors()]
    job.close()
    cuda = asked["device"] == "cuda"
    found = {
        "losses": losses,
        "tensors": tensors,
        "done": way.done,
        "refused": way.refused,
        "unexpected": way.unexpected[:10],
        "notes": way.notes,
        "seconds": round(seconds, 2),
        "seconds_built": round(looped - began, 2),
        "machine": {
            "device": torch_.cuda.get_device_name() if cuda else platform.processor() or "cpu",
            "torch": torch_.__version__,
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
        },
    }
    path.write_text(json.dumps(found))


def main() -> int:
    """Run, resume or print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON of all runs; gone on with where it exists")
    parser.add_argument("--jobs", default="", help="names of jobs, with commas; default all")
    parser.add_argument("--yields", type=int, default=0, help="per job, instead of its own number")
    parser.add_argument("--others-every", type=int, default=0, help="another level so often")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin nothing new after it")
    parser.add_argument("--workers", type=int, default=4, help="jobs at a time")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--way", choices=("yields", "idle", "corrupt"), default="yields")
    parser.add_argument("--table", type=Path, help="print the table of a file and end")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table is not None:
        try:
            held = json.loads(arguments.table.read_text())
        except OSError as error:
            line = f"{arguments.table}: {error.strerror}; --out writes such a file"
            raise SystemExit(line) from error
        except ValueError as error:
            raise SystemExit(f"{arguments.table}: no JSON; --out writes such a file") from error
        print(json.dumps(held.get("machine")), table(held), sep="\n\n")
        return 0
    if arguments.child:
        run_child(json.loads(arguments.child), arguments.out)
        return 0
    return run_all(arguments)


if __name__ == "__main__":
    sys.exit(main())
