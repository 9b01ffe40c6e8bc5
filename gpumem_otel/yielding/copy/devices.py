"""The device operations that moving memory needs; in this folder only this file uses torch's API.

`CpuDevices` works on storages in host memory, so that tests need no GPU; `CudaDevices` is for GPUs.
Both are called only at a safe point, by the one thread that moves memory; `register` and
`unregister` by the pool's pinning threads.
"""

# ruff: noqa: D102 - `CpuDevices` documents the methods of `CudaDevices`
from __future__ import annotations

import ctypes
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from contextlib import AbstractContextManager

_PORTABLE: Final = 1
"""`cudaHostRegisterPortable` of the CUDA runtime API: pinned for all devices."""
_STREAMS: Final = 2


class StreamMark(Protocol):
    """A point in a lane's work."""

    def wait(self) -> None:
        """Return once all copies requested before the mark are done."""
        ...


class Lane(Protocol):
    """Asynchronous copies of one device: ordered between two marks, unordered across a mark."""

    def copy(self, to: Any, source: Any) -> None:
        """Request a copy between two byte tensors of equal length; the next `mark` starts it."""
        ...

    def zero(self, to: Any) -> None:
        """Start filling a byte tensor with zeros."""
        ...

    def mark(self) -> StreamMark:
        """Start all copies requested since the last mark. On any thread."""
        ...

    def after(self, stream: int) -> None:
        """Copies not started yet wait for the current work of a stream (raw handle).

        A freed block is safe to reuse only in the order of its own stream: its last user may still
        run there.
        """
        ...


class CpuDevices:
    """Storages in host memory: `mark` returns when the copies are done.

    Args:
        free: free bytes of a device; None for no limit.
        pin: replaces the driver's pinning: (address, bytes) -> "" or the reason of a failure.
    """

    def __init__(
        self,
        torch: Any,
        *,
        free: Callable[[int], int] | None = None,
        pin: Callable[[int, int], str] | None = None,
    ) -> None:
        self.torch = torch
        self._free = free
        self._pin = pin

    @contextmanager
    def at_rest(self, used: Collection[int]) -> Iterator[None]:
        """Shield our operations from the caller's modes (gradients, inference, torch functions).

        The thread may have no current device yet. It is set to one of those in use, so that leaving
        another device never creates a context on device 0, where the job may have none.
        """
        torch = self.torch
        with ExitStack() as stack:
            for mode in (
                torch.inference_mode(False),
                torch.no_grad(),
                torch._C.DisableTorchFunction(),  # noqa: SLF001 - as torch.overrides documents
                self.on(min(used)) if used else nullcontext(),
            ):
                stack.enter_context(mode)
            yield

    def on(self, device: int) -> AbstractContextManager[None]:  # noqa: ARG002
        """Make this the thread's current device."""
        return nullcontext()

    def synchronize(self, device: int) -> None:
        """Wait for all work of a device."""

    def lane(self, device: int) -> Lane:  # noqa: ARG002
        """A new lane for copies of a device."""
        return _Immediate()

    def allocating(self, device: int, stream: int) -> AbstractContextManager[None]:  # noqa: ARG002
        """Allocate and free on this device and stream (raw handle)."""
        return nullcontext()

    def empty_cache(self) -> None:
        """Give the allocator's cached memory back to the device."""

    def free_bytes(self, device: int) -> int:
        """Free memory of the device."""
        return self._free(device) if self._free is not None else 1 << 62

    def uuid(self, device: int) -> str:
        """An identifier of the device on this machine."""
        return f"CPU-{device}"

    def is_short_of_memory(self, error: BaseException) -> bool:
        """Whether an allocation failed because the device was full."""
        return isinstance(error, MemoryError) or "can't allocate memory" in str(error)

    def bytes_of(self, storage: Any, device: int) -> Any:  # noqa: ARG002
        """A byte tensor over a storage, with a version counter of its own."""
        torch = self.torch
        view = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return view.set_(storage, 0, (storage.nbytes(),), (1,))

    def host_bytes(self, address: int, size_bytes: int) -> Any:
        """A tensor over host memory of ours, which must outlive the tensor."""
        array = (ctypes.c_char * size_bytes).from_address(address)
        return self.torch.frombuffer(array, dtype=self.torch.uint8)

    def use(self, device: int) -> None:
        """Set the device of a thread of ours, which else would create a context on device 0."""

    def register(self, address: int, size_bytes: int, device: int) -> str:  # noqa: ARG002
        """Pin host memory; "" for success, else the reason."""
        return self._pin(address, size_bytes) if self._pin is not None else ""

    def unregister(self, address: int) -> None:
        """Undo `register`."""


Devices: TypeAlias = CpuDevices
"""Either of the two."""


class CudaDevices(CpuDevices):
    """Devices of the CUDA runtime, through torch alone.

    Args:
        torch: the module; CUDA is initialised.
    """

    def __init__(self, torch: Any) -> None:
        super().__init__(torch)
        self._cudart = torch.cuda.cudart()
        self._streams: dict[int, tuple[Any, ...]] = {}

    def on(self, device: int) -> AbstractContextManager[None]:
        current: AbstractContextManager[None] = self.torch.cuda.device(device)
        return current

    def synchronize(self, device: int) -> None:
        self.torch.cuda.synchronize(device)

    def lane(self, device: int) -> Lane:
        cuda = self.torch.cuda
        streams = self._streams.get(device)
        if streams is None:
            made = tuple(cuda.Stream(device) for _ in range(_STREAMS))
            streams = self._streams[device] = made
        return _Streams(self.torch, streams, lambda stream: self._stream(device, stream))

    @contextmanager
    def allocating(self, device: int, stream: int) -> Iterator[None]:
        cuda = self.torch.cuda
        with cuda.device(device), cuda.stream(self._stream(device, stream)):
            yield

    def _stream(self, device: int, stream: int) -> Any:
        cuda = self.torch.cuda
        if stream:
            return cuda.ExternalStream(stream, device=device)
        return cuda.default_stream(device)

    def empty_cache(self) -> None:
        self.torch.cuda.empty_cache()

    def free_bytes(self, device: int) -> int:
        return int(self.torch.cuda.mem_get_info(device)[0])

    def uuid(self, device: int) -> str:
        # before torch 2.4 the name and index
        properties = self.torch.cuda.get_device_properties(device)
        uuid = getattr(properties, "uuid", None)
        name = properties.name.replace(" ", "-")
        return f"GPU-{uuid}" if uuid is not None else f"{name}-{device}"

    def is_short_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, self.torch.cuda.OutOfMemoryError)

    def use(self, device: int) -> None:
        self.torch.cuda.set_device(device)

    def register(self, address: int, size_bytes: int, device: int) -> str:  # noqa: ARG002
        code = int(self._cudart.cudaHostRegister(address, size_bytes, _PORTABLE))
        return "" if code == 0 else f"cudaHostRegister returned {code}"

    def unregister(self, address: int) -> None:
        self._cudart.cudaHostUnregister(address)


class _Immediate:
    """A lane whose copies are done by `mark`."""

    def __init__(self) -> None:
        self._asked: list[tuple[Any, Any]] = []

    def copy(self, to: Any, source: Any) -> None:
        self._asked.append((to, source))

    @staticmethod
    def zero(to: Any) -> None:
        to.zero_()

    def mark(self) -> StreamMark:
        asked, self._asked = self._asked, []
        for to, source in asked:
            to.copy_(source)
        return self

    def after(self, stream: int) -> None:
        pass

    def wait(self) -> None:
        pass


class _Streams:
    """A lane over several streams of ours, switched at each mark.

    One call of torch starts many copies: it costs 5 us per copy instead of 100, and releases the
    interpreter lock.
    """

    def __init__(
        self, torch: Any, streams: tuple[Any, ...], stream_of: Callable[[int], Any]
    ) -> None:
        self._torch = torch
        self._streams = streams
        self._stream_of = stream_of
        self._known: dict[int, Any] = {}
        self._turn = 0
        self._to: list[Any] = []
        self._from: list[Any] = []

    def copy(self, to: Any, source: Any) -> None:
        self._to.append(to)
        self._from.append(source)

    def zero(self, to: Any) -> None:
        with self._torch.cuda.stream(self._streams[self._turn]):
            to.zero_()

    def mark(self) -> StreamMark:
        cuda, stream = self._torch.cuda, self._streams[self._turn]
        to, source = self._to, self._from
        self._to, self._from = [], []
        if to:
            with cuda.stream(stream):
                self._torch._foreach_copy_(to, source, non_blocking=True)
        event = cuda.Event(blocking=True)
        event.record(stream)
        self._turn = (self._turn + 1) % len(self._streams)
        return _EventMark(event)

    def after(self, stream: int) -> None:
        other = self._known.get(stream)
        if other is None:
            other = self._known[stream] = self._stream_of(stream)
        if other.query():  # idle, as usual at a safe point: cheaper than an event
            return
        event = self._torch.cuda.Event()
        event.record(other)
        for mine in self._streams:
            mine.wait_event(event)


class _EventMark:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()
