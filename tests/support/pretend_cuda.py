"""The real torch, made to believe in one GPU: what needs a driver is replaced by the fake's.

For processes of their own only, since nothing is put back. The queue of `torch.cuda`, its
`_lazy_init`, its hooks and everything else is torch's own.
"""

from __future__ import annotations

import re

from support import fake_torch

_FROM_FAKE = (
    "_cuda_record_memory_history",
    "_cuda_record_memory_history_legacy",
    "_cuda_isHistoryEnabled",
    "_cuda_getDeviceCount",
    "_cuda_hasPrimaryContext",
    "_cuda_memoryStats",
    "_cuda_memorySnapshot",
    "_cuda_attach_out_of_memory_observer",
)


def pretend(torch):
    """Call it once torch is imported and before gpumem_otel is installed.

    Returns:
        The fake's allocator of device 0: `alloc(size)` is what the job allocates.
    """
    minor = int(re.match(r"\d+\.(\d+)", torch.__version__)[1])
    known = sorted((int(name.partition(".")[2]), name) for name in fake_torch.ARITY)
    version = [name for at, name in known if at <= minor][-1]
    fake = fake_torch.make(version)
    for name in _FROM_FAKE:
        setattr(torch._C, name, getattr(fake._C, name))
    for name in ("_cuda_hostMemoryStats", "_cuda_getMemoryFraction"):
        if hasattr(torch._C, name):
            delattr(torch._C, name)
    torch._C._cuda_init = lambda: None
    cuda = torch.cuda
    # torch's own checks and seeds of the devices have none to look at
    cuda.device_count = cuda.random.device_count = lambda: 0
    cuda.is_available = lambda: False
    cuda.get_allocator_backend = lambda: "native"
    cuda.mem_get_info = fake.cuda.mem_get_info
    return fake.allocators[0]
