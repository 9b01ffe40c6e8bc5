"""Every exception that gpumem_otel raises on purpose.

Explicit calls by the user raise these; background work never raises: it counts, logs once and goes
on. A message is one line: the thing, the reason, the way out.

    GpumemError
    +-- ConfigError            a keyword argument or option that cannot be used
    +-- SnapshotError          a snapshot or recording file that cannot be read
    +-- NoHistoryError         a readable file without the events or data asked for
    +-- CaptureError           the allocator could not be read, or recording not switched
        +-- BusyError          the allocator is in use at this moment
    +-- EncodeError            a profile that does not fit the wire format
    +-- PushError              a server refused a profile, or did not answer
    +-- ServeError             the listener could not be set up
    +-- SpoolError             the spool could not be written or read
    +-- MissingPackageError    an optional package that is not installed; an ImportError too
    +-- PageError              the page is not in this installation
    +-- YieldRefusedError      a yield or restore that changed nothing
    +-- YieldFailedError       a yield or restore that ended in an unexpected state
"""

from __future__ import annotations


class GpumemError(Exception):
    """Base of all errors of this package."""


class ConfigError(GpumemError):
    """A setting or argument that cannot be used."""


class SnapshotError(GpumemError):
    """A file that is not a readable snapshot.

    Attributes:
        source: name of the file or stream, as the user gave it.
        reason: what is wrong with it, one clause.
    """

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"{source}: {reason}")
        self.source = source
        self.reason = reason


class NoHistoryError(GpumemError):
    """A readable file that does not hold the data asked for, such as events."""


class CaptureError(GpumemError):
    """The allocator could not be read, or recording could not be switched."""


class BusyError(CaptureError):
    """The allocator is in use at this moment, by the job or another reader; try again later.

    Attributes:
        retry_after_seconds: when it may be free; None if unknown.
    """

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class EncodeError(GpumemError):
    """A profile that does not fit the wire format."""


class PushError(GpumemError):
    """A profile that did not arrive.

    Attributes:
        status: HTTP status; None without an answer.
        reason: short slug, the value of the `reason` attribute of the drop counter.
        retryable: whether sending the same bytes again may help and cannot store them twice.
        retry_after_seconds: the delay that the server asked for; None if it did not.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        status: int | None = None,
        retryable: bool = False,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retryable = retryable
        self.retry_after_seconds = retry_after_seconds


class ServeError(GpumemError):
    """The listener could not be set up."""


class SpoolError(GpumemError):
    """The spool of profiles on this machine could not be written or read."""


class PageError(GpumemError):
    """The page was not built into this installation."""


class MissingPackageError(GpumemError, ImportError):
    """The call needs a package that is not installed."""


class YieldRefusedError(GpumemError):
    """A yield or restore that was not begun, or was undone completely: nothing has changed."""


class YieldFailedError(GpumemError):
    """A yield or restore that ended in an unexpected state, which the message names."""
