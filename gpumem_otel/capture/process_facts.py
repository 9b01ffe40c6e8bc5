"""Reads facts about this process from torch: its rank, devices and versions."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def distributed_rank() -> tuple[int, int] | None:
    """(rank, world size) of the default process group; None if there is none."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not distributed.is_available():
            return None
        if not distributed.is_initialized():
            return None
        return int(distributed.get_rank()), int(distributed.get_world_size())
    except Exception:  # a group being torn down, or a build without it
        return None


def current_device() -> int:
    """The current device, 0 if unknown. CUDA is initialised."""
    torch = sys.modules.get("torch")
    try:
        return int(torch.cuda.current_device()) if torch is not None else 0
    except Exception:  # the driver fails
        return 0


def device_uuids(devices: Iterable[int]) -> dict[int, str]:
    """Device index -> UUID as DCGM writes it: `GPU-...`, `MIG-...` (torch's has no prefix).

    Called only for devices that have a context.
    """
    torch = sys.modules.get("torch")
    uuids: dict[int, str] = {}
    if torch is None:
        return uuids
    for device in devices:
        try:
            properties = torch.cuda.get_device_properties(device)
            uuid = str(getattr(properties, "uuid", ""))
        except Exception:  # noqa: S112 - only the label is missing then
            continue
        if uuid:
            known = uuid.startswith(("GPU-", "MIG-"))
            uuids[device] = uuid if known else f"{_prefix(str(properties.name))}{uuid}"
    return uuids


def _prefix(device_name: str) -> str:
    """MIG instances carry the profile in their name: `NVIDIA A100-SXM4-40GB MIG 1g.5gb`."""
    return "MIG-" if " MIG " in device_name else "GPU-"


def process_facts(devices: Iterable[int]) -> dict[str, str]:
    """Versions and device names for the comments of a profile or recording."""
    facts = {"python": platform.python_version()}
    torch = sys.modules.get("torch")
    if torch is None:
        return facts
    facts["torch"] = str(getattr(torch, "__version__", ""))
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    if cuda:
        facts["cuda"] = str(cuda)
    try:
        # at the start of a recording nothing is allocated yet: use the current device
        used = list(devices) or [current_device()]
        names = [str(torch.cuda.get_device_name(device)) for device in used]
    except Exception:  # the device is gone
        names = []
    if names:
        facts["devices"] = ", ".join(names)
    return facts
