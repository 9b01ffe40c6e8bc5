"""Files that settings name: tokens, certificates, keys. To read one never waits for anybody.

To open a FIFO waits until somebody writes to it, and OpenSSL asks the terminal for the pass phrase
of a key. Who would wait is the job, in `install()`, or a thread of ours for the rest of its life.
"""

from __future__ import annotations

import os
import ssl
import stat
from typing import Final, NoReturn

from gpumem_otel.errors import ConfigError

__all__ = [
    "client_context",
    "contents",
    "load_authorities",
    "load_certificate",
    "require_regular",
]

_NO_REGULAR_FILE: Final = "is no regular file"

_REASONS: Final = {
    None: "is no PEM file, or not a whole one",
    "KEY_VALUES_MISMATCH": "the key is another certificate's",
    "NO_CERTIFICATE_OR_CRL_FOUND": "there is no certificate in it",
}
"""By OpenSSL's names, x509err.h; that of a broken PEM file does not come through."""


def require_regular(*paths: str) -> None:
    """Whether these can be opened without waiting; "" stands for none.

    Raises:
        ConfigError: one is not there, or no regular file.
    """
    for path in filter(None, paths):
        try:
            mode = os.stat(path).st_mode  # noqa: PTH116 - as it was given
        except (OSError, ValueError) as error:
            raise _unusable(error, path) from error
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path}: {_NO_REGULAR_FILE}")


def contents(path: str, most_bytes: int) -> bytes:
    """What a regular file holds, at most so many bytes.

    Raises:
        ConfigError: it can not be read, or is no regular file.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            return file.read(most_bytes)
    except (OSError, ValueError) as error:
        raise _unusable(error, path) from error


def _open_at_once(path: str, flags: int) -> int:
    """An opener for `open`.

    Raises:
        ConfigError: it is no regular file.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise ConfigError(f"{path}: {_NO_REGULAR_FILE}")


def client_context(ca_file: str) -> ssl.SSLContext:
    """Of a client, as Python makes it.

    Args:
        ca_file: PEM, whom it trusts; "" for those that the system does.

    Raises:
        ConfigError: the file can not be used.
    """
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ValueError) as error:
        raise _unusable(error, ca_file) from error


def load_certificate(context: ssl.SSLContext, cert_file: str, key_file: str) -> None:
    """Have a context show this certificate.

    Args:
        context: of a server or a client.
        cert_file: PEM, the certificate and those between it and the root.
        key_file: PEM, its key without a pass phrase; "" where it is in `cert_file`.

    Raises:
        ConfigError: it can not.
    """
    try:
        context.load_cert_chain(cert_file, key_file or None, password=_no_prompt)
    except (OSError, ValueError) as error:
        raise _unusable(error, cert_file, key_file) from error


def load_authorities(context: ssl.SSLContext, ca_file: str) -> None:
    """Have a context trust whom the certificates of a PEM file have signed.

    Raises:
        ConfigError: it can not.
    """
    try:
        context.load_verify_locations(ca_file)
    except (OSError, ValueError) as error:
        raise _unusable(error, ca_file) from error


def _unusable(error: OSError | ValueError, *paths: str) -> ConfigError:
    if isinstance(error, ssl.SSLError):
        name = error.reason or None
        reason = _REASONS.get(name) or f"not usable ({str(name).replace('_', ' ').lower()})"
    else:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return ConfigError(f"{' and '.join(filter(None, paths))}: {reason}")


def _no_prompt() -> NoReturn:
    raise ValueError("the key is encrypted: give one without a pass phrase")
