"""Which devices no storage may leave: captured graphs and private pools."""

from __future__ import annotations

import pytest

from gpumem_otel.yielding.scan.cuda_graphs import graph_refusals, pool_ids


class Graph:
    def __init__(self, pool=None):
        self._pool = pool

    def pool(self):
        if self._pool is None:
            raise RuntimeError("called on a graph that was not captured")
        return self._pool


class Pool:
    def __init__(self, number):
        self.id = (0, number)


def segment(device, pool, *states):
    blocks = [{"address": n, "size": 512, "state": state} for n, state in enumerate(states)]
    return {"device": device, "segment_pool_id": pool, "blocks": blocks}


ALIVE, FREE, PENDING = "active_allocated", "inactive", "active_pending_free"


@pytest.mark.parametrize(
    ("segments", "refused"),
    [
        ([segment(0, (0, 0), ALIVE)], set()),
        ([segment(0, (1, 0), FREE)], set()),
        ([segment(0, (0, 0), ALIVE), segment(1, (1, 0), FREE, ALIVE)], {1}),
        ([segment(1, (3, 0), PENDING)], {1}),
        ([segment(0, (0, 7), ALIVE)], set()),  # the job's own MemPool
        ([segment(0, (0, 8), ALIVE)], {0}),  # torch.cuda.graph_pool_handle()
        ([{"device": 0, "blocks": [{"size": 1, "state": ALIVE}]}], set()),  # torch 2.0
    ],
)
def test_what_lives_in_a_private_pool_refuses_its_device(segments, refused):
    assert set(graph_refusals([], segments, pool_ids([Pool(7)]), {0, 1})) == refused


def test_a_live_graph_refuses_the_device_of_its_pool():
    segments = [segment(0, (0, 0), ALIVE), segment(1, (4, 0), FREE)]
    refused = graph_refusals([Graph((4, 0))], segments, set(), {0, 1})
    assert set(refused) == {1}
    assert "graph" in refused[1]


@pytest.mark.parametrize("graph", [Graph(), Graph((9, 0))], ids=["no pool", "pool without memory"])
def test_a_graph_that_does_not_tell_where_it_is_refuses_all(graph):
    segments = [segment(0, (0, 0), ALIVE)]
    assert set(graph_refusals([graph], segments, set(), {0, 1})) == {0, 1}
