"""The line profiler's rows as text, HTML, JSON and Prometheus text."""

from __future__ import annotations

import html.parser

from prometheus_client.parser import text_string_to_metric_families

from gpumem_otel.line_profiling.accounts import BASE_COLUMNS, FunctionLines, LineRow, LineUse
from gpumem_otel.line_profiling.render import (
    NOTHING,
    lines_html,
    lines_json,
    lines_metrics,
    lines_text,
)


def use(after, net=0, peak=0, size=0, shown=True):
    columns = dict.fromkeys(BASE_COLUMNS, 0)
    columns["active_bytes.all.peak"] = peak
    columns["reserved_bytes.all.peak"] = 2 << 20
    return LineUse(after, after, net, peak, peak - after, size, size // 512, columns, shown)


def outer(*rows, name="outer", source=("def outer():", "    a = 1", "    # no code", "    b = 2")):
    return FunctionLines(name, "job", "/src/job.py", 7, 2, rows, source)


ROWS = (
    LineRow(7, 2, {}),
    LineRow(8, 2, {0: use(1024, 1024, 2048, 4096)}),
    LineRow(10, 2, {0: use(512, -512, 1024)}),
)


def test_one_table_per_function_with_every_line_of_its_source():
    assert lines_text([outer(*ROWS)]) == (
        "## job.outer (job.py:7), 2 calls\n\n"
        "gpu  hits    after       net     peak  peak rise  allocated  allocs  active peak"
        "  reserved peak  line  code\n"
        "  0     2      0 B       0 B      0 B        0 B        0 B       0          0 B"
        "            0 B     7  def outer():\n"
        "  0     2  1.0 KiB  +1.0 KiB  2.0 KiB   +1.0 KiB    4.0 KiB       8      2.0 KiB"
        "        2.0 MiB     8      a = 1\n"
        "                                                                                "
        "                    9      # no code\n"
        "  0     2    512 B    -512 B  1.0 KiB     +512 B        0 B       0      1.0 KiB"
        "        2.0 MiB    10      b = 2\n"
    )


def test_columns_of_torch_in_place_of_the_usual_ones():
    text = lines_text([outer(*ROWS)], ["active_bytes.all.peak", "allocation.all.allocated"])
    header = text.splitlines()[2].split()
    assert header == [
        "gpu", "hits", "active_bytes.all.peak", "allocation.all.allocated", "line", "code",
    ]  # fmt: skip
    assert text.splitlines()[4].split()[:5] == ["0", "2", "2.0", "KiB", "0"]


def test_devices_that_are_not_to_be_shown_are_left_out_of_the_text_alone():
    row = LineRow(8, 1, {0: use(512, shown=False), 1: use(2048)})
    text = lines_text([outer(row)])
    assert "2.0 KiB" in text
    assert "512 B" not in text
    assert "512 B" in lines_text([outer(row)], device=0)
    assert set(lines_json([outer(row)])["functions"][0]["lines"][0]["devices"]) == {"0", "1"}


def test_two_devices_of_a_line_are_two_rows_with_the_code_in_the_first():
    row = LineRow(8, 1, {0: use(512), 1: use(2048)})
    lines = [
        line for line in lines_text([outer(row)]).splitlines() if "KiB" in line or "512" in line
    ]
    assert [line.split()[0] for line in lines] == ["0", "1"]
    assert [line.endswith("a = 1") for line in lines] == [True, False]


def test_the_text_states_that_nothing_ran_or_used_a_gpu():
    assert lines_text([outer()]) == NOTHING
    assert "no GPU memory was used" in lines_text([outer(LineRow(7, 1, {}))])


def test_a_line_without_source_still_has_its_number():
    text = lines_text([outer(LineRow(8, 1, {0: use(512)}), source=())])
    assert text.splitlines()[-1].split()[-1] == "8"


class _Balanced(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_html_is_balanced_and_code_in_it_stays_text():
    page = lines_html([outer(LineRow(8, 1, {0: use(512)}), source=("def f():", "<script>\x1b[2J"))])
    parser = _Balanced()
    parser.feed(page)
    assert parser.open == []
    assert "<script" not in page
    assert "<script>\\u001b[2J" in parser.text


def test_prometheus_reads_the_metrics_back():
    odd = FunctionLines(
        'a"b\\c', "m", "C:\\x\\f.py", 1, 1, (LineRow(2, 3, {0: use(512, 512, 1024, 512)}),)
    )
    families = {f.name: f for f in text_string_to_metric_families(lines_metrics([odd], rank=4))}
    labels = {"rank": "4", "device": "0", "function": 'm.a"b\\c', "file": "f.py", "line": "2"}
    assert {name: f.samples[0].value for name, f in families.items()} == {
        "gpumem_line_hits": 3,
        "gpumem_line_after_bytes": 512,
        "gpumem_line_peak_bytes": 1024,
        "gpumem_line_net_bytes": 512,
        "gpumem_line_allocation_bytes": 512,
        "gpumem_line_allocations": 1,
        "gpumem_line_rows_left_out": 0,
    }
    assert all(
        f.samples[0].labels == labels
        for n, f in families.items()
        if n != "gpumem_line_rows_left_out"
    )


def test_series_are_bounded_and_never_the_same_twice():
    many = [outer(LineRow(n, 1, {0: use(n, 0, n, n * 512)}), name=f"f{n}") for n in range(20)]
    again = [outer(LineRow(19, 1, {0: use(1, 0, 1, 512)}), name="f19")]
    families = {
        f.name: f
        for f in text_string_to_metric_families(lines_metrics(many + again, 0, max_rows=5))
    }
    hits = families["gpumem_line_hits"].samples
    assert sorted(s.labels["function"] for s in hits) == [f"job.f{n}" for n in range(15, 20)]
    assert {s.value for s in hits if s.labels["function"] == "job.f19"} == {2}
    assert families["gpumem_line_rows_left_out"].samples[0].value == 15
