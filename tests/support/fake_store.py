"""What a Pyroscope 2.x stores of a push, and what its queries find."""

from __future__ import annotations

import base64
import binascii
import math
import re
import threading
import time
import uuid
from dataclasses import dataclass

from support.fake_pprof import DamagedError, RefusedError, check_labels, invalid, message, parse

MAX_NODES = 8192


@dataclass
class Row:
    """One profile of one type of one series."""

    labels: dict[str, str]
    profile_type: str
    time_ns: int
    profile_id: str
    stacks: list[tuple[tuple[str, ...], int]]

    @property
    def total(self) -> int:
        return sum(value for _, value in self.stacks)


class Store:
    """Everything pushed so far.

    Attributes:
        rate_bytes_per_second, burst_bytes: the server's default limits per tenant.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.comments: list[list[str]] = []
        self.rate_bytes_per_second = 4 << 20
        self.burst_bytes = 2 << 20
        self._tokens = float(self.burst_bytes)
        self._filled = time.monotonic()
        self._lock = threading.Lock()

    # pushes --------------------------------------------------------------------------------------

    def push_proto(self, body: bytes) -> None:
        try:
            series = []
            for item in message(body).get(1, []):
                fields = message(item)
                pairs = [message(label) for label in fields.get(1, [])]
                series.append((
                    [tuple(p.get(n, [b""])[-1].decode() for n in (1, 2)) for p in pairs],
                    [message(sample).get(1, [b""])[-1] for sample in fields.get(2, [])],
                ))  # fmt: skip
        except (DamagedError, UnicodeDecodeError, AttributeError, TypeError):
            raise invalid("unmarshal message: proto: cannot parse invalid wire-format") from None
        self._push(series)

    def push_json(self, body: object) -> None:
        try:
            series = [
                (
                    [(label["name"], label["value"]) for label in item["labels"]],
                    [base64.b64decode(sample["rawProfile"]) for sample in item["samples"]],
                )
                for item in body["series"]
            ]
        except (KeyError, TypeError, binascii.Error):
            raise invalid("unmarshal message: proto: syntax error") from None
        self._push(series)

    def _push(self, series) -> None:
        """The good ones are stored, whatever comes of the others; then the first error."""
        errors = [self._try(pairs, raw) for pairs, raws in series for raw in raws or [b""]]
        for error in filter(None, errors):
            raise error

    def _try(self, pairs: list[tuple[str, str]], raw: bytes) -> RefusedError | None:
        try:
            self._store(pairs, raw)
        except RefusedError as refused:
            return refused
        return None

    def _store(self, pairs: list[tuple[str, str]], raw: bytes) -> None:
        labels = check_labels(pairs)
        parsed = parse(raw)
        with self._lock:
            self._take(parsed.size + sum(len(k) + len(v) for k, v in pairs))
            profile_id = str(uuid.uuid4())
            rows = []
            for part in parsed.parts:
                own = check_labels(list({**part.labels, **labels}.items()))
                for index, (name, unit) in enumerate(parsed.sample_types):
                    merged: dict[tuple[str, ...], int] = {}
                    for stack, values in part.samples:
                        merged[stack] = merged.get(stack, 0) + values[index]
                    kind = ":".join((own["__name__"], name, unit, *parsed.period_type))
                    stacks = [(stack, value) for stack, value in merged.items() if value]
                    rows.append(Row(own, kind, parsed.time_ns, profile_id, stacks))
            self.rows += rows
            self.comments.append(parsed.comments)

    def _take(self, size: int) -> None:
        now = time.monotonic()
        self._tokens += (now - self._filled) * self.rate_bytes_per_second
        self._tokens = min(self._tokens, self.burst_bytes)
        self._filled = now
        if size > self._tokens:
            raise RefusedError(
                429, "resource_exhausted",
                f"push rate limit ({self.rate_bytes_per_second} B/s) exceeded, adding {size} B",
            )  # fmt: skip
        self._tokens -= size

    # queries -------------------------------------------------------------------------------------

    def find(self, selector: str, start: object, end: object, profile_type: str = "") -> list[Row]:
        """Rows of a range in milliseconds, both ends included."""
        if start is None or end is None or int(start) <= 0 or int(end) < int(start):
            raise invalid("missing time range in the query")
        matches = matcher(selector)
        low, high = int(start) * 10**6, int(end) * 10**6 + 999_999
        with self._lock:
            rows = list(self.rows)
        return [
            row
            for row in rows
            if low <= row.time_ns <= high
            and profile_type in ("", row.profile_type)
            and matches({**row.labels, "__profile_type__": row.profile_type})
        ]

    def merged(self, query: dict) -> list[tuple[tuple[str, ...], int]]:
        """Stacks of all profiles in the range, summed."""
        kind = query.get("profileTypeID", "")
        if len(kind.split(":")) not in (5, 6):
            raise invalid(f"profile-type {kind!r} must be of the form name:type:unit:period:unit")
        if "labelSelector" not in query:
            raise invalid("label selector is required")
        wanted = set(query.get("profileIdSelector") or ())
        sums: dict[tuple[str, ...], int] = {}
        for row in self.find(query["labelSelector"], query.get("start"), query.get("end"), kind):
            if wanted and row.profile_id not in wanted:
                continue
            for stack, value in row.stacks:
                sums[stack] = sums.get(stack, 0) + value
        return sorted(sums.items())

    def series(self, query: dict) -> list[dict]:
        """SelectSeries: values per bucket `(t - step, t]`, always summed."""
        step_ms = round(float(query.get("step", 0)) * 1000)
        if step_ms < 1:
            raise invalid("step must be at least 1 ms")
        rows = self.find(
            query["labelSelector"], query.get("start"), query.get("end"), query["profileTypeID"]
        )
        start = int(query["start"])
        groups: dict[tuple, dict[int, list[Row]]] = {}
        for row in rows:
            key = tuple((name, row.labels.get(name, "")) for name in query.get("groupBy") or ())
            at = start + math.ceil((row.time_ns / 10**6 - start) / step_ms) * step_ms
            groups.setdefault(key, {}).setdefault(at, []).append(row)
        individual = query.get("exemplarType") == "EXEMPLAR_TYPE_INDIVIDUAL"
        return [
            {
                "labels": [{"name": name, "value": value} for name, value in key],
                "points": [
                    {
                        "timestamp": str(at),
                        "value": sum(row.total for row in bucket),
                        "exemplars": [
                            {
                                "timestamp": str(row.time_ns // 10**6),
                                "profileId": row.profile_id,
                                "value": str(row.total),
                            }
                            for row in bucket
                            if individual
                        ],
                    }
                    for at, bucket in sorted(points.items())
                ],
            }
            for key, points in sorted(groups.items())
        ]

    def label_sets(self, query: dict, utf8_names: bool) -> list[dict[str, str]]:
        """Series: distinct label sets, names that need quoting hidden unless asked for."""
        found = {}
        for selector in query.get("matchers") or ["{}"]:
            for row in self.find(selector, query.get("start"), query.get("end")):
                labels = {**row.labels, "__profile_type__": row.profile_type}
                if not utf8_names:
                    labels = {k: v for k, v in labels.items() if re.fullmatch(r"\w+", k)}
                if query.get("labelNames"):
                    labels = {k: v for k, v in labels.items() if k in query["labelNames"]}
                found[tuple(sorted(labels.items()))] = labels
        return [found[key] for key in sorted(found)]

    def types(self) -> list[str]:
        with self._lock:
            return sorted({row.profile_type for row in self.rows})


def matcher(selector: str):
    """A label selector as a predicate: `{a="x","b.c"!="y",d=~"re",e!~"re"}`."""
    text = selector.strip()
    if not (text.startswith("{") and text.endswith("}")):
        raise invalid(f"parse error in selector {selector!r}")
    pattern = re.compile(r'\s*(?:"([^"]+)"|([\w:]+))\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"\s*(,|$)')
    tests = []
    text, at = text[1:-1].strip(), 0
    while at < len(text):
        found = pattern.match(text, at)
        if not found:
            raise invalid(f"parse error in selector {selector!r}")
        value = re.sub(r"\\(.)", r"\1", found[4])
        tests.append((found[1] or found[2], found[3], value))
        at = found.end()

    def matches(labels: dict[str, str]) -> bool:
        for name, operator, value in tests:
            have = labels.get(name, "")
            same = bool(re.fullmatch(value, have)) if "~" in operator else have == value
            if same == operator.startswith("!"):
                return False
        return True

    return matches


def flamegraph(stacks: list[tuple[tuple[str, ...], int]], max_nodes: int = 0) -> dict:
    """Levels of (offset to the previous bar, total, self, name), root first."""
    total, own, children = 0, 1, 2
    root: list = [0, 0, {}]
    for stack, value in stacks:
        node = root
        node[total] += value
        for name in stack:
            node = node[children].setdefault(name, [0, 0, {}])
            node[total] += value
        node[own] += value
    every = []
    pending = [root]
    while pending:
        node = pending.pop()
        every.append(node[total])
        pending += node[children].values()
    limit = max_nodes or MAX_NODES
    least = sorted(every, reverse=True)[limit - 1] if len(every) > limit else 0
    names: dict[str, int] = {}
    levels, max_self = [], 0
    level = [("total", root, 0)]
    while level:
        values, after, end = [], [], 0
        for name, node, start in level:
            index = names.setdefault(name, len(names))
            values += [start - end, node[total], node[own], index]
            end = start + node[total]
            max_self = max(max_self, node[own])
            at, other = start, [0, 0, {}]
            for child, below in sorted(node[children].items()):
                if below[total] < least:
                    other[total] += below[total]
                    other[own] += below[total]
                    continue
                after.append((child, below, at))
                at += below[total]
            if other[total]:
                after.append(("other", other, at))
        levels.append(values)
        level = after
    return {"names": list(names), "levels": levels, "total": root[total], "maxSelf": max_self}
