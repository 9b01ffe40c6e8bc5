"""Regions in real torch, on the CPU: compiled code is as without them."""

from __future__ import annotations

import inspect

import pytest

import gpumem_otel
from gpumem_otel.capture.metadata import AllocationMarks
from gpumem_otel.capture.recorder import known_arity, torch_version

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch")


def compiled(function):
    """With the graphs that were made; any break is an error."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    return torch.compile(function, backend=backend, fullgraph=True), graphs


traced = pytest.mark.skipif(
    torch.__version__.startswith("2.3."), reason="torch 2.3 breaks a graph at any `with` of ours"
)


@traced
def test_a_region_within_compiled_code_breaks_no_graph():
    def plain(x):
        return torch.relu(x) + 1

    def with_region(x):
        with gpumem_otel.region("head"):
            return torch.relu(x) + 1

    x = torch.randn(4)
    fast, graphs = compiled(with_region)
    expected, plain_graphs = compiled(plain)
    assert torch.equal(fast(x), expected(x))
    nodes = [[node.op for node in graph.graph.nodes] for graph in (*graphs, *plain_graphs)]
    assert nodes[0] == nodes[1]


@traced
def test_a_decorated_function_within_compiled_code_breaks_no_graph():
    @gpumem_otel.region("head")
    def head(x, scale=2):
        return torch.relu(x) * scale

    def model(x):
        return head(x, scale=3) + head(x)

    x = torch.randn(4)
    fast, graphs = compiled(model)
    assert torch.equal(fast(x), model(x))
    assert len(graphs) == 1


def test_a_compiled_function_within_a_region():
    fast, graphs = compiled(lambda x: x * 2)
    with gpumem_otel.region("step"):
        assert torch.equal(fast(torch.ones(2)), torch.full((2,), 2.0))
    fast(torch.ones(2))
    assert len(graphs) == 1  # nothing was compiled anew outside of it


def test_backward_through_a_decorated_module():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        @gpumem_otel.region("forward")
        def forward(self, x):
            return self.linear(x)

    model = Model()
    model(torch.ones(1, 3)).sum().backward()
    assert model.linear.weight.grad is not None
    assert list(inspect.signature(model.forward).parameters) == ["x"]


def test_torch_has_the_string_from_2_10_on():
    has = hasattr(torch._C, "_cuda_setMemoryMetadata")
    if not hasattr(torch._C, "_cuda_getDeviceCount"):
        pytest.skip("a build without CUDA")
    assert has is (torch_version(torch) >= (2, 10))


def test_without_a_driver_it_gives_up_and_says_nothing_to_the_job():
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    marks = AllocationMarks(torch)
    assert marks.enter("x") is None


def test_the_names_that_are_passed_are_those_of_torch():
    """`record_pinned_host_memory` and `global_record_annotations` are where we put them."""
    record = getattr(torch._C, "_cuda_record_memory_history", None)
    if record is None:
        pytest.skip("a build without CUDA")
    version = torch_version(torch)
    parameters = inspect.signature(torch.cuda.memory._record_memory_history_impl).parameters
    assert ("record_pinned_host_memory" in parameters) is (version >= (2, 14))
    assert (known_arity(record, version) >= 10) is (version >= (2, 14))
    assert ("global_record_annotations" in parameters) is (version >= (2, 8))
