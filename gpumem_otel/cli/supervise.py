"""`gpumem-otel run --supervise`: the job as a child, and its last /metrics for a while after it.

When a process dies right after an out-of-memory, no scrape has its last counts. The job writes its
metrics to a folder of ours when an allocation fails and when it ends; after its end the same
address serves them for two scrape intervals.

Everything else is as without it: signals are passed on, those of a terminal reach the job directly,
and this process ends as the job did, by the same exit code or signal.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from gpumem_otel.cli import launch
from gpumem_otel.cli.output import warn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gpumem_otel.oom.handover import FinalMetrics
    from gpumem_otel.serve.listener import Listener
    from gpumem_otel.settings.config import Config

LINGER_SECONDS = 30.0
"""Two scrapes of Prometheus at 15 s."""

HANDOVER_VARIABLE = "GPUMEM_OTEL_HANDOVER_DIR"

_SI_KERNEL = 0x80
"""si_code of a signal that a terminal sends to all its foreground processes, sigaction(2)."""

_PASSED_ON = frozenset(
    number
    for number in signal.Signals
    if number
    not in {
        signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS,
        signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGSYS,
        signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGPIPE, signal.SIGXFSZ,
        signal.SIGWINCH,
    }
)  # fmt: skip
_ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})


def supervise(
    program: str,
    job: Sequence[str],
    environ: Mapping[str, str],
    config: Config,
    linger_seconds: float,
) -> int:
    """Run the job and serve what it leaves; returns its exit code, or dies of its signal.

    Args:
        program: path of the job's program.
        job: its arguments, the name first.
        environ: of the job.
        config: what the job will make of it.
        linger_seconds: how long its last /metrics are served.
    """
    folder = tempfile.mkdtemp(prefix="gpumem-otel-")
    try:
        with _signals_waited_for() as outside:
            ours = {**environ, HANDOVER_VARIABLE: folder}
            status = _run(program, job, ours, outside)
            code = os.waitstatus_to_exitcode(status)
            _linger(folder, config, linger_seconds, failed=code != 0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _end_like_job(code)


@contextmanager
def _signals_waited_for() -> Iterator[set[int]]:
    """Block signals until they are taken by sigwaitinfo(2); yields the mask from before."""
    waited_for = {*_PASSED_ON, signal.SIGCHLD}
    outside = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    try:
        yield {int(number) for number in outside}
    finally:
        # a signal from after the job's end was for the job: it must not change how this one ends
        while signal.sigtimedwait(waited_for, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, outside)


def _run(program: str, job: Sequence[str], environ: Mapping[str, str], mask: set[int]) -> int:
    """Run the job to its end; its status by wait(2)."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        child = os.posix_spawn(
            program, list(job), environ, setsigmask=mask, setsigdef=launch.PYTHON_IGNORES
        )
    except OSError as error:
        raise launch.not_started(job[0], error) from error
    while (status := _reaped(child)) is None:
        info = signal.sigwaitinfo({*_PASSED_ON, signal.SIGCHLD})
        if info.si_signo != signal.SIGCHLD and info.si_code != _SI_KERNEL:
            with suppress(ProcessLookupError):
                os.kill(child, info.si_signo)
    return status


def _reaped(child: int) -> int | None:
    """Reap ended processes (as process 1 of a container, orphans too); the child's status."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == 0:
            return None
        if pid == child:
            return status


def _linger(folder: str, config: Config, seconds: float, *, failed: bool) -> None:
    """Serve what the job left, where no scrape may have its last counts."""
    from gpumem_otel.errors import GpumemError
    from gpumem_otel.oom import handover

    try:
        left = [final for final in handover.left_in(folder) if failed or final.ooms]
    except GpumemError as error:
        warn(str(error))
        return
    listeners = [item for final in left if (item := _listener(final, config)) is not None]
    if not listeners:
        return
    for listener in listeners:
        listener.start()
    try:
        _wait(seconds)
    finally:
        for listener in listeners:
            listener.stop()


def _wait(seconds: float) -> None:
    """Wait so long, or until a signal asks for the end."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        info = signal.sigtimedwait({*_PASSED_ON, signal.SIGCHLD}, left)
        if info is not None and info.si_signo in _ENDING:
            return


def _listener(final: FinalMetrics, config: Config) -> Listener | None:
    """Serves in place of a process; None where it would be less protected than the process was."""
    from gpumem_otel.errors import CaptureError, GpumemError
    from gpumem_otel.oom import handover
    from gpumem_otel.serve.dependencies import AppDeps, Health
    from gpumem_otel.serve.listener import Listener

    def profile(*_: object) -> bytes:
        raise CaptureError("read: the process has ended; only its last /metrics are left")

    serve = replace(config.serve, host=final.host, port=final.port)
    scheme = "https" if serve.tls_cert_file else "http"
    if scheme != final.scheme or handover.is_guarded(serve) != final.guarded:
        warn(
            f"port {final.port}: the job's certificate or token is not known here, so its last "
            "/metrics are not served; give it by a variable"
        )
        return None
    deps = AppDeps(
        metrics=lambda _accept: (final.content_type, final.body.encode()),
        profile=profile,
        health=lambda: Health(ok=False, reasons=("the process has ended",)),
        service_name=config.service_name,
    )
    try:
        return Listener(deps, serve)
    except GpumemError as error:
        warn(f"port {final.port}: {error}")
        return None


def _end_like_job(code: int) -> int:
    """The exit code of the job; where a signal ended it, that ends this process too."""
    if code >= 0:
        return code
    number = -code
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with suppress(OSError, ValueError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return 128 + number
