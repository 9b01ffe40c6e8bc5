"""Every exception that gpumem_otel raises on purpose.

Explicit calls by the user raise these; work in the background never does: it counts, logs once
and goes on. Messages are one line: the thing, the reason, the way out.

    GpumemError
    +-- ConfigError            a keyword argument or option that can not be used
    +-- SnapshotError          a snapshot or recording file that can not be read
    +-- NoHistoryError         a file that was read, and does not hold what was asked of it
    +-- CaptureError           the allocator could not be read, or recording not switched
        +-- BusyError          what is needed for it is in use just now
    +-- EncodeError            a profile that does not fit the wire format
    +-- PushError              a server refused a profile, or did not answer
    +-- ServeError             the listener could not be set up
    +-- SpoolError             profiles could not be kept, or those that were kept not be read
    +-- MissingPackageError    an optional package that is not installed; an ImportError too
    +-- PageError              the page is not in this installation
    +-- YieldRefusedError      a yield or restore that was not begun, or undone whole
    +-- YieldFailedError       a yield or restore that ended in another state than it should
"""

from __future__ import annotations


class GpumemError(Exception):
    """Base of all errors of this package."""


class ConfigError(GpumemError):
    """A setting that can not be used."""


class SnapshotError(GpumemError):
    """A file that is no readable snapshot.

    Attributes:
        source: name of the file or stream, as the user gave it.
        reason: what is wrong with it, one clause.
    """

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"{source}: {reason}")
        self.source = source
        self.reason = reason


class NoHistoryError(GpumemError):
    """A file that was read, and does not hold what was asked of it, such as events."""


class CaptureError(GpumemError):
    """The allocator could not be read, or recording could not be switched."""


class BusyError(CaptureError):
    """What is needed for it is in use just now, by the job or another reader: it waits.

    Attributes:
        retry_after_seconds: when it may be free, where that is known.
    """

    def __init__(self, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class EncodeError(GpumemError):
    """A profile that can not be written in the wire format."""


class PushError(GpumemError):
    """A profile that did not arrive.

    Attributes:
        status: HTTP status, or None where no answer came.
        reason: short slug, the value of the `reason` attribute of the drop counter.
        retryable: whether sending the same bytes again may help and can not store them twice.
        retry_after_seconds: what the server asked for, if it did.
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
    """Profiles could not be kept on this machine, or those that were kept not be read."""


class PageError(GpumemError):
    """The page was not built into this installation."""


class MissingPackageError(GpumemError, ImportError):
    """What was asked for needs a package that is not installed."""


class YieldRefusedError(GpumemError):
    """A yield or restore that was not begun, or was undone whole: the state is what it was."""


class YieldFailedError(GpumemError):
    """A yield or restore that ended in another state than it should; the message says which."""
