"""Speed of giving device memory back and taking it again, beside the plain pinned copy.

    python benchmarks/offload.py [--gib 20] [--tensors 20] [--cycles 3] [--out FILE.json]

One process. First a plain copy of pinned memory in each direction is measured, by torch alone: the
speed of the link. Then tensors that hold so many GiB go to the host and come back: the first time
with no host memory pinned, later with it kept. A yield is admission, copies and `empty_cache`; a
restore is allocation and copies. Contents are compared bit by bit through checksums (not timed).
`--verify` times them too. `--pageable` and `--disk DIR` force the fallbacks.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GIB = 1 << 30


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=20.0)
    parser.add_argument("--tensors", type=int, default=20)
    parser.add_argument("--uneven", action="store_true", help="sizes from 1 KiB up, as in models")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--piece-mib", type=int, default=256)
    parser.add_argument("--touch-threads", type=int)
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--pageable", action="store_true")
    parser.add_argument("--disk", default="", help="folder; all goes there")
    parser.add_argument("--cpu", action="store_true", help="try the script without a GPU")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    rows = _measure(options)
    _print(rows)
    if options.out:
        settings = {k: v for k, v in vars(options).items() if k != "out"}
        found = {**_machine(options), "settings": settings, "rows": rows}
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _print(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        extra = "  ".join(f"{k} {v:.3f} s" for k, v in row.get("parts", {}).items())
        speed = f"{row['gib_per_second']:7.2f} GiB/s" if row.get("gib_per_second") else ""
        print(f"{row['what']:<28} {row['seconds']:8.3f} s {speed:<16} {extra}", flush=True)


def _machine(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    return {
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "device": "cpu" if options.cpu else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
    }


def _sizes(options: argparse.Namespace) -> list[int]:
    total = int(options.gib * GIB)
    if not options.uneven:
        return [total // options.tensors] * options.tensors
    weights = [10 ** (-4 * i / max(options.tensors - 1, 1)) for i in range(options.tensors)]
    return [max(int(total * w / sum(weights)) // 4 * 4, 1024) for w in weights]


def _measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    import torch

    from gpumem_otel.yielding.copy.devices import CpuDevices, CudaDevices
    from gpumem_otel.yielding.copy.host_memory import HostPool
    from gpumem_otel.yielding.copy.limits import HostRoom, read_room
    from gpumem_otel.yielding.copy.offload import Offload
    from gpumem_otel.yielding.copy.reservations import DeviceReservations, HostReservations

    devices = CpuDevices(torch) if options.cpu else CudaDevices(torch)
    rows = [] if options.cpu else _plain(torch)
    sizes = _sizes(options)
    where = "cpu" if options.cpu else "cuda"
    tensors = [torch.empty(size, dtype=torch.uint8, device=where) for size in sizes]
    for tensor in tensors:
        tensor.random_(0, 255)
    if options.verify:
        rows.append(_checksums(torch, tensors, sum(sizes)))
    with tempfile.TemporaryDirectory() as folder:
        pool = HostPool(
            devices,
            piece_bytes=options.piece_mib << 20,
            threads=options.touch_threads,
            pinned_limit_bytes=0 if options.pageable else None,
        )
        space = (lambda: HostRoom(0, "the benchmark")) if options.disk else read_room
        host = HostReservations(f"{folder}/reservations", space)
        offload = Offload(devices, pool, host, DeviceReservations(f"{folder}/reservations"))
        _cycle(offload, tensors, options.disk, verify=True)  # contents, and everything loaded
        offload.give_back()
        for cycle in range(options.cycles):
            rows += _cycle(offload, tensors, options.disk, first=not cycle)
        print(f"pinned {pool.pinned_bytes / GIB:.1f} of {pool.capacity_bytes / GIB:.1f} GiB")
        for note in offload.notes:
            print(f"note: {note}")
        started = time.perf_counter()
        freed = offload.give_back()
        rows.append(_row("host memory given back", time.perf_counter() - started, freed, {}))
        host.close()
    return rows


def _cycle(
    offload: Any, tensors: list[Any], disk: str, *, verify: bool = False, first: bool = False
) -> list[dict[str, Any]]:
    from gpumem_otel.yielding.values import Candidate, YieldRequest

    storages = [tensor.untyped_storage() for tensor in tensors]
    candidates = [
        Candidate(s, 0, s.data_ptr(), s.nbytes(), s.nbytes(), 0, "parameter") for s in storages
    ]
    total = sum(s.nbytes() for s in storages)
    parts = {}
    started = time.perf_counter()
    offload.admit(candidates, YieldRequest(verify=verify, disk_dir=disk))
    parts["admit"] = time.perf_counter() - started
    parts["copy"] = offload.copy_out(_nothing, _never).seconds
    copied = time.perf_counter()
    offload.free()
    ended = time.perf_counter()
    parts["free"] = ended - copied
    rows = [_row("first yield" if first else "later yield", ended - started, total, parts)]
    started = time.perf_counter()
    parts = {"copy": offload.copy_back(None, 60.0, _nothing, _never).seconds}
    rows.append(_row("restore", time.perf_counter() - started, total, parts))
    if verify:
        print(f"contents: {offload.verify()}", flush=True)
    return rows


def _plain(torch: Any) -> list[dict[str, Any]]:
    """Copies of 1 GiB between a pinned buffer of torch's and the device, the best of five."""
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
    rows = []
    for what, to, source in (
        ("pinned copy to the host", host, there),
        ("pinned copy to the device", there, host),
    ):
        best = float("inf")
        for _ in range(5):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(4):
                to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - started)
        rows.append(_row(what, best, 4 * GIB, {}))
    return rows


def _checksums(torch: Any, tensors: list[Any], total: int) -> dict[str, Any]:
    from gpumem_otel.yielding.copy.checksums import checksums

    checksums(torch, tensors[:1])
    started = time.perf_counter()
    checksums(torch, tensors)
    return _row("checksums", time.perf_counter() - started, total, {})


def _row(what: str, seconds: float, size: int, parts: dict[str, float]) -> dict[str, Any]:
    return {
        "what": what,
        "seconds": seconds,
        "bytes": size,
        "gib_per_second": size / GIB / seconds,
        "parts": parts,
    }


def _nothing(done: int, total: int) -> None:
    pass


def _never() -> bool:
    return False


if __name__ == "__main__":
    sys.exit(main())
