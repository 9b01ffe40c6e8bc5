"""Files that settings name: tokens, certificates, keys. A job never waits for one.

To open a FIFO waits until somebody writes to it, and OpenSSL asks the terminal for the pass phrase
of a key. Who would wait is the job, in `install()`, or a thread of ours for the rest of its life.
So what is opened is looked at, and OpenSSL gets the descriptor's name: nothing that takes the
file's place meanwhile is opened. Commands of a person may wait: `read_once`.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import stat
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from gpumem_otel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpumem_otel.errors import GpumemError

# A folder of files that only this user may see, also where it lies in /tmp.
#
# Others can write beside it, and may have put something in its place: what was really opened is
# looked at, and must be ours, no symlink, and writable by nobody else.


@contextlib.contextmanager
def opened(
    folder: str,
    what: str,
    error: type[GpumemError],
    *,
    make: bool = False,
    root_sees_all: bool = False,
) -> Iterator[int]:
    """A descriptor of the folder.

    Args:
        folder: its path.
        what: what it is, for messages: "run directory".
        error: raised where it is not safe to use.
        make: create it and the folders above it, for this user alone, where they are not there.
        root_sees_all: root may open that of another user; what stands in it is theirs.

    Raises:
        OSError: it can not be opened.
    """
    if make:
        _make(Path(folder))
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if not os.path.islink(folder):  # noqa: PTH114  the open below holds against a race
        descriptor = os.open(folder, flags)
    else:
        raise error(f"{what} {folder} is a symlink: give its target")
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() and not (root_sees_all and os.geteuid() == 0):
            raise error(f"{what} {folder} belongs to another user: give your own")
        if stat.S_IMODE(status.st_mode) & 0o022:
            raise error(f"{what} {folder} is writable by others: chmod 700 it")
        yield descriptor
    finally:
        os.close(descriptor)


def _make(folder: Path) -> None:
    """Each folder for this user alone: `mkdir(parents=True)` leaves those above to the umask."""
    for one in (*reversed(folder.parents), folder):
        if not one.exists():
            with contextlib.suppress(FileExistsError):
                one.mkdir(mode=0o700)


def write_whole(folder: int, name: str, data: bytes) -> None:
    """Write a file for this user alone, whole or not at all; one of that name is replaced.

    Args:
        folder: descriptor of the folder.
        name: of the file.
        data: what it holds.

    Raises:
        OSError: it can not be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    temporary = f".{name}"
    try:
        with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(data)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


MOST_TOKEN_BYTES: Final = 16 * 1024
"""Of a file that holds one token."""

_MOST_BYTES: Final = 4 << 20
"""Of certificates; those of all authorities of a system are a quarter of a MiB."""

_IN_MEMORY: Final = "/dev/shm"  # noqa: S108 - what lies there has no name

_BEGIN: Final = b"-----BEGIN "
_CERTIFICATE: Final = b"CERTIFICATE-----"
_KEY: Final = b"PRIVATE KEY-----"
"""How the lines end that begin a part of a PEM file, RFC 7468 and those before it."""

_REASONS: Final = {
    None: "damaged",
    "KEY_VALUES_MISMATCH": "the key is another certificate's",
    "NO_CERTIFICATE_ASSIGNED": "the key is another certificate's",
}
"""By OpenSSL's names, x509err.h and sslerr.h; that of a broken PEM file does not come through."""


def stamp(path: str) -> tuple[int, ...]:
    """Differs once a file does; () of none."""
    try:
        status = os.stat(path)  # noqa: PTH116 - as it was given
    except (OSError, ValueError):
        return ()
    return status.st_mtime_ns, status.st_ino, status.st_size


def contents(path: str, most_bytes: int) -> bytes:
    """What a file holds.

    Args:
        path: of the file.
        most_bytes: more is refused.

    Raises:
        ConfigError: it can not be read, is too large, or no regular file.
    """
    with _open(path) as file:
        try:
            data = file.read(most_bytes + 1)
        except OSError as error:
            raise ConfigError(f"{path}: {_reason(error)}") from error
    if len(data) > most_bytes:
        raise ConfigError(f"{path}: is larger than {most_bytes} bytes")
    return data


def client_context(ca_file: str) -> ssl.SSLContext:
    """Of a client, as Python makes it.

    Args:
        ca_file: PEM, whom it trusts; "" for those that the system does.

    Raises:
        ConfigError: the file can not be used.
    """
    if not ca_file:
        return ssl.create_default_context()
    with _open(ca_file) as file:
        try:
            return ssl.create_default_context(cafile=_name_of(file.fileno()))
        except (OSError, ValueError) as error:
            raise _no_authorities(error, ca_file, file) from error


def load_authorities(context: ssl.SSLContext, ca_file: str) -> None:
    """Have a context trust whom the certificates of a PEM file have signed.

    Raises:
        ConfigError: it can not.
    """
    with _open(ca_file) as file:
        try:
            context.load_verify_locations(_name_of(file.fileno()))
        except (OSError, ValueError) as error:
            raise _no_authorities(error, ca_file, file) from error


def load_certificate(
    context: ssl.SSLContext,
    cert_file: str,
    key_file: str,
    *,
    key_setting: str,
) -> None:
    """Have a context show this certificate.

    Args:
        context: of a server or a client.
        cert_file: PEM, the certificate and those between it and the root.
        key_file: PEM, its key without a pass phrase; "" where it is in `cert_file`.
        key_setting: what names the key's file, for messages.

    Raises:
        ConfigError: it can not.
    """
    with ExitStack() as opened:
        cert = opened.enter_context(_open(cert_file))
        key = opened.enter_context(_open(key_file)) if key_file else cert
        try:
            context.load_cert_chain(
                _name_of(cert.fileno()), _name_of(key.fileno()), password=_no_prompt
            )
        except (OSError, ValueError) as error:
            lacks = _lacks(cert, _CERTIFICATE)
            if lacks:
                raise ConfigError(f"{cert_file}: {lacks}") from error
            lacks = _lacks(key, _KEY)
            if lacks:
                way = "" if key_file else f": {key_setting} names the file that has it"
                raise ConfigError(f"{key_file or cert_file}: {lacks}{way}") from error
            files = " and ".join(filter(None, (cert_file, key_file)))
            raise ConfigError(f"{files}: {_reason(error)}") from error


def read_once(path: str, kept: ExitStack) -> str:
    """A name under which the functions here can read what is in a pipe, as often as they like.

    For commands of a person, as with `<(...)` of a shell: waits for the pipe's end.

    Args:
        path: of a file, a pipe or a device.
        kept: whose end is the end of what is kept.

    Returns:
        Of a regular file, and of what can not be opened, the path; else that of a copy, which lies
        in memory and has no name anywhere else.

    Raises:
        ConfigError: there is too much.
    """
    try:
        if not path or stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 - as it was given
            return path
        with Path(path).open("rb") as pipe:
            data = pipe.read(_MOST_BYTES + 1)
    except (OSError, ValueError):  # said by who reads it
        return path
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{path}: is larger than {_MOST_BYTES} bytes")
    folder = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
    copy = kept.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115 - it is kept
    copy.write(data)
    copy.flush()
    return _name_of(copy.fileno())


def _open(path: str) -> BinaryIO:
    """A regular file; nothing else is opened.

    Raises:
        ConfigError: it can not be opened, or is no regular file.
    """
    try:
        looked_at = os.open(path, os.O_PATH | os.O_CLOEXEC)  # opens nothing yet, open(2)
        try:
            mode = os.fstat(looked_at).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{path}: is no regular file")
            return Path(_name_of(looked_at)).open("rb")
        finally:
            os.close(looked_at)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {_reason(error)}") from error


def _name_of(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _no_authorities(error: OSError | ValueError, path: str, file: BinaryIO) -> ConfigError:
    return ConfigError(f"{path}: {_lacks(file, _CERTIFICATE) or _reason(error)}")


def _lacks(file: BinaryIO, part: bytes) -> str:
    """What of a PEM file is not in it, "" where all is."""
    file.seek(0)
    text = file.read(_MOST_BYTES)
    if _BEGIN not in text:
        return "is no PEM file"
    name = "certificate" if part == _CERTIFICATE else "private key"
    return "" if part in text else f"there is no {name} in it"


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        name = error.reason or None
        return _REASONS.get(name) or f"not usable ({str(name).replace('_', ' ').lower()})"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _no_prompt() -> str:
    raise ValueError("the key is encrypted: give one without a pass phrase")
