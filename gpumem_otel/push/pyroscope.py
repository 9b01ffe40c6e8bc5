"""The Pyroscope request: makes it from a profile and its labels, sends it, reads the answer.

The request is Connect's `push.v1.PusherService/Push` (grafana/pyroscope, api/push/v1/push.proto),
since `/ingest` renames the profile type. One profile per request: of a batch some are stored
although the answer is an error. What the server refuses was measured with Pyroscope 2.2.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from gpumem_otel._version import __version__
from gpumem_otel.errors import ConfigError, PushError
from gpumem_otel.profiles import protobuf_wire
from gpumem_otel.profiles.pprof import gzip_bytes
from gpumem_otel.settings.files import MOST_TOKEN_BYTES, contents

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.base.profile import Identity, ProfileKind
    from gpumem_otel.push.transport import Answer, Transport
    from gpumem_otel.settings.config import PyroscopeConfig

PROFILE_NAME = "gpu_memory"
"""`__name__` of our series: `memory` would merge with host heap profiles of the same service, and
older servers read that name as running totals."""

OOM_PROFILE_NAME = "gpu_memory_oom"
"""`__name__` of what was alive when an allocation failed, each with its own `oom_id`: added to
the live profiles of the same minute it would count twice."""

PUSH_PATH = "/push.v1.PusherService/Push"

MAX_LABELS = 30
"""validation.max-label-names-per-series, `__name__` and `__delta__` included."""
MAX_NAME_BYTES = 1024
"""validation.max-length-label-name."""
MAX_VALUE_BYTES = 2048
"""validation.max-length-label-value."""

MAX_MESSAGE_CHARS = 200
MIN_SECRET_CHARS = 4
MAX_RETRY_AFTER_SECONDS = 3600.0

_RETRYABLE = {429: "rate_limited", 502: "unavailable", 503: "unavailable", 504: "unavailable"}
_FINAL = {
    401: "unauthorized",
    403: "unauthorized",
    404: "not_found",
    407: "proxy",
    413: "too_large",
    # The server answers it to unusable input, and Alloy to every 400: a retry does not help.
    500: "server_error",
}


def push_request(profile: bytes, labels: Sequence[tuple[str, str]]) -> bytes:
    """The message PushRequest with one series of one profile.

    Args:
        profile: one pprof, gzipped or not.
        labels: of the series; names must be unique.
    """
    pairs = (
        protobuf_wire.bytes_field(
            1, protobuf_wire.text_field(1, name) + protobuf_wire.text_field(2, value)
        )
        for name, value in labels
    )
    sample = protobuf_wire.bytes_field(2, protobuf_wire.bytes_field(1, profile))
    return protobuf_wire.bytes_field(1, b"".join((*pairs, sample)))


def series_labels(
    identity: Identity,
    *,
    device: int,
    name: str = PROFILE_NAME,
    extra: Sequence[tuple[str, str]] = (),
) -> tuple[tuple[str, str], ...]:
    """Labels of the series that a profile of one device goes to.

    Args:
        identity: of this process; its tags come last and never replace a label of ours.
        device: index of the device in this process.
        name: `__name__`.
        extra: labels between ours and the tags.

    Returns:
        Pairs without empty values or repeated names, at most 30, as the server takes them:
        names in `[a-zA-Z_][a-zA-Z0-9_]*`, values of at most 2048 bytes.
    """
    labels = {
        "__name__": name,
        # For servers with v1 storage: the values are no running totals.
        "__delta__": "false",
        "service_name": _value(identity.service_name),
        "namespace": _value(identity.namespace),
        "run_id": _value(identity.run_id),
        "rank": str(identity.rank),
        "device": str(device),
    }
    labels = {key: value for key, value in labels.items() if value}
    for key, raw in (*extra, *identity.tags):
        label, value = _name(key), _value(raw)
        if label and value and label not in labels and len(labels) < MAX_LABELS:
            labels[label] = value
    return tuple(labels.items())


def _name(text: str) -> str:
    """The text as a label name: other characters become `_`, and leading `__` is reserved."""
    name = re.sub(r"[^a-zA-Z0-9_]", "_", text.strip())[:MAX_NAME_BYTES]
    if name.startswith("__"):
        name = name.lstrip("_")
    return f"_{name}"[:MAX_NAME_BYTES] if name[:1].isdigit() else name


def _value(text: str) -> str:
    return protobuf_wire.utf8(text)[:MAX_VALUE_BYTES].decode("utf-8", "ignore")


class PyroscopeSink:
    """A `ProfileSink` that pushes to Pyroscope, or to an Alloy in front of it.

    Args:
        transport: sends the requests.
        config: URL (a path before the service's own is kept), credentials, tenant, extra headers.
        identity: asked at each push, since the rank may be known late.
        counters: counts the bytes that were sent.
    """

    def __init__(
        self,
        transport: Transport,
        config: PyroscopeConfig,
        identity: Callable[[], Identity],
        counters: Counters | None = None,
    ) -> None:
        self._transport = transport
        self._config = config
        self._identity = identity
        self._counters = counters
        self._url = _push_url(config.url)

    def push(self, profile: bytes, kind: ProfileKind, device: int, deadline_seconds: float) -> None:
        """Send one uncompressed pprof; returns once it is stored (0.5 s on a 2.x server).

        Raises:
            PushError: it was not stored, or may not have been.
        """
        del kind  # the sample types name it
        self.send(profile, series_labels(self._identity(), device=device), deadline_seconds)

    def send(
        self, profile: bytes, labels: Sequence[tuple[str, str]], deadline_seconds: float
    ) -> None:
        """Send one pprof as a series with exactly these labels.

        Raises:
            PushError: it was not stored, or may not have been.
        """
        body = gzip_bytes(push_request(profile, labels))
        headers, secrets = self._headers()
        error = refusal(self._transport.post(self._url, body, headers, deadline_seconds), secrets)
        if error is not None:
            raise error
        if self._counters is not None:
            self._counters.add("exporter_pushed_bytes", len(body))

    def _headers(self) -> tuple[dict[str, str], list[str]]:
        """The headers of a push, and the secrets in them that no message may show."""
        config = self._config
        headers = {
            "User-Agent": f"gpumem-otel/{__version__}",
            "Content-Type": "application/proto",
            "Content-Encoding": "gzip",
            "Connect-Protocol-Version": "1",
            "Accept-Encoding": "identity",
        }
        secrets = []
        if config.tenant_id:
            headers["X-Scope-OrgID"] = config.tenant_id
        token, password = bearer_token(config), config.basic_auth_password.reveal()
        if token:
            headers["Authorization"] = f"Bearer {token}"
            secrets.append(token)
        elif config.basic_auth_user or password:
            basic = f"{config.basic_auth_user}:{password}"
            encoded = base64.b64encode(basic.encode()).decode("ascii")
            headers["Authorization"] = f"Basic {encoded}"
            secrets += [encoded, password]
        own = {name.lower(): name for name in headers}
        for name, value in config.headers:
            headers.pop(own.get(name.lower(), ""), None)
            headers[name] = value.reveal()
            secrets.append(value.reveal())
        # A shorter one would remove half of any text.
        return headers, [secret for secret in secrets if len(secret) >= MIN_SECRET_CHARS]


def bearer_token(config: PyroscopeConfig) -> str:
    """The token as it is now, "" where there is none.

    Raises:
        PushError: its file cannot be read.
    """
    if not config.bearer_token_file:
        return config.bearer_token.reveal()
    try:
        return contents(config.bearer_token_file, MOST_TOKEN_BYTES).decode().strip()
    except ConfigError as error:
        raise PushError(f"token file {error}", reason="config") from None
    except UnicodeDecodeError:
        raise PushError(
            f"token file {config.bearer_token_file}: is not UTF-8",
            reason="config",
        ) from None


def refusal(answer: Answer, secrets: Sequence[str] = ()) -> PushError | None:
    """The error that an answer means, None where the profile is stored.

    Args:
        answer: of the server, or of a proxy before it.
        secrets: removed from the message, in case the server repeats one.
    """
    status = answer.status
    if 200 <= status < 300:  # noqa: PLR2004
        if answer.headers.get("content-type", "").startswith("text/html"):
            return PushError(
                f"{status}, but a web page: the URL is not one of a Pyroscope server",
                reason="not_found",
                status=status,
            )
        return None
    if 300 <= status < 400:  # noqa: PLR2004
        target = urlsplit(answer.headers.get("location", "")).hostname or "elsewhere"
        return PushError(
            f"{status}: redirected to {target}; set the URL to that server",
            reason="redirect",
            status=status,
        )
    final = "rejected" if status < 500 else "server_error"  # noqa: PLR2004
    return PushError(
        _redacted(f"{status} {_message(answer)}", secrets).strip()[:MAX_MESSAGE_CHARS],
        reason=_RETRYABLE.get(status) or _FINAL.get(status, final),
        status=status,
        retryable=status in _RETRYABLE,
        retry_after_seconds=_retry_after(answer) if status in _RETRYABLE else None,
    )


def _message(answer: Answer) -> str:
    """The server's message on one line: Connect's JSON, else the text."""
    body = answer.body
    if answer.headers.get("content-encoding", "") == "gzip":
        try:
            # Bounded, against a gzip bomb. 31: with a gzip header.
            body = zlib.decompressobj(31).decompress(body, 64 * 1024)
        except zlib.error:
            return "(damaged answer)"
    text = body.decode("utf-8", "replace")
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        text = f"{parsed.get('code', '')}: {parsed.get('message', '')}"
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _retry_after(answer: Answer) -> float | None:
    """Seconds the server asks us to wait; a date is compared with the server's own clock."""
    text = answer.headers.get("retry-after", "").strip()
    try:
        if text.isascii() and text.isdigit():
            seconds = float(text)
        else:
            until = parsedate_to_datetime(text)
            seconds = (
                until - parsedate_to_datetime(answer.headers.get("date", ""))
            ).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_SECONDS)


def _push_url(url: str) -> str:
    """Where to post to, under a server's URL as the settings hold it."""
    parts = urlsplit(url.strip())
    path = parts.path.rstrip("/")
    if not path.endswith(PUSH_PATH):
        path += PUSH_PATH
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def _redacted(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "***")
    return text
