"""What a Pyroscope 2.x answers, case by case.

The fake must answer as a real server of default settings did. `PYROSCOPE_URL` runs the same cases
against a real one, so that both are tested.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import time

import pytest
from support.fake_pyroscope import FakePyroscope
from support.pushes import INUSE, STACKS, post, pprof, request, unique
from support.pyroscope_query import INUSE_SPACE, SNAPSHOTS, ask, total

OK, BAD, BROKEN, LIMITED = (
    (200, ""),
    (400, "invalid_argument"),
    (500, "unknown"),
    (429, "resource_exhausted"),
)


class Server:
    """One service on the tested server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.service = unique("case")

    def labels(self, **more: str) -> list[tuple[str, str]]:
        return [("__name__", "gpu_memory"), ("service_name", self.service), *more.items()]

    def push(self, *profiles: bytes, labels=None, **more) -> tuple[int, str]:
        series = (self.labels() if labels is None else labels, profiles)
        reply = post(self.url, request(series), **more)
        return reply.status, reply.code

    def total(self, profile_type: str = INUSE_SPACE, selector: str = "") -> int:
        return total(self.url, self.service, profile_type, selector)

    def label_names(self, accept: str = "application/json") -> list[str]:
        now = int(time.time() * 1000)
        body = {
            "start": now - 3_600_000,
            "end": now + 60_000,
            "matchers": [f'{{service_name="{self.service}"}}'],
            "labelNames": [],
        }
        path = "/querier.v1.QuerierService/Series"
        reply = post(
            self.url, json.dumps(body).encode(), "application/json", zipped=False, path=path,
            headers={"Accept": accept},
        )  # fmt: skip
        sets = json.loads(reply.body)["labelsSet"]
        names = {label["name"] for each in sets for label in each["labels"]}
        return sorted(name for name in names if not name.startswith("__"))


@pytest.fixture(scope="module")
def address():
    url = os.environ.get("PYROSCOPE_URL")
    if url:
        yield url.rstrip("/")
        return
    with FakePyroscope() as fake:
        fake.store.rate_bytes_per_second *= 1000  # these cases come faster than over a network
        yield fake.url


@pytest.fixture
def server(address):
    return Server(address)


ONE = pprof()


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("inside", [lambda data: data, gzip.compress])
def test_every_wrapping_of_a_profile_is_taken(server, zipped, inside):
    assert server.push(inside(ONE), zipped=zipped) == OK
    assert server.total() == 150
    assert server.total("gpu_memory:inuse_objects:count:space:bytes") == 3


def test_json_is_taken(server):
    series = {
        "labels": [{"name": name, "value": value} for name, value in server.labels()],
        "samples": [{"rawProfile": base64.b64encode(ONE).decode()}],
    }
    body = json.dumps({"series": [series]}).encode()
    assert post(server.url, body, "application/json").status == 200
    assert server.total() == 150


@pytest.mark.parametrize("accept", [{}, {"Accept-Encoding": "identity"}])
def test_a_gzip_request_gets_a_gzip_answer(server, accept):
    body = request((server.labels(), [ONE]))
    assert post(server.url, body, headers=accept).encoding == "gzip"
    assert post(server.url, body, zipped=False, headers=accept).encoding == ""


def test_a_profile_needs_a_name(server):
    assert server.push(ONE, labels=[("service_name", server.service)]) == BAD


def test_a_service_may_be_nameless(server):
    labels = [("__name__", "gpu_memory"), ("run", server.service)]
    assert server.push(ONE, labels=labels) == OK
    server.service = "unknown_service"
    run = labels[1][1]
    assert server.total(selector=f',run="{run}"') == 150


def test_delta_is_accepted_and_not_shown(server):
    assert server.push(ONE, labels=server.labels(__delta__="false")) == OK
    assert server.label_names() == ["service_name"]


def test_pushes_are_summed_and_snapshots_counts_them(server):
    types = (*INUSE, ("snapshots", "count"))
    samples = [(("leaf", "root"), (100, 1, 1), {}), (("leaf2", "root"), (50, 2, 0), {})]
    for _ in range(3):
        assert server.push(pprof(types, samples)) == OK
    assert server.total() == 450
    assert server.total(SNAPSHOTS) == 3


def test_equal_profiles_of_one_moment_are_not_merged(server):
    for _ in range(3):
        assert server.push(ONE) == OK
    assert server.total() == 450


def test_string_sample_labels_split_the_series(server):
    samples = [
        (("leaf",), (100, 1), {"tensor_class": "parameter"}),
        (("leaf",), (70, 1), {"tensor_class": "gradient"}),
        (("leaf",), (7, 1), {"bytes": 512}),
        (("leaf",), (3, 1), {"trace_id": "0a"}),
    ]
    assert server.push(pprof(INUSE, samples)) == OK
    assert server.total() == 180
    assert server.total(selector=',tensor_class="gradient"') == 70
    assert server.total(selector=',tensor_class=~"g.*|p.*"') == 170
    assert server.total(selector=',tensor_class!="gradient"') == 110
    assert server.label_names() == ["service_name", "tensor_class"]


def test_an_equal_series_label_wins(server):
    samples = [(("leaf",), (100, 1), {"tensor_class": "parameter"})]
    assert server.push(pprof(INUSE, samples), labels=server.labels(tensor_class="all")) == OK
    assert server.total(selector=',tensor_class="all"') == 100


@pytest.mark.parametrize(
    ("samples", "found"),
    [
        ([(("x",), (-5, 1), {}), (("y",), (9, 1), {})], 9),
        ([(("x",), (0, 0), {})], 0),
        ([], 0),
    ],
)
def test_samples_that_are_dropped(server, samples, found):
    assert server.push(pprof(INUSE, samples)) == OK
    assert server.total() == found


def test_without_a_period_type(server):
    assert server.push(pprof(period_type=None)) == OK
    assert server.total("gpu_memory:inuse_space:bytes::") == 150
    dropped = [(("x",), (-5, 1), {}), (("y",), (9, 1), {})]
    assert server.push(pprof(INUSE, dropped, period_type=None)) == BROKEN


@pytest.mark.parametrize(
    ("seconds", "answer"), [(-7200, BAD), (900, BAD), (-3540, OK), (0, OK), (None, OK)]
)
def test_the_window_of_time(server, seconds, answer):
    at = 0 if seconds is None else time.time_ns() + seconds * 10**9
    assert server.push(pprof(time_ns=at)) == answer
    assert server.total() == (150 if answer == OK else 0)


def test_names_of_sample_types(server):
    dash, colon = (pprof([(name, "bytes")], [(("x",), (1,), {})]) for name in ("a-b", "a:b"))
    assert server.push(dash) == BAD
    assert server.push(colon) == OK  # and can then not be queried


def test_names_that_need_quotes(server):
    assert server.push(ONE, labels=server.labels(**{"service.instance.id": "x"})) == OK
    assert server.label_names() == ["service_name"]
    utf8 = "*/*;allow-utf8-labelnames=true"
    assert server.label_names(utf8) == ["service.instance.id", "service_name"]
    assert server.total(selector=',"service.instance.id"="x"') == 150


@pytest.mark.parametrize(
    ("more", "answer"),
    [
        ([("v", "")], OK),
        ([("", "v")], BAD),
        ([("a", "1"), ("a", "2")], BAD),
        ([(f"l{i}", "v") for i in range(28)], OK),
        ([(f"l{i}", "v") for i in range(29)], BAD),
        ([("v", "x" * 2048)], OK),
        ([("v", "x" * 2049)], BAD),
    ],
)
def test_labels(server, more, answer):
    assert server.push(ONE, labels=[*server.labels(), *more]) == answer


def test_text_must_be_utf8(server):
    assert server.push(ONE.replace(b"leaf2", b"lea\xff2")) == BAD


def test_deep_stacks_lose_their_leaves(server):
    assert server.push(pprof(INUSE, [(tuple(f"f{i}" for i in range(1200)), (5, 1), {})])) == OK
    now = int(time.time() * 1000)
    graph = ask(
        server.url, "SelectMergeStacktraces", profileTypeID=INUSE_SPACE, maxNodes=100_000,
        labelSelector=f'{{service_name="{server.service}"}}', start=now - 60_000, end=now + 60_000,
    )["flamegraph"]  # fmt: skip
    assert set(graph["names"]) == {"total", *(f"f{i}" for i in range(200, 1200))}
    assert graph["names"][:2] == ["total", "f1199"]


@pytest.mark.parametrize(("count", "answer"), [(16_000, OK), (16_001, BAD)])
def test_number_of_samples(server, count, answer):
    samples = [((f"f{i}",), (1,), {}) for i in range(count)]
    assert server.push(pprof(INUSE[:1], samples)) == answer


def sized(megabytes: float, count: int = 4000) -> bytes:
    pad = "x" * (int(megabytes * 1e6) // count - 60)
    return pprof(INUSE[:1], [((f"f{i:06}{pad}",), (1,), {}) for i in range(count)])


@pytest.mark.parametrize(
    ("megabytes", "answer"), [(1.5, OK), (1.9, OK), (3.0, LIMITED), (4.6, BAD)]
)
def test_size_of_a_profile(server, megabytes, answer):
    """Above the limiter's burst every answer is to try again later."""
    profile = sized(megabytes)
    if os.environ.get("PYROSCOPE_URL"):
        time.sleep(1.5)  # the limiter of a real server fills up again
    assert server.push(profile) == answer
    if answer == LIMITED:
        assert server.push(profile) == answer


@pytest.mark.parametrize("profile", [b"garbage", b"", b"\x1f\x8bgarbage"])
def test_no_profile_at_all(server, profile):
    assert server.push(profile) == BROKEN


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"\xff\xff\xff", "application/proto", 400),
        (b"{", "application/json", 400),
        (b"x", "text/plain", 415),
    ],
)
def test_no_request_at_all(server, body, content_type, status):
    assert post(server.url, body, content_type, zipped=False).status == status


def test_the_good_part_of_a_bad_request_is_stored(server):
    """Why there is one profile a request."""
    nameless = ([("service_name", "x")], [ONE])
    reply = post(server.url, request((server.labels(), [ONE]), nameless))
    assert (reply.status, reply.code) == BAD
    assert server.total() == 150
    reply = post(server.url, request((server.labels(), [ONE, b"garbage"])))
    assert (reply.status, reply.code) == BROKEN
    assert server.total() == 300


@pytest.fixture(scope="module")
def five(address):
    """100, 200 ... 500 bytes, 15 s apart; (server, first moment in seconds)."""
    server = Server(address)
    first = int(time.time()) // 60 * 60 - 300
    for i in range(5):
        made = pprof(INUSE, [(("leaf",), (100 * (i + 1), 1), {})], time_ns=(first + 15 * i) * 10**9)
        assert server.push(made) == OK
    return server, first


def points(server: Server, first: int, step: float, **more) -> list[tuple[int, float]]:
    series = ask(
        server.url, "SelectSeries", profileTypeID=INUSE_SPACE, step=step,
        labelSelector=f'{{service_name="{server.service}"}}',
        start=(first - 60) * 1000, end=(first + 200) * 1000, **more,
    )["series"]  # fmt: skip
    return [(int(p["timestamp"]) // 1000 - first, p["value"]) for p in series[0]["points"]]


def test_series_are_sums_over_steps(five):
    assert points(*five, 15.0) == [(0, 100), (15, 200), (30, 300), (45, 400), (60, 500)]
    assert points(*five, 60.0) == [(0, 100), (60, 1400)]
    average = "TIME_SERIES_AGGREGATION_TYPE_AVERAGE"
    assert points(*five, 60.0, aggregation=average) == [(0, 100), (60, 1400)]


def merged(server: Server, first: int, start: int, end: int, **more) -> int:
    answer = ask(
        server.url, "SelectMergeStacktraces", profileTypeID=INUSE_SPACE,
        labelSelector=f'{{service_name="{server.service}"}}',
        start=(first + start) * 1000, end=(first + end) * 1000, **more,
    )  # fmt: skip
    return int(answer.get("flamegraph", {}).get("total") or 0)


def test_flame_graphs_are_sums_over_the_range(five):
    assert merged(*five, -60, 200) == 1500
    assert merged(*five, 14, 16) == 200


def test_one_profile_by_its_id(five):
    server, first = five
    series = ask(
        server.url, "SelectSeries", profileTypeID=INUSE_SPACE, step=15.0,
        labelSelector=f'{{service_name="{server.service}"}}',
        start=(first - 60) * 1000, end=(first + 200) * 1000,
        exemplarType="EXEMPLAR_TYPE_INDIVIDUAL",
    )["series"]  # fmt: skip
    chosen = series[0]["points"][2]["exemplars"][0]["profileId"]
    assert merged(server, first, -60, 200, profileIdSelector=[chosen]) == 300


@pytest.mark.parametrize("delta", [{}, {"__delta__": "false"}])
@pytest.mark.parametrize("name", ["memory", "gpu_memory"])
def test_allocations_are_taken_as_deltas(server, name, delta):
    for value in (100, 150, 160):
        labels = [("__name__", name), ("service_name", server.service), *delta.items()]
        made = pprof([("alloc_space", "bytes")], [(("leaf",), (value,), {})])
        assert server.push(made, labels=labels) == OK
    assert server.total(f"{name}:alloc_space:bytes:space:bytes") == 410


def test_what_there_is(server):
    now = int(time.time() * 1000)
    span = {"start": now - 60_000, "end": now + 60_000}
    assert server.push(pprof(), labels=server.labels(rank="3")) == OK
    kinds = ask(server.url, "ProfileTypes", **span)["profileTypes"]
    assert INUSE_SPACE in {kind["ID"] for kind in kinds}
    own = [f'{{service_name="{server.service}"}}']
    assert ask(server.url, "LabelValues", name="rank", matchers=own, **span)["names"] == ["3"]
    assert "rank" in ask(server.url, "LabelNames", matchers=own, **span)["names"]


def test_diff(server):
    assert server.push(pprof()) == OK
    now = int(time.time() * 1000)
    side = {
        "profileTypeID": INUSE_SPACE,
        "labelSelector": f'{{service_name="{server.service}"}}',
        "start": now - 60_000,
        "end": now + 60_000,
    }
    found = ask(server.url, "Diff", left=side, right={**side, "start": now + 50_000})["flamegraph"]
    assert (int(found["leftTicks"]), int(found.get("rightTicks", 0))) == (150, 0)


@pytest.mark.parametrize(
    "query",
    [
        {"labelSelector": "{}", "start": -60_000, "end": 60_000, "profileTypeID": "no:type"},
        {"labelSelector": "{}", "profileTypeID": INUSE_SPACE},
    ],
)
def test_queries_that_are_refused(server, query):
    path = "/querier.v1.QuerierService/SelectMergeStacktraces"
    now = int(time.time() * 1000)
    query = {key: value + now if isinstance(value, int) else value for key, value in query.items()}
    body = json.dumps(query).encode()
    reply = post(server.url, body, "application/json", zipped=False, path=path)
    assert reply.status == 400


def test_strictness_of_the_fake():
    """What our encoder must never do, even where a real server accepts it."""
    assert STACKS[0][1] == (100, 1)
    with FakePyroscope() as fake:
        server = Server(fake.url)
        lonely = pprof([("a", "b")], [(("x",), (1, 2), {})])
        assert server.push(lonely) == BAD
        assert server.push(pprof([], [])) == BAD
        unknown = ONE.replace(
            b"\x22\x08\x08\x01\x22\x04\x08\x01", b"\x22\x08\x08\x01\x22\x04\x08\x63"
        )
        assert unknown != ONE
        assert server.push(unknown) == BAD
