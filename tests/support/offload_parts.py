"""An offload in host memory, on real torch: what it is made of, and tensors to send through it."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch

from gpumem_otel.capture.objects.storages import storages_of
from gpumem_otel.yielding.copy.devices import CpuDevices
from gpumem_otel.yielding.copy.host_memory import HostPool
from gpumem_otel.yielding.copy.limits import HostRoom
from gpumem_otel.yielding.copy.offload import Offload
from gpumem_otel.yielding.copy.reservations import DeviceReservations, HostReservations
from gpumem_otel.yielding.copy.staging import Staging
from gpumem_otel.yielding.values import Candidate, YieldRequest

PIECE = 64 << 10
PLENTY = 1 << 40
SIZES = (1, 7, 8, 513, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 3)


class Watched(CpuDevices):
    """Notes where memory is allocated."""

    def __init__(self, **more):
        super().__init__(torch, **more)
        self.allocated = []
        self.emptied = 0

    @contextlib.contextmanager
    def allocating(self, device, stream):
        self.allocated.append((device, stream))
        yield

    def is_short_of_memory(self, error):
        return isinstance(error, torch.cuda.OutOfMemoryError)

    def empty_cache(self):
        self.emptied += 1


class Asked:
    """A lane that keeps what it is asked for; its kinds say what a mark does."""

    def __init__(self):
        self.asked = []

    def copy(self, to, source):
        self.asked.append((to, source))

    def zero(self, to):
        to.zero_()

    def after(self, stream):
        pass


class Parts:
    """All that an offload is made of."""

    def __init__(
        self, folder, *, room=PLENTY, free=None, limit=None, keep=None, ring=8192, piece=PIECE
    ):
        self.devices = Watched(free=free)
        self.pool = HostPool(self.devices, piece_bytes=piece, threads=2, pinned_limit_bytes=limit)
        self.host = HostReservations(f"{folder}/reservations", lambda: HostRoom(room, "the test"))
        self.gpus = DeviceReservations(f"{folder}/reservations")
        self.offload = Offload(
            self.devices, self.pool, self.host, self.gpus, keep_bytes=keep,
            staging=partial(Staging, buffers=4, buffer_bytes=ring, threads=3),
        )  # fmt: skip
        self.said = []

    def progress(self, done, total):
        self.said.append((done, total))

    def out(self, candidates, **request):
        self.offload.admit(candidates, YieldRequest(**request))
        phase = self.offload.copy_out(self.progress, never)
        self.offload.free()
        return phase

    def back(self, classes=None, wait=0.0, stop=None):
        return self.offload.copy_back(classes, wait, self.progress, stop or never)


@contextlib.contextmanager
def making(folder):
    """Makes parts whose reservations are in that folder, and ends them."""
    made = []

    def parts(**more):
        made.append(Parts(folder, **more))
        return made[-1]

    yield parts
    for one in made:
        one.offload._items = []
        one.pool.give_back()
        one.host.close()


def never():
    return False


@contextlib.contextmanager
def failing_resize(when, error=None, *, done=False):
    """Resizing fails at some calls, chosen by number from 1 and size; `done`: after resizing."""
    calls, real = [], torch.UntypedStorage.resize_

    def resize_(storage, size):
        calls.append(size)
        if when(len(calls), size):
            if done:
                real(storage, size)
            raise error or RuntimeError("the driver is gone")
        return real(storage, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", resize_, raising=False)
        yield


def candidate(storage, tensor_class="parameter", device=0, stream=0):
    size = storage.nbytes()
    return Candidate(storage, device, storage.data_ptr(), size, size, stream, tensor_class)


def candidates_of(tensors, **more):
    found = {}
    for tensor in tensors:
        for storage in storages_of(tensor):
            if storage.nbytes():
                found.setdefault(storage._cdata, candidate(storage, **more))
    return list(found.values())


def tensor(size_bytes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


class Noted:
    """A lane that notes what it is asked, and for how many bytes."""

    def __init__(self, log):
        self.log = log

    def copy(self, to, source):
        self.log.append(("copy", len(to)))
        to.copy_(source)

    def zero(self, to):
        self.log.append(("zero", len(to)))
        to.zero_()

    def after(self, stream):
        self.log.append(("after", stream))

    def mark(self):
        return self

    def wait(self):
        """Nothing is under way."""


def moved(parts, tensors):
    """Copied out, and to be freed."""
    was = [one.clone() for one in tensors]
    parts.offload.admit(candidates_of(tensors), YieldRequest())
    parts.offload.copy_out(parts.progress, never)
    return was


def same(tensors, was):
    return all(torch.equal(one, before) for one, before in zip(tensors, was, strict=True))


def emptied_by(devices, *outcomes):
    """What the next calls that empty the cache raise."""
    left = iter(outcomes)

    def empty_cache():
        outcome = next(left, None)
        if outcome is not None:
            raise outcome

    devices.empty_cache = empty_cache
