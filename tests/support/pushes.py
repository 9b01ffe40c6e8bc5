"""Hand-made pprofs and raw requests, to ask a server what it makes of them."""

from __future__ import annotations

import gzip
import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass

from support.pprof_proto import Profile

PUSH = "/push.v1.PusherService/Push"
INUSE = (("inuse_space", "bytes"), ("inuse_objects", "count"))
STACKS = ((("leaf", "mid", "root"), (100, 1), {}), (("leaf2", "root"), (50, 2), {}))


def pprof(types=INUSE, samples=STACKS, *, period_type=("space", "bytes"), time_ns=None) -> bytes:
    """A pprof of (stack leaf first, values, {label: text or number}) samples."""
    made = Profile(time_nanos=time.time_ns() if time_ns is None else time_ns, period=1)
    strings = {"": 0}
    functions: dict[str, int] = {}

    def text(value: str) -> int:
        return strings.setdefault(value, len(strings))

    for name, unit in types:
        made.sample_type.add(type=text(name), unit=text(unit))
    if period_type:
        made.period_type.type, made.period_type.unit = map(text, period_type)
    for stack, values, labels in samples:
        sample = made.sample.add(value=values)
        for name in stack:
            number = functions.setdefault(name, len(functions) + 1)
            sample.location_id.append(number)
        for key, value in labels.items():
            label = sample.label.add(key=text(key))
            if isinstance(value, str):
                label.str = text(value)
            else:
                label.num = value
    for name, number in functions.items():
        made.location.add(id=number).line.add(function_id=number, line=7)
        made.function.add(id=number, name=text(name), filename=text("/job/train.py"))
    made.string_table.extend(strings)
    return made.SerializeToString(deterministic=True)


def field(number: int, data: bytes) -> bytes:
    size, length = len(data), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((number << 3 | 2, *length, size)) + data


def request(*series) -> bytes:
    """PushRequest of (labels, profiles) pairs."""
    return b"".join(
        field(
            1,
            b"".join(field(1, field(1, k.encode()) + field(2, v.encode())) for k, v in labels)
            + b"".join(field(2, field(1, profile)) for profile in profiles),
        )
        for labels, profiles in series
    )


@dataclass
class Reply:
    status: int
    body: bytes
    encoding: str

    @property
    def code(self) -> str:
        return json.loads(self.body)["code"] if self.body and self.status != 200 else ""


def post(
    url: str,
    body: bytes,
    content_type: str = "application/proto",
    *,
    zipped: bool = True,
    path: str = PUSH,
    headers: dict[str, str] | None = None,
) -> Reply:
    sent = {"Content-Type": content_type, **(headers or {})}
    if zipped:
        body, sent["Content-Encoding"] = gzip.compress(body), "gzip"
    asked = urllib.request.Request(url + path, body, sent)
    try:
        with urllib.request.urlopen(asked, timeout=30) as reply:
            answer = Reply(reply.status, reply.read(), reply.headers.get("Content-Encoding", ""))
    except urllib.error.HTTPError as error:
        with error:
            answer = Reply(error.code, error.read(), error.headers.get("Content-Encoding", ""))
    return answer


def unique(name: str) -> str:
    """A service name that no earlier run on the same server used."""
    return f"{name}-{os.getpid()}-{time.time_ns()}"
