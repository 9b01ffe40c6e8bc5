"""The TLS context of the listener, checked when it is built rather than at the first client."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from gpumem_otel.config import ControlConfig
from gpumem_otel.errors import ConfigError, ServeError
from gpumem_otel.settingfiles import load_authorities, load_certificate

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
        load_certificate(
            context, config.tls_cert_file, config.tls_key_file, key_setting=f"{of}tls_key_file"
        )
    except ConfigError as exc:
        raise ServeError(f"TLS certificate and key: {exc}") from exc
    if config.tls_client_ca_file:
        try:
            load_authorities(context, config.tls_client_ca_file)
        except ConfigError as exc:
            raise ServeError(f"TLS client CA {exc}") from exc
        context.verify_mode = ssl.CERT_REQUIRED
    return context
