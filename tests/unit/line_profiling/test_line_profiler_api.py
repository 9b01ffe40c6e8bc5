"""What the line profiler shows, and the calls that show it."""

from __future__ import annotations

import gzip
import io
import json
import re
import sys

import pytest
from support import pprof_proto

import gpumem_otel
from gpumem_otel.api import line_profiler
from gpumem_otel.errors import ConfigError, MissingPackageError
from gpumem_otel.line_profiling import profiler as capture_lines

try:
    import pandas as pd  # here, since it changes the import system permanently
except ImportError:
    pd = None

KIB = 1024


@pytest.fixture
def at_exit(torch, monkeypatch):
    """The functions registered to run when the process ends."""
    registered = []
    monkeypatch.setattr(line_profiler.atexit, "register", registered.append)
    return registered


@pytest.fixture
def work(memory):
    """A function that keeps 4 KiB on device 0 and 8 KiB on device 1."""

    def work():
        memory.alloc(4 * KIB)
        memory.alloc(8 * KIB, device=1)

    return work


def rows_of(text):
    """(gpu, line's code) of the rows of one table with numbers in them."""
    header = next(line for line in text.splitlines() if line.startswith("gpu"))
    code = header.index("code")
    return [
        (int(line.split()[0]), line[code:].strip())
        for line in text.splitlines()
        if line[: len("gpu")].strip().isdigit()
    ]


def test_what_ran_is_printed_at_the_end_and_once(work, at_exit, capsys):
    function = gpumem_otel.profile(work)
    gpumem_otel.profile(work)
    function()
    assert len(at_exit) == 1
    at_exit[0]()
    printed = capsys.readouterr().out
    assert printed == str(gpumem_otel.line_profiler().display())
    assert printed.startswith(f"## {__name__}.work.<locals>.work (test_line_profiler_api.py:")
    assert printed.count("memory.alloc(8 * KIB, device=1)") == 1


def test_nothing_is_printed_at_the_end_of_what_did_not_run_or_is_not_to_be_shown(
    work, at_exit, capsys
):
    gpumem_otel.profile(work)
    at_exit[0]()
    gpumem_otel.profile(show=False)(lambda: None)()
    at_exit[0]()
    assert capsys.readouterr().out == ""


def test_a_closed_output_at_the_end_is_no_error(work, at_exit, monkeypatch):
    gpumem_otel.profile(work)()
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    at_exit[0]()


def test_every_so_many_calls_are_printed_with_all_so_far(work, capsys):
    function = gpumem_otel.profile_every(2)(work)
    function()
    assert capsys.readouterr().out == ""
    function()
    assert ", 2 calls" in capsys.readouterr().out
    function(), function()
    assert ", 4 calls" in capsys.readouterr().out


def test_a_call_that_raises_is_one_of_them(memory, capsys):
    @gpumem_otel.profile_every(1)
    def fails():
        memory.alloc(KIB)
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert "memory.alloc(KIB)" in capsys.readouterr().out


def test_a_generator_is_one_call_when_it_ends(memory, capsys):
    @gpumem_otel.profile_every(1)
    def items():
        memory.alloc(KIB)
        yield 1
        yield 2

    generator = items()
    next(generator), next(generator)
    assert capsys.readouterr().out == ""
    assert list(generator) == []
    assert "1 call\n" in capsys.readouterr().out


@pytest.mark.parametrize("interval", [0, -1, 1.5, "2", True])
def test_an_interval_that_is_not_valid_is_refused(interval):
    with pytest.raises(ConfigError, match="give a whole number from 1 on"):
        gpumem_otel.profile_every(interval)


def test_the_device_to_show_follows_set_target_gpu_line_by_line(memory):
    def work():
        memory.alloc(KIB, device=0)
        gpumem_otel.set_target_gpu(1)
        memory.alloc(KIB, device=1)
        gpumem_otel.set_target_gpu("cuda:0")
        memory.alloc(KIB, device=0)

    gpumem_otel.set_target_gpu(0)
    with gpumem_otel.LineProfiler(work) as lines:
        work()
    shown = rows_of(str(lines.display()))
    assert (0, "memory.alloc(KIB, device=0)") in shown
    assert (1, "memory.alloc(KIB, device=1)") in shown
    assert (0, "memory.alloc(KIB, device=1)") not in shown
    last = lines.display().to_dict()["functions"][0]["lines"][-1]
    assert set(last["devices"]) == {"0", "1"}, "all devices were read"


def test_one_device_of_a_profiler_or_of_a_display(work):
    with gpumem_otel.LineProfiler(work, target_gpu=1) as lines:
        work()
    assert {gpu for gpu, _ in rows_of(str(lines.display()))} == {1}
    assert {gpu for gpu, _ in rows_of(str(lines.display(device=0)))} == {0}


@pytest.mark.parametrize("device", ["cpu", "cuda", 1.0, True, "cuda:x"])
def test_what_is_not_a_device_is_refused(device):
    with pytest.raises(ConfigError, match="give an index"):
        gpumem_otel.set_target_gpu(device)


def test_functions_by_name_by_object_and_in_a_list(memory):
    def one():
        memory.alloc(KIB)

    def two():
        memory.alloc(KIB)

    with gpumem_otel.LineProfiler(one, two) as lines:
        one(), two()
    names = [f.name.rpartition(".")[2] for f in lines.display(one).functions]
    assert names == ["one"]
    assert [f.name for f in lines.display([two.__qualname__]).functions] == [two.__qualname__]
    assert len(lines.display([one, two]).functions) == 2
    with pytest.raises(ConfigError, match="'three' is not profiled"):
        lines.display("three")


def test_any_counter_of_torch_is_a_column(memory):
    columns = ("requested_bytes.all.current", "segment.all.allocated")

    def work():
        memory.alloc(1000)

    with gpumem_otel.LineProfiler(work, columns=columns) as lines:
        work()
    (function,) = lines.display().functions
    values = function.rows[1].devices[0].columns
    assert {name: values[name] for name in columns} == dict(zip(columns, (1000, 1), strict=True))
    text = str(lines.display(columns=columns))
    assert "requested_bytes.all.current" in text
    assert "1000 B" in text
    with pytest.raises(ConfigError, match=r"'active\.all\.peak' was not read"):
        lines.display(columns=["active.all.peak"])


def test_a_decorator_with_columns_prints_these(work, at_exit, capsys):
    columns = ["active_bytes.all.peak", "reserved_bytes.all.peak"]
    gpumem_otel.profile(columns=columns)(work)()
    at_exit[0]()
    header = capsys.readouterr().out.splitlines()[2].split()
    assert header == ["gpu", "hits", *columns, "line", "code"]


@pytest.mark.parametrize("column", ["bytes.peak", 3, "a.b.c.d"])
def test_what_cannot_be_a_counter_is_refused(column):
    with pytest.raises(ConfigError, match="is no name of"):
        gpumem_otel.profile(columns=[column])(lambda: None)


def test_text_json_pprof_and_metrics_agree(work):
    function = gpumem_otel.profile(work)
    function(), function()
    report = gpumem_otel.line_profiler().display()

    stored = json.loads(report.to_json())
    assert stored == report.to_dict()
    (of_work,) = stored["functions"]
    lines = {line["code"].strip(): line for line in of_work["lines"]}
    first = lines["memory.alloc(4 * KIB)"]["devices"]["0"]
    assert (first["allocation_bytes"], first["net_bytes"]) == (8 * KIB, 8 * KIB)
    assert (first["after_bytes"], first["allocations"]) == (8 * KIB, 2)

    parsed = pprof_proto.parse(gzip.decompress(report.pprof()))
    by_name = {
        sample.frames[0].name: sample
        for sample, _ in pprof_proto.samples_of(parsed)
        if dict(sample.labels)["device"] == "0"
    }
    line = of_work["first_line"] + 1
    name = f"{__name__}.work.<locals>.work:{line}"
    assert by_name[name].size_bytes == 8 * KIB
    assert (by_name[name].frames[0].line, dict(by_name[name].labels)) == (line, {"device": "0"})

    metrics = capture_lines.published_metrics(3)
    assert re.search(
        rf'^gpumem_line_allocation_bytes_total\{{rank="3",device="0",function=".*",'
        rf'file="test_line_profiler_api.py",line="{line}"\}} {8 * KIB}$',
        metrics,
        re.MULTILINE,
    )


@pytest.mark.skipif(pd is None, reason="pandas is not installed")
def test_pandas_has_a_row_for_each_line_and_device(work):
    function = gpumem_otel.profile(work)
    function(), function()
    frame = gpumem_otel.line_profiler().display().to_pandas()
    assert isinstance(frame, pd.DataFrame)
    chosen = frame[(frame["code"].str.strip() == "memory.alloc(4 * KIB)") & (frame["device"] == 0)]
    (row,) = chosen.to_dict("records")
    assert (row["hits"], row["allocation_bytes"], row["allocations"]) == (2, 8 * KIB, 2)
    assert row["reserved_bytes.all.peak"] == 2 << 20


def test_without_pandas_the_error_names_it(work, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with gpumem_otel.LineProfiler(work) as lines:
        work()
    with pytest.raises(MissingPackageError, match="pip install pandas"):
        lines.display().to_pandas()


def test_a_report_is_of_its_moment_and_shows_itself(work):
    with gpumem_otel.LineProfiler(work) as lines:
        work()
        report = lines.display()
        work()
    assert report.functions[0].calls == 1
    assert repr(report) == str(report)
    assert report._repr_html_().startswith("<h4>")
    stream = io.StringIO()
    lines.print_stats(stream=stream)
    assert stream.getvalue() == str(lines.display())


def test_metrics_are_empty_of_lines_where_nothing_is_decorated():
    assert 'gpumem_line_rows_left_out{rank="0"} 0' in capture_lines.published_metrics(0)
    assert "gpumem_line_hits_total{" not in capture_lines.published_metrics(0)


def test_without_torch_lines_are_counted_and_have_no_memory(work, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    with gpumem_otel.LineProfiler(work) as lines:
        work()
    assert "(no GPU memory was used by this process)" in str(lines.display())
    assert [row.hits for row in lines.display().functions[0].rows] == [1, 1, 1]
