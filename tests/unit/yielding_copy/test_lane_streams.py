"""Copies of a device wait for the stream that had a block before: what CUDA is asked for that."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpumem_otel.yielding.copy.devices import CudaDevices


class Stream:
    def __init__(self, name, *, busy=False):
        self.name = name
        self.busy = busy
        self.waits = []

    def query(self):
        return not self.busy

    def wait_event(self, event):
        self.waits.append(event.of)


class Event:
    def __init__(self, **options):
        self.of = None

    def record(self, stream):
        self.of = stream.name


@pytest.fixture
def cuda():
    ours = []

    def stream(device):
        ours.append(Stream(f"ours {device}"))
        return ours[-1]

    return SimpleNamespace(
        Stream=stream,
        Event=Event,
        ExternalStream=lambda raw, device: Stream(f"raw {raw} of {device}", busy=raw == 7),
        default_stream=lambda device: Stream(f"default of {device}", busy=True),
        cudart=lambda: None,
        ours=ours,
    )


def test_all_streams_of_a_lane_wait_for_one_that_is_at_work(cuda):
    lane = CudaDevices(SimpleNamespace(cuda=cuda)).lane(3)
    lane.after(7)
    lane.after(0)
    lane.after(8)  # idle: nothing to wait for
    assert len(cuda.ours) == 2
    assert [one.waits for one in cuda.ours] == [["raw 7 of 3", "default of 3"]] * 2
