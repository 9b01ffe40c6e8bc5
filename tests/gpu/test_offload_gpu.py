"""Storages off a real GPU and back: contents, streams, what the device shows, what stays.

One at a time on a GPU: what the device has free is compared, and one test takes all of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
MIB = 1 << 20

PREAMBLE = """
    import gc, os, sys, tempfile
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch
    from torch import nn
    from gpumem_otel.yielding.scan.candidates import CandidateFinder
    from gpumem_otel.capture.source import TorchSource
    from gpumem_otel.base.counters import Counters
    from gpumem_otel.yielding.values import YieldRequest
    from gpumem_otel.errors import YieldRefusedError
    from gpumem_otel.yielding.copy.devices import CudaDevices
    from gpumem_otel.yielding.copy.limits import HostRoom, read_room
    from gpumem_otel.yielding.copy.host_memory import HostPool
    from gpumem_otel.yielding.copy.reservations import DeviceReservations, HostReservations
    from gpumem_otel.yielding.copy.offload import Offload
    MIB, GIB = 1 << 20, 1 << 30
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    for kind in ("flash", "mem_efficient", "cudnn"):  # their backwards need not be
        getattr(torch.backends.cuda, f"enable_{kind}_sdp", lambda on: None)(False)
    source = TorchSource(counters=Counters())
    source.prepare(torch)
    torch.cuda.init()
    source.start()
    folder = tempfile.mkdtemp()
    def make(room=None, **pool):
        devices = CudaDevices(torch)
        reservations = HostReservations(folder + "/reservations", room or read_room)
        gpus = DeviceReservations(folder + "/reservations")
        return Offload(
            devices, HostPool(devices, **pool), reservations, gpus, moves=source.restored)
    def look(**more):
        return CandidateFinder(source, os.environ).find(**{"assume_private": False, **more})
    def nothing(done, total): pass
    def never(): return False
    def out(offload, found=None, **request):
        found = found or look()
        assert not found.refusal, found.refusal
        offload.admit(found.movables, YieldRequest(verify=True, **request))
        offload.copy_out(nothing, never)
        offload.free()
        return found
    def back(offload, wait=20.0, classes=None):
        offload.copy_back(classes, wait, nothing, never)
        assert offload.verify() in ("equal", "")
    def free(device=0):
        return torch.cuda.mem_get_info(device)[0]
"""


@pytest.fixture
def run(devices, tmp_path):
    """Run a scenario in a process of its own."""

    def call(script, *arguments):
        path = tmp_path / "job.py"
        path.write_text(textwrap.dedent(PREAMBLE) + textwrap.dedent(script) + "\nprint('ok')\n")
        done = subprocess.run(
            [sys.executable, str(path), *arguments], capture_output=True, text=True, timeout=250,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        assert done.stdout.splitlines()[-1:] == ["ok"], done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    return call


def test_tensors_of_every_kind_come_back_bit_for_bit(run):
    run("""
        base = torch.randn(300, 300, device="cuda")
        grown = torch.randn(1000, device="cuda", requires_grad=True)
        (grown * 3).sum().backward()
        kinds = {
            "view": base, "part": base[7:9, 3], "transposed": base.t(),
            "expanded": torch.randn(5, 1, device="cuda").expand(5, 9),
            "coo": torch.eye(50, device="cuda").to_sparse(),
            "csr": torch.eye(50, device="cuda").to_sparse_csr(),
            "complex": torch.randn(77, dtype=torch.complex64, device="cuda").conj(),
            "bool": torch.rand(333, device="cuda") > 0.5,
            "half": torch.randn(99, device="cuda").half(),
            "float8": torch.randn(33, device="cuda").to(torch.float8_e4m3fn),
            "odd": torch.randint(0, 255, (1001,), dtype=torch.uint8, device="cuda"),
            "nothing": torch.empty(0, 4, device="cuda"),
            "scalar": torch.tensor(2.5, device="cuda"),
            "gradient": grown.grad, "leaf": grown.detach(),
            "large": torch.randint(0, 255, (700 * MIB + 3,), dtype=torch.uint8, device="cuda"),
            "quantized": torch.quantize_per_tensor(
                torch.randn(40, device="cuda"), 0.1, 3, torch.quint8),
            "jagged": torch.nested.nested_tensor(
                [torch.randn(3), torch.randn(5)], layout=torch.jagged, device="cuda").values(),
        }
        def plain(one):
            if one.is_quantized: one = one.int_repr()
            if one.layout is not torch.strided: one = one.to_dense()
            if "float8" in str(one.dtype): one = one.view(torch.uint8)
            return one.resolve_conj().cpu()
        before = {name: plain(one) for name, one in kinds.items()}
        versions = {name: one._version for name, one in kinds.items()}
        offload = make()
        found = out(offload)
        assert base.untyped_storage().nbytes() == 0
        assert len(found.movables) >= 12, found
        assert torch.cuda.memory_allocated() < 64 * MIB, torch.cuda.memory_summary()
        back(offload)
        for name, one in kinds.items():
            assert torch.equal(plain(one), before[name]), name
            assert one._version == versions[name], name
        assert kinds["part"].data_ptr() == base.data_ptr() + (7 * 300 + 3) * 4
    """)


TRAIN = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(100, 64)
            self.rnn = nn.LSTM(64, 64, batch_first=True)
            self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
            self.head = nn.Linear(64, 100, bias=False)
            self.head.weight = self.embedding.weight
        def forward(self, x):
            return self.head(self.layer(self.rnn(self.embedding(x))[0]))
    def train(optimizer_of, yields, amp=False, steps=8):
        torch.manual_seed(0)
        torch.cuda.manual_seed_all(0)
        model = Model().cuda()
        optimizer = optimizer_of(model.parameters())
        scaler = torch.amp.GradScaler("cuda", enabled=amp)
        losses, offload = [], make(piece_bytes=4 * MIB)
        for step in range(steps):
            x = torch.randint(0, 100, (8, 12), device="cuda")
            with torch.autocast("cuda", enabled=amp):
                loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
            if yields == "inside" and step % 3 == 1:
                out(offload); back(offload)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
            if yields and step % 2:
                gradients = [id(p.grad) for p in model.parameters()]
                found = out(offload)
                classes = {one.tensor_class for one in found.movables}
                there = {"parameter", "gradient"}
                if optimizer.state:  # a scaler that sees infinities skips steps
                    there.add("optimizer_state")
                assert there <= classes, classes
                assert not model.head.weight.untyped_storage().nbytes()
                back(offload)
                assert gradients == [id(p.grad) for p in model.parameters()]
            optimizer.zero_grad()
        offload.give_back()
        return losses
"""


@pytest.mark.parametrize("amp", [False, True])
def test_training_goes_on_with_the_same_losses(run, amp):
    run(
        TRAIN
        + f"""
    for how in ({{"foreach": True}}, {{"fused": True}}, {{"capturable": True}}):
        def adamw(parameters):
            return torch.optim.AdamW(parameters, lr=1e-2, **how)
        plain = train(adamw, None, amp={amp})
        assert plain == train(adamw, None, amp={amp}), "not deterministic here"
        assert plain == train(adamw, "between", amp={amp}), how
        assert plain == train(adamw, "inside", amp={amp}), how
    """
    )


def test_fsdp2_on_one_rank(run):
    run("""
        import torch.distributed as dist
        try:
            from torch.distributed.fsdp import fully_shard
        except ImportError:
            from torch.distributed._composable.fsdp import fully_shard
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        torch.cuda.set_device(0)
        def train(yields):
            torch.manual_seed(0)
            model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).cuda()
            for layer in model: fully_shard(layer)
            fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            losses, offload = [], make(piece_bytes=4 * MIB)
            for step in range(6):
                loss = model(torch.randn(4, 256, device="cuda")).square().mean()
                loss.backward(); optimizer.step()
                losses.append(loss.item())
                if yields:
                    out(offload); back(offload)
                optimizer.zero_grad()
            return losses
        assert train(False) == train(True)
        dist.destroy_process_group()
    """)


def test_the_memory_is_given_back_and_reserved_does_not_grow(run):
    run("""
        sizes = [300 * MIB, 40 * MIB, 7 * MIB, 3 * MIB, 500_000, 3000, 17]
        tensors = [torch.randint(0, 255, (n,), dtype=torch.uint8, device="cuda") for n in sizes]
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            tensors += [torch.full((n,), 7, dtype=torch.uint8, device="cuda") for n in sizes]
        torch.cuda.synchronize()
        def streams():
            found = {}
            for segment in torch.cuda.memory_snapshot():
                for block in segment["blocks"]:
                    if block["state"] == "active_allocated":
                        found[block["address"]] = segment["stream"]
            return [found[t.untyped_storage().data_ptr()] for t in tensors]
        offload = make(piece_bytes=64 * MIB)
        out(offload); back(offload)
        torch.cuda.empty_cache()
        before, was = torch.cuda.memory_reserved(), streams()
        assert len(set(was)) == 2 and side.cuda_stream in was
        have = free()
        for _ in range(50):
            out(offload)
            assert torch.cuda.memory_reserved() == 0, torch.cuda.memory_summary()
            # of its own the driver keeps a few MiB (4.1 were seen), for what it has to map anew
            assert free() - have >= before - 16 * MIB, (free(), have, before)
            back(offload)
            assert streams() == was
        assert torch.cuda.memory_reserved() == before
        assert (tensors[-1] == 7).all()
        # what is freed later serves its own stream again
        size = tensors[len(sizes)].numel()
        address = tensors[len(sizes)].data_ptr()
        del tensors[len(sizes)]
        with torch.cuda.stream(side):
            again = torch.empty(size, dtype=torch.uint8, device="cuda")
        assert again.data_ptr() == address
    """)


GUEST = """
    import sys, torch
    torch.zeros(1, device="cuda")
    leave = 2 << 30
    taken = torch.empty(torch.cuda.mem_get_info()[0] - leave, dtype=torch.uint8, device="cuda")
    print("taken", flush=True)
    sys.stdin.readline()
"""


def test_a_device_that_is_taken_at_restore_is_waited_for_then_refused(run, tmp_path):
    guest = tmp_path / "guest.py"
    guest.write_text(textwrap.dedent(GUEST))
    run(
        """
        import subprocess
        tensors = [torch.full((GIB,), n, dtype=torch.uint8, device="cuda") for n in range(4)]
        offload = make()
        out(offload)
        guest = subprocess.Popen([sys.executable, sys.argv[1]], stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE, text=True)
        assert guest.stdout.readline() == "taken\\n"
        try:
            back(offload, wait=0.5)
        except YieldRefusedError as refused:
            assert "missing" in str(refused) and "GPU-" in str(refused), refused
        else:
            raise AssertionError("there was no room")
        assert all(not t.untyped_storage().nbytes() for t in tensors)
        assert torch.cuda.memory_reserved() == 0
        # the job's own limit, which only the allocation itself meets: undone as well
        guest.communicate("\\n", timeout=60)
        torch.cuda.set_per_process_memory_fraction(2.5 * GIB / torch.cuda.mem_get_info()[1])
        try:
            back(offload, wait=0.5)
        except YieldRefusedError as refused:
            assert "no memory" in str(refused), refused
        else:
            raise AssertionError("there was no room")
        assert torch.cuda.memory_reserved() == 0
        torch.cuda.set_per_process_memory_fraction(1.0)
        back(offload)
        assert [int(t[5]) for t in tensors] == [0, 1, 2, 3]
    """,
        str(guest),
    )


def test_whatever_host_memory_there_is_the_contents_are_the_same(run, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    run(
        """
        def rss():
            with open("/proc/self/status") as file:
                return int(next(l for l in file if l.startswith("VmRSS")).split()[1]) * 1024
        real, asked = CudaDevices.register, []
        def refuse(self, address, size, device):
            asked.append(size)
            return "no more" if len(asked) > 2 else real(self, address, size, device)
        disk = sys.argv[1]
        sizes = [600 * MIB + 5, 133 * MIB, 5 * MIB] + [1000 + n for n in range(200)]
        tensors = [torch.randint(0, 255, (n,), dtype=torch.uint8, device="cuda") for n in sizes]
        was = [t.cpu() for t in tensors]
        half = 400 * MIB
        for name, room, pool, request in (
            ("pinned", None, {}, {}),
            ("pageable", None, {"pinned_limit_bytes": 0}, {}),
            ("partly pinned", None, {"pinned_limit_bytes": half, "piece_bytes": 64 * MIB}, {}),
            ("refused", None, {"piece_bytes": 64 * MIB}, {}),
            ("disk", lambda: HostRoom(0, "the test"), {}, {"disk_dir": disk}),
            ("partly disk", lambda: HostRoom(half, "the test"), {}, {"disk_dir": disk}),
        ):
            CudaDevices.register = refuse if name == "refused" else real
            offload = make(room, **pool)
            for cycle in range(2):
                out(offload, **request)
                pinned, host = offload._pool.pinned_bytes, offload.host_bytes
                if name == "pinned": assert pinned == host >= sum(sizes), (pinned, host)
                if name == "pageable": assert pinned == 0 and host >= sum(sizes)
                if name == "partly pinned": assert 0 < pinned <= half, pinned
                if name == "refused": assert 0 < pinned < host, (pinned, host)
                if name == "disk": assert host == 0 and offload.disk_bytes >= sum(sizes)
                if name == "partly disk": assert 0 < host <= half, host
                assert bool(offload.notes) == (0 < host != pinned), (name, offload.notes)
                assert os.listdir(disk) == []
                back(offload)
                assert all(torch.equal(t.cpu(), w) for t, w in zip(tensors, was)), name
            held = rss()
            freed = offload.give_back()
            assert freed == host and offload.host_bytes == 0, (name, freed, host)
            assert held - rss() > 0.95 * freed - 8 * MIB, (name, held, rss())
            CudaDevices.register = real
        offload = make()
        out(offload, release_host=True); back(offload)
        assert offload.host_bytes == 0
    """,
        str(disk),
    )


def test_captured_graphs_and_private_pools_keep_their_device(run):
    run("""
        weight = torch.randn(500, 500, device="cuda")
        static = torch.randn(500, 500, device="cuda")
        assert {m.address for m in look().movables} >= {weight.data_ptr(), static.data_ptr()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            static + weight
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = static + weight  # a product would leave cuBLAS's workspace in the pool
        found = look()
        assert set(found.refusal) == {0} and not found.movables
        assert sum(s.size_bytes for s in found.stays if s.cause == "graphs") > 2 * 1_000_000
        del graph, result
        gc.collect(); torch.cuda.empty_cache()
        found = look()
        assert not found.refusal and found.movables, found
        if hasattr(torch.cuda, "MemPool"):
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool):
                own = torch.randn(3000, 1000, device="cuda")
            found = look()
            assert not found.refusal, found.refusal
            assert own.data_ptr() not in {m.address for m in found.movables}
            kept = [s for s in found.stays if s.cause == "kept"]
            assert kept and kept[0].size_bytes >= 12_000_000, found.stays
            del own, pool
    """)


def test_what_was_given_to_others_stays(run):
    run("""
        names = ("dlpack", "array", "ipc", "private")
        tensors = {name: torch.randn(1000, device="cuda") for name in names}
        imported = torch.from_dlpack(tensors["dlpack"])
        tensors["array"].__cuda_array_interface__
        tensors["ipc"].untyped_storage()._share_cuda_()
        def there(**more):
            found = {m.address for m in look(**more).movables}
            return {name for name, t in tensors.items() if t.data_ptr() in found}
        assert there() == {"private"}, there()
        # two storages on one block stay even so
        assert there(assume_private=True) == {"array", "ipc", "private"}
        del imported
    """)


def test_no_context_appears_on_a_device_that_is_not_used(run, devices):
    if devices < 2:
        pytest.skip("needs two GPUs")
    run("""
        has = torch._C._cuda_hasPrimaryContext
        torch.cuda.set_device(1)
        tensor = torch.randint(0, 255, (600 * MIB,), dtype=torch.uint8, device="cuda:1")
        was = tensor.cpu()
        assert not has(0) and has(1)
        for more in ({}, {"pinned_limit_bytes": 0}):
            offload = make(**more)
            out(offload); back(offload)
            offload.give_back()
        assert torch.equal(tensor.cpu(), was)
        assert not has(0)
    """)


def test_what_still_runs_on_a_block_that_is_used_again_writes_into_nothing(run):
    """A guest in this process lets go of tensors on which its kernels still run."""
    run("""
        import threading
        weights = [
            torch.randint(0, 255, (64 * MIB,), dtype=torch.uint8, device="cuda") for _ in range(24)]
        was = [one.cpu() for one in weights]
        offload, errors = make(), []
        def restore():
            try:
                back(offload)
            except BaseException as error:
                errors.append(repr(error))
        for _ in range(4):
            out(offload)
            thread = threading.Thread(target=restore)
            for turn in range(10_000):
                guest = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
                for _ in range(100):
                    guest.add_(1)
                del guest
                if turn == 2:
                    thread.start()
                elif turn > 2 and not thread.is_alive():
                    break
            thread.join()
            torch.cuda.synchronize()
            assert errors == []
            wrong = [n for n, one in enumerate(weights) if not torch.equal(one.cpu(), was[n])]
            assert wrong == []
    """)
