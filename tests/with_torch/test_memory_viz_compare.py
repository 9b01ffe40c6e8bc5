"""Segments compared as torch's own tool compares them.

Its command line reads both files into a form that its comparison does not take any more (torch
2.15), so the function is called with what it takes: the two lists of segments.
"""

from __future__ import annotations

import ast
import gzip
import json
import pickle
from itertools import permutations

import pytest
from support.recordings import DATA

from gpumem_otel.cli.main import main

pytestmark = pytest.mark.torch

memory_viz = pytest.importorskip("torch.cuda._memory_viz")

FILES = sorted(DATA.glob("*.pickle.gz"))


def segments_of(path):
    raw = pickle.loads(gzip.decompress(path.read_bytes()))
    return raw if isinstance(raw, list) else raw["segments"]


def lists_in(text):
    """The two lines `only_before = [...]` and `only_after = [...]`, sorted."""
    found = dict(
        line.split(" = ")
        for line in text.splitlines()
        if line.startswith("only_") and " = " in line
    )
    return {name: sorted(ast.literal_eval(value)) for name, value in found.items()}


def torch_says(capsys, before, after):
    memory_viz.compare(before, after, format_flamegraph=lambda text: text)
    return lists_in(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("before", "after"), list(permutations(FILES, 2)), ids=lambda p: p.name[15:-10]
)
def test_only_before_and_only_after(capsys, before, after):
    expected = torch_says(capsys, segments_of(before), segments_of(after))
    assert main(["compare", "--by", "segment", str(before), str(after)]) == 0
    assert lists_in(capsys.readouterr().out) == expected
    assert main(["compare", "--by", "segment", "--json", str(before), str(after)]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    for name in ("only_before", "only_after"):
        assert sorted(one["address"] for one in device[name]) == expected[name]


def test_a_segment_more_and_one_less(capsys, tmp_path):
    (path,) = [one for one in FILES if "oom" in one.name]
    before = segments_of(path)
    after = [{**before[0], "address": 4096}, *before[1:]]
    changed = tmp_path / "after.pickle"
    changed.write_bytes(pickle.dumps(after, protocol=4))
    expected = torch_says(capsys, before, after)
    assert expected == {"only_before": [before[0]["address"]], "only_after": [4096]}
    assert main(["compare", "--by", "segment", str(path), str(changed)]) == 0
    assert lists_in(capsys.readouterr().out) == expected
