"""What torch says about the process, asked of a stand-in with torch's own shapes."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from gpumem_otel.capture.process_facts import device_uuids, distributed_rank, process_facts


@pytest.fixture
def torch(monkeypatch):
    fake = ModuleType("torch")
    fake.__version__ = "2.11.0"
    fake.version = SimpleNamespace(cuda="13.0")
    names = ["NVIDIA H200", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100"]
    uuids = ["1ad6a8b1-0000", "2be7b9c2-0000", "GPU-3cf8"]
    fake.cuda = SimpleNamespace(
        get_device_properties=lambda d: SimpleNamespace(name=names[d], uuid=uuids[d]),
        get_device_name=lambda d: names[d],
        current_device=lambda: 2,
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


def test_uuids_are_written_as_dcgm_does(torch):
    assert device_uuids([0, 1, 2]) == {
        0: "GPU-1ad6a8b1-0000",
        1: "MIG-2be7b9c2-0000",
        2: "GPU-3cf8",
    }


def test_a_device_that_can_not_be_asked_is_left_out(torch):
    assert device_uuids([0, 9]) == {0: "GPU-1ad6a8b1-0000"}


def test_facts(torch):
    facts = process_facts([0])
    assert facts["torch"] == "2.11.0"
    assert facts["cuda"] == "13.0"
    assert facts["devices"] == "NVIDIA H200"
    assert process_facts([])["devices"] == "NVIDIA H100"


@pytest.mark.parametrize(
    ("available", "initialized", "expected"),
    [(True, True, (3, 8)), (True, False, None), (False, True, None)],
)
def test_the_rank_counts_once_the_group_is_up(monkeypatch, available, initialized, expected):
    group = SimpleNamespace(
        is_available=lambda: available,
        is_initialized=lambda: initialized,
        get_rank=lambda: 3,
        get_world_size=lambda: 8,
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    assert distributed_rank() == expected


def test_a_group_that_is_torn_down_is_no_error(monkeypatch):
    def gone():
        raise ValueError("default process group has not been initialized")

    group = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=gone, get_world_size=gone
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    assert distributed_rank() is None
