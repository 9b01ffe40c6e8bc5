"""What moving memory needs of a device, and nothing else: the only door to torch of this room.

`CpuDevices` does it all with storages in host memory, so that everything above is proved without a
GPU; `CudaDevices` is the real thing. Both are called at a safe point alone, by the one thread that
moves memory; `register` and `unregister` by threads of the pool that has it pinned.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from contextlib import AbstractContextManager

_PORTABLE: Final = 1
"""`cudaHostRegisterPortable` of the CUDA runtime API: pinned for all devices."""
_STREAMS: Final = 2


class StreamMark(Protocol):
    """A moment in a lane's work."""

    def wait(self) -> None:
        """Return once everything that was asked of the lane before it is done."""
        ...


class Lane(Protocol):
    """Copies of one device, asynchronous; in order between two marks, in any order across one."""

    def copy(self, to: Any, source: Any) -> None:
        """Copy one tensor of bytes into another of the same length, from the next `mark` on."""
        ...

    def zero(self, to: Any) -> None:
        """Begin to fill a tensor of bytes with zeros."""
        ...

    def mark(self) -> StreamMark:
        """Begin what was asked for since the last mark, and the moment after it. On any thread."""
        ...

    def after(self, stream: int) -> None:
        """What was not begun yet waits for the work that a stream (raw handle) has now.

        A block is free for reuse in the order of its own stream alone: its last user may still run.
        """
        ...


class Devices(Protocol):
    """See `CpuDevices`, which says what each of them does."""

    torch: Any
    at_rest: Callable[[Collection[int]], AbstractContextManager[None]]
    on: Callable[[int], AbstractContextManager[None]]
    synchronize: Callable[[int], None]
    lane: Callable[[int], Lane]
    allocating: Callable[[int, int], AbstractContextManager[None]]
    empty_cache: Callable[[], None]
    free_bytes: Callable[[int], int]
    uuid: Callable[[int], str]
    is_short_of_memory: Callable[[BaseException], bool]
    bytes_of: Callable[[Any, int], Any]
    host_bytes: Callable[[int, int], Any]
    use: Callable[[int], None]
    register: Callable[[int, int, int], str]
    unregister: Callable[[int], None]


class CpuDevices:
    """Storages in host memory: every copy is done when it returns.

    Args:
        torch: the module.
        free: says how many bytes a device has free; None for plenty.
        pin: stands for the driver's pinning: address and bytes -> "" or why not.
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
        """No mode of the caller (gradients, inference, functions) sees or changes what we do.

        Its thread may have no device yet: whatever it switches to, it goes back to one of those in
        use, else a context would appear on the first device, where the job may have none.
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
        """Within, the thread's device is this one."""
        return nullcontext()

    def synchronize(self, device: int) -> None:
        """Wait for all work of a device."""

    def lane(self, device: int) -> Lane:  # noqa: ARG002
        """Where copies of a device are asked for; one for each piece of work."""
        return _Immediate()

    def allocating(self, device: int, stream: int) -> AbstractContextManager[None]:  # noqa: ARG002
        """Within, memory is allocated and freed on this device, for this stream (raw handle)."""
        return nullcontext()

    def empty_cache(self) -> None:
        """Give what the allocator holds for nobody back to the device."""

    def free_bytes(self, device: int) -> int:
        """What the device has free for anybody."""
        return self._free(device) if self._free is not None else 1 << 62

    def uuid(self, device: int) -> str:
        """Names the device on this machine."""
        return f"CPU-{device}"

    def is_short_of_memory(self, error: BaseException) -> bool:
        """Whether an allocation failed since the device had no room."""
        return isinstance(error, MemoryError) or "can't allocate memory" in str(error)

    def bytes_of(self, storage: Any, device: int) -> Any:  # noqa: ARG002
        """A tensor of bytes over a storage: another view, of which the job's tensors see nothing.

        Its version counter is its own.
        """
        torch = self.torch
        view = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return view.set_(storage, 0, (storage.nbytes(),), (1,))

    def host_bytes(self, address: int, size_bytes: int) -> Any:
        """A tensor over host memory of ours, which must outlive it."""
        array = (ctypes.c_char * size_bytes).from_address(address)
        return self.torch.frombuffer(array, dtype=self.torch.uint8)

    def use(self, device: int) -> None:
        """A thread of ours is for this device: with none it would make a context on the first."""

    def register(self, address: int, size_bytes: int, device: int) -> str:  # noqa: ARG002
        """Pin host memory; "" where it is, else why it is not."""
        return self._pin(address, size_bytes) if self._pin is not None else ""

    def unregister(self, address: int) -> None:
        """Undo `register`."""


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
        """See `CpuDevices`."""
        found: AbstractContextManager[None] = self.torch.cuda.device(device)
        return found

    def synchronize(self, device: int) -> None:
        """See `CpuDevices`."""
        self.torch.cuda.synchronize(device)

    def lane(self, device: int) -> Lane:
        """See `CpuDevices`."""
        cuda = self.torch.cuda
        streams = self._streams.get(device)
        if streams is None:
            made = tuple(cuda.Stream(device) for _ in range(_STREAMS))
            streams = self._streams[device] = made
        return _Streams(self.torch, streams, lambda stream: self._stream(device, stream))

    @contextmanager
    def allocating(self, device: int, stream: int) -> Iterator[None]:
        """See `CpuDevices`."""
        cuda = self.torch.cuda
        with cuda.device(device), cuda.stream(self._stream(device, stream)):
            yield

    def _stream(self, device: int, stream: int) -> Any:
        cuda = self.torch.cuda
        if stream:
            return cuda.ExternalStream(stream, device=device)
        return cuda.default_stream(device)

    def empty_cache(self) -> None:
        """See `CpuDevices`."""
        self.torch.cuda.empty_cache()

    def free_bytes(self, device: int) -> int:
        """See `CpuDevices`."""
        return int(self.torch.cuda.mem_get_info(device)[0])

    def uuid(self, device: int) -> str:
        """See `CpuDevices`; `GPU-` and the UUID, or the name and index before torch 2.4."""
        found = self.torch.cuda.get_device_properties(device)
        uuid = getattr(found, "uuid", None)
        return f"GPU-{uuid}" if uuid is not None else f"{found.name.replace(' ', '-')}-{device}"

    def is_short_of_memory(self, error: BaseException) -> bool:
        """See `CpuDevices`."""
        return isinstance(error, self.torch.cuda.OutOfMemoryError)

    def use(self, device: int) -> None:
        """See `CpuDevices`."""
        self.torch.cuda.set_device(device)

    def register(self, address: int, size_bytes: int, device: int) -> str:  # noqa: ARG002
        """See `CpuDevices`."""
        code = int(self._cudart.cudaHostRegister(address, size_bytes, _PORTABLE))
        return "" if code == 0 else f"cudaHostRegister says {code}"

    def unregister(self, address: int) -> None:
        """See `CpuDevices`."""
        self._cudart.cudaHostUnregister(address)


class _Immediate:
    """A lane of copies that are done at once."""

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
        """All work is done."""

    def wait(self) -> None:
        """Nothing is under way."""


class _Streams:
    """A lane over several streams of ours, each in its turn from mark to mark.

    One call of torch begins many copies: it costs 5 us for each of them instead of 100, and lets go
    of the interpreter lock.
    """

    def __init__(self, torch: Any, streams: tuple[Any, ...], found: Callable[[int], Any]) -> None:
        self._torch = torch
        self._streams = streams
        self._found = found
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
            other = self._known[stream] = self._found(stream)
        if other.query():  # as at any safe point: cheaper than an event
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
