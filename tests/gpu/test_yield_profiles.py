"""On a real GPU a live profile shows after a restore what it showed before the yield.

Stack by stack and class by class, byte for byte: so the tensors are of sizes whose blocks do not
depend on where the allocator finds room (up to 1 MiB: rounded to 512 bytes and nothing else).
"""

from __future__ import annotations

import pytest
from support.yield_gpu import Jobs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

MODEL = """
    from torch import nn
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(1000, 256)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.1, batch_first=True)
                for _ in range(3))
            self.head = nn.Linear(256, 1000, bias=False)
            self.register_buffer("scale", torch.ones(256))
        def forward(self, tokens):
            x = self.embed(tokens) * self.scale
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(1000, (4, 16), device="cuda")
    agent = lifecycle.current()
    kept = []

    def step():
        agent.tensors.want(0.0)
        optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    def look():
        "(stack, labels) -> (objects, bytes), and bytes by class."
        (profile,) = agent.reader.live_now()
        shown = {
            (tuple((f.name, f.filename, f.line) for f in one.frames), one.labels):
                (one.objects, one.size_bytes)
            for one in profile.samples}
        classes = {name: size for name, size in agent.reader.classes()[0].items() if size}
        assert sum(classes.values()) == torch.cuda.memory_allocated() == profile.total_bytes
        return shown, classes

    def differ(before, now):
        "What was shown and is not, and what is and was not."
        return [
            [str(key)[:300], value, there.get(key)]
            for here, there in ((before[0], now[0]), (now[0], before[0]))
            for key, value in here.items() if there.get(key) != value]

    for _ in range(3):
        step()
    kept.append(model(tokens))  # a graph: what autograd saved moves too
    hidden = torch.cat([tokens, tokens])  # of user code: no class, a stack
    before = look()
    facts = {"first": before[1], "differ": [], "classes": [], "levels": [], "ours": 0}

    def compare():
        now = look()
        facts["differ"] += differ(before, now)
        facts["classes"].append(now[1] == before[1])
        raw = torch.cuda.memory._snapshot()
        facts["ours"] = sum(
            "gpumem_otel/yielding" in frame["filename"]
            for segment in raw["segments"] for block in segment["blocks"]
            if block["state"] == "active_allocated" for frame in block["frames"][:1])

    def cycle(level, **options):
        facts["levels"].append(gpumem_otel.yield_memory(level=level, **options).level.value)
        gpumem_otel.restore()
        compare()
"""


@pytest.fixture
def jobs(devices, tmp_path):
    made = Jobs(tmp_path)
    yield made
    made.close()


def check(reported, yields):
    assert reported["differ"] == []
    assert reported["classes"] == [True] * yields
    assert {"parameter", "gradient", "optimizer_state", "activation"} <= set(reported["first"])
    assert reported["ours"] > 100, "the allocator itself does know of the restore"


@pytest.mark.parametrize("level", ["tensors", "auto"])
def test_stacks_and_classes_are_the_same_after_one_yield_and_after_two(jobs, level):
    reported = jobs.run(
        MODEL
        + f"""
    cycle({level!r})
    cycle({level!r}, verify=True)
    kept.clear()
    step()
    tell(**facts)
    """
    )
    check(reported, 2)


def test_a_class_at_a_time_and_what_is_freed_and_made_afterwards(jobs):
    reported = jobs.run(
        MODEL
        + """
    gpumem_otel.yield_memory(level="tensors")
    gpumem_otel.restore(classes=("optimizer_state",))
    _, there = look()
    facts["staged"] = {name: there.get(name) for name in ("optimizer_state", "parameter")}
    gpumem_otel.restore(classes=("parameter", "gradient"))
    gpumem_otel.restore()
    compare()
    entries = len(agent.source.restored.entries())
    held = torch.cuda.memory_allocated()
    kept.clear()
    freed = held - torch.cuda.memory_allocated()
    def made():
        return [torch.empty(256, 256, device="cuda") for _ in range(50)]
    new = made()
    shown, _ = look()
    facts["freed"] = freed > 0
    facts["forgotten"] = entries > len(agent.source.restored.entries())
    facts["made"] = sum(
        size for (stack, _), (_, size) in shown.items()
        if any(name.rpartition(":")[2].rpartition(".")[2] == "made" for name, _, _ in stack))
    big = torch.ones(1 << 20, device="cuda")
    with gpumem_otel.yielded(level="tensors"):
        pass
    held = torch.cuda.memory_allocated()
    del big
    facts["big"] = held - torch.cuda.memory_allocated() >= 4 << 20
    facts["strangers"] = sum(
        size for (stack, _), (_, size) in shown.items()
        if any("gpumem_otel/yielding" in filename for _, filename, _ in stack))
    tell(**facts)
    """
    )
    check(reported, 1)
    assert reported["staged"] == {
        "optimizer_state": reported["first"]["optimizer_state"], "parameter": None
    }  # fmt: skip
    assert reported["freed"]
    assert reported["forgotten"]
    assert reported["big"], "what the yield knew of it kept it alive"
    assert reported["made"] == 50 * 256 * 256 * 4
    assert reported["strangers"] == 0


def test_a_restore_by_command_while_profiles_are_read(jobs):
    """From another thread, with a reader beside it: no profile shows a stack of ours."""
    reported = jobs.run(
        MODEL
        + """
    kept.clear()
    step()
    before = look()
    seen, stop = set(), threading.Event()
    def read():
        gpumem_otel.participant()
        while not stop.is_set():
            for profile in agent.reader.live_now():
                seen.update(frame.filename for one in profile.samples for frame in one.frames)
    reader = threading.Thread(target=read)
    reader.start()
    def both():
        for _ in range(3):
            done = command(YieldRequest(level=TENSORS))
            assert done.state is DONE, done
            done = command(RestoreRequest())
            assert done.state is DONE, done
    beside(step, both)
    stop.set()
    reader.join()
    facts["seen"] = sorted(name for name in seen if "gpumem_otel/yielding" in name)
    facts["breached"] = agent.counters.get("readouts_breached")
    tell(**facts)
    """
    )
    assert reported["seen"] == []
    assert reported["breached"] == 0
