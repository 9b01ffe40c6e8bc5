"""`name=value,name=value`: how OpenTelemetry's variables hold resource attributes and headers."""

from __future__ import annotations

from urllib.parse import unquote

__all__ = ["parse_pairs"]


def parse_pairs(text: str, *, strict: bool = False) -> dict[str, str]:
    """Pairs of a comma separated list, both sides percent-decoded; of a repeated name the last.

    https://opentelemetry.io/docs/specs/otel/resource/sdk/#specifying-resource-information-via-an-environment-variable

    Args:
        text: the list; empty parts of it are nothing.
        strict: refuse a part that is no pair, instead of leaving it out.

    Raises:
        ValueError: such a part, in strict mode; its text is not repeated, it may be a secret.
    """
    pairs: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if equals and name.strip():
            pairs[unquote(name.strip())] = unquote(value.strip())
        elif strict and part.strip():
            raise ValueError("a part is not name=value")
    return pairs
