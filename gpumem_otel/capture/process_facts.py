"""What torch knows about this process: its rank in torch.distributed, its devices' UUIDs."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def distributed_rank() -> tuple[int, int] | None:
    """(rank, world size) of the default process group; None while there is none."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not distributed.is_available():
            return None
        if not distributed.is_initialized():
            return None
        return int(distributed.get_rank()), int(distributed.get_world_size())
    except Exception:  # a group that is torn down at this moment, a build without it
        return None


def current_device() -> int:
    """The device that torch would use now, 0 where it can not tell. CUDA is initialised."""
    torch = sys.modules.get("torch")
    try:
        return int(torch.cuda.current_device()) if torch is not None else 0
    except Exception:  # a driver that fails just now
        return 0


def device_uuids(devices: Iterable[int]) -> dict[int, str]:
    """Device index -> UUID as DCGM writes it: `GPU-...`, `MIG-...` (torch's has no prefix).

    Called only for devices that have a context.
    """
    torch = sys.modules.get("torch")
    found: dict[int, str] = {}
    if torch is None:
        return found
    for device in devices:
        try:
            properties = torch.cuda.get_device_properties(device)
            uuid = str(getattr(properties, "uuid", ""))
        except Exception:  # noqa: S112 - a device without a name is only a label less
            continue
        if uuid:
            known = uuid.startswith(("GPU-", "MIG-"))
            found[device] = uuid if known else f"{_prefix(str(properties.name))}{uuid}"
    return found


def _prefix(device_name: str) -> str:
    """MIG instances carry the profile in their name: `NVIDIA A100-SXM4-40GB MIG 1g.5gb`."""
    return "MIG-" if " MIG " in device_name else "GPU-"


def process_facts(devices: Iterable[int]) -> dict[str, str]:
    """What a reader of a profile or a recording wants to know about its surroundings."""
    facts = {"python": platform.python_version()}
    torch = sys.modules.get("torch")
    if torch is None:
        return facts
    facts["torch"] = str(getattr(torch, "__version__", ""))
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    if cuda:
        facts["cuda"] = str(cuda)
    try:
        # nothing is allocated yet when a recording begins: the device that is current then
        used = list(devices) or [current_device()]
        names = [str(torch.cuda.get_device_name(device)) for device in used]
    except Exception:  # a device that is going away
        names = []
    if names:
        facts["devices"] = ", ".join(names)
    return facts
