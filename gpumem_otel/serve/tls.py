"""The TLS context of the listener, checked when it is built rather than at the first client."""

from __future__ import annotations

import os
import ssl
from typing import TYPE_CHECKING, NoReturn

from gpumem_otel.config import ControlConfig
from gpumem_otel.errors import ServeError

if TYPE_CHECKING:
    from gpumem_otel.config import ServeConfig

__all__ = ["server_context"]


def server_context(config: ServeConfig | ControlConfig) -> ssl.SSLContext | None:
    """The context that the config asks for, None for plain HTTP.

    TLS 1.2 and newer. With a client CA every client must show a certificate of it.

    Raises:
        ServeError: a file is missing, unreadable, or does not fit the others.
    """
    of = "control_" if isinstance(config, ControlConfig) else ""
    if not config.tls_cert_file:
        for name in ("tls_key_file", "tls_client_ca_file"):
            if getattr(config, name):
                raise ServeError(
                    f"{of}{name} is set without {of}tls_cert_file: set both or neither"
                )
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(
            config.tls_cert_file, config.tls_key_file or None, password=_no_prompt
        )
    except (OSError, ValueError) as exc:
        files = " and ".join(filter(None, (config.tls_cert_file, config.tls_key_file)))
        key = "" if config.tls_key_file else f"; {of}tls_key_file names the key, if it is not in it"
        raise ServeError(f"TLS certificate and key, {files}: {_reason(exc)}{key}") from exc
    if config.tls_client_ca_file:
        try:
            context.load_verify_locations(config.tls_client_ca_file)
        except (OSError, ValueError) as exc:
            raise ServeError(f"TLS client CA {config.tls_client_ca_file}: {_reason(exc)}") from exc
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_prompt() -> NoReturn:
    # Without this OpenSSL asks the job's terminal for the pass phrase, and waits.
    raise ValueError("the key is encrypted: give one without a pass phrase")


def _reason(exc: OSError | ValueError) -> str:
    if isinstance(exc, ssl.SSLError):
        reason = (exc.reason or "no PEM file").replace("_", " ").lower()
        return f"not usable ({reason})"
    if isinstance(exc, OSError) and exc.errno is not None:
        return os.strerror(exc.errno)
    return str(exc)
