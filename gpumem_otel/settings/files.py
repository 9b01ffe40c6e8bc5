"""Reads files that settings name (tokens, certificates, keys), and private folders.

A job never waits for such a file. Opening a FIFO blocks until a process writes to it, and OpenSSL
asks the terminal for the pass phrase of a key: the job would wait in `install()`, or a thread of
ours for the rest of its life. So only regular files are opened, and OpenSSL gets the name of the
descriptor that was checked, so that no other file can take its place meanwhile. Commands that a
person runs may wait: `read_once`.
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

# Private folders, also in /tmp. Another user may have put something in the place of one: the opened
# descriptor is checked. It must be ours, no symlink, and not writable by others.


@contextlib.contextmanager
def opened(
    folder: str,
    what: str,
    error: type[GpumemError],
    *,
    make: bool = False,
    root_sees_all: bool = False,
) -> Iterator[int]:
    """Open a folder that only this user can write to; gives its descriptor.

    Args:
        folder: its path.
        what: its name in messages: "run directory".
        error: raised if it is not safe to use.
        make: create it and the missing folders above it, for this user alone.
        root_sees_all: root may open the folder of another user.

    Raises:
        OSError: it cannot be opened.
    """
    if make:
        _make(Path(folder))
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if not os.path.islink(folder):  # noqa: PTH114 - O_NOFOLLOW below refuses one that appears meanwhile
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
    """Make each folder for this user alone; `mkdir(parents=True)` applies the umask to parents."""
    for part in (*reversed(folder.parents), folder):
        if not part.exists():
            with contextlib.suppress(FileExistsError):
                part.mkdir(mode=0o700)


def write_whole(folder: int, name: str, data: bytes) -> None:
    """Write a file for this user alone, completely or not at all; replaces one of that name.

    Args:
        folder: descriptor of the folder.
        name: of the file.
        data: its contents.

    Raises:
        OSError: it cannot be written.
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
"""The largest file with one token."""

_MOST_BYTES: Final = 4 << 20
"""The largest file of certificates; all authorities of a system take a quarter of a MiB."""

_IN_MEMORY: Final = "/dev/shm"  # noqa: S108 - files there have no name

_BEGIN: Final = b"-----BEGIN "
_CERTIFICATE: Final = b"CERTIFICATE-----"
_KEY: Final = b"PRIVATE KEY-----"
"""Ends of the lines that begin a part of a PEM file: RFC 7468 and older forms."""

_REASONS: Final = {
    None: "damaged",
    "KEY_VALUES_MISMATCH": "the key is another certificate's",
    "NO_CERTIFICATE_ASSIGNED": "the key is another certificate's",
}
"""By OpenSSL's names (x509err.h, sslerr.h); Python gives none for a broken PEM file."""


def stamp(path: str) -> tuple[int, ...]:
    """A value that changes when the file does; () if there is no file."""
    try:
        status = os.stat(path)  # noqa: PTH116 - as it was given
    except (OSError, ValueError):
        return ()
    return status.st_mtime_ns, status.st_ino, status.st_size


def contents(path: str, most_bytes: int) -> bytes:
    """Read a file.

    Args:
        path: of the file.
        most_bytes: more is refused.

    Raises:
        ConfigError: it cannot be read, is too large, or is not a regular file.
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
    """A TLS context for a client.

    Args:
        ca_file: PEM, the authorities to trust; "" for those of the system.

    Raises:
        ConfigError: the file cannot be used.
    """
    if not ca_file:
        return ssl.create_default_context()
    with _authorities(ca_file) as name:
        return ssl.create_default_context(cafile=name)


def load_authorities(context: ssl.SSLContext, ca_file: str) -> None:
    """Make a context trust the authorities of a PEM file.

    Raises:
        ConfigError: the file cannot be used.
    """
    with _authorities(ca_file) as name:
        context.load_verify_locations(name)


def load_certificate(
    context: ssl.SSLContext,
    cert_file: str,
    key_file: str,
    *,
    key_setting: str,
) -> None:
    """Make a context present this certificate.

    Args:
        context: of a server or a client.
        cert_file: PEM, the certificate and its intermediates.
        key_file: PEM, its key without a pass phrase; "" where it is in `cert_file`.
        key_setting: the setting that names the key's file, for messages.

    Raises:
        ConfigError: a file cannot be used.
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
    """A path from which the contents of a pipe can be read several times.

    For commands that a person runs, as with `<(...)` of a shell: waits for the end of the pipe.

    Args:
        path: of a file, a pipe or a device.
        kept: the copy is deleted when this closes.

    Returns:
        The path itself for a regular file and for one that cannot be opened; else the path of a
        copy in memory, which has no other name.

    Raises:
        ConfigError: it is too large.
    """
    try:
        if not path or stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 - as it was given
            return path
        with Path(path).open("rb") as pipe:
            data = pipe.read(_MOST_BYTES + 1)
    except (OSError, ValueError):  # reported when it is read
        return path
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{path}: is larger than {_MOST_BYTES} bytes")
    folder = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
    copy = kept.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115 - closed by `kept`
    copy.write(data)
    copy.flush()
    return _name_of(copy.fileno())


def _open(path: str) -> BinaryIO:
    """Open a regular file, and nothing else.

    Raises:
        ConfigError: it cannot be opened, or is not a regular file.
    """
    try:
        checked = os.open(path, os.O_PATH | os.O_CLOEXEC)  # does not open the file itself, open(2)
        try:
            mode = os.fstat(checked).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{path}: is no regular file")
            return Path(_name_of(checked)).open("rb")
        finally:
            os.close(checked)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {_reason(error)}") from error


def _name_of(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


@contextlib.contextmanager
def _authorities(ca_file: str) -> Iterator[str]:
    """A name for OpenSSL; its errors become ConfigError."""
    with _open(ca_file) as file:
        try:
            yield _name_of(file.fileno())
        except (OSError, ValueError) as error:
            reason = _lacks(file, _CERTIFICATE) or _reason(error)
            raise ConfigError(f"{ca_file}: {reason}") from error


def _lacks(file: BinaryIO, part: bytes) -> str:
    """The part that a PEM file lacks, as a clause; "" if it has it."""
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
