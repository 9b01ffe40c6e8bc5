"""The parent's client of the helper process: starts it, sends commands, receives answers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.yielding.driver.driver_api import DRIVER, NVML

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeAlias

    _Answers: TypeAlias = "queue.SimpleQueue[dict[str, Any] | None]"

_MODULE: Final = "gpumem_otel.yielding.driver.helper"
_TAIL: Final = 400
_END_SECONDS: Final = 2.0


class HelperError(Exception):
    """The helper could not be started, has died, or does not answer.

    Attributes:
        silent: it lives, but a call of the driver does not return.
    """

    def __init__(self, message: str, *, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperSettings:
    """How helpers are started.

    Attributes:
        driver: name of the module with the driver's functions.
        nvml: name of the NVML module.
        environ: their environment.
        python: the interpreter.
        start_seconds: in which a helper must load the driver.
        first_pause_seconds: see `CheckpointHelper`, as for the next.
    """

    driver: str = DRIVER
    nvml: str = NVML
    environ: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    python: str = sys.executable
    start_seconds: float = 30.0
    first_pause_seconds: float = 0.25
    longest_pause_seconds: float = 10.0


class HelperClient:
    """One helper process, from start to end.

    It starts without the site module, in its own session and in the root folder, with our
    `sys.path`: no hook of the environment runs in it, Ctrl-C in the terminal does not reach it, and
    it keeps no folder of the job open.

    Args:
        on_event: called on the client's thread with each message that answers no request.
        on_gone: called there with the last error once the helper has ended.

    Raises:
        HelperError: it did not start; it has ended.
    """

    def __init__(
        self,
        settings: HelperSettings,
        *,
        on_event: Callable[[HelperClient, dict[str, Any]], object],
        on_gone: Callable[[HelperClient, str], object],
    ) -> None:
        self._on_event = on_event
        self._on_gone = on_gone
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[_Answers, Callable[[dict[str, Any]], object] | None]] = {}
        self._ready: _Answers = queue.SimpleQueue()
        self._gone = False
        self._end_reason = ""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = self._spawn(settings)
        self.pid = self._process.pid
        self._thread = threading.Thread(target=self._listen, name="gpumem-otel-helper", daemon=True)
        self._thread.start()
        message = self._get(self._ready, settings.start_seconds)
        if message is None or message["event"] != "ready":
            silent = message is None and self.alive
            self.kill()
            why = self._why_silent() if message is None else str(message["error"])
            raise HelperError(why, silent=silent)

    def _spawn(self, settings: HelperSettings) -> subprocess.Popen[bytes]:
        argument = json.dumps(
            {
                "pid": os.getpid(),
                "driver": settings.driver,
                "nvml": settings.nvml,
                "first_pause_seconds": settings.first_pause_seconds,
                "longest_pause_seconds": settings.longest_pause_seconds,
            }
        )
        path = os.pathsep.join(dict.fromkeys(os.path.abspath(entry) for entry in sys.path))  # noqa: PTH100 - strings as they are
        try:
            return subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [settings.python, "-S", "-m", _MODULE, argument],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                cwd="/",
                env={**settings.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise HelperError(f"its helper process could not be started: {error}") from error

    @property
    def alive(self) -> bool:
        """Whether the helper has not ended yet."""
        return not self._gone

    def ask(
        self,
        command: str,
        timeout: float,
        on_answer: Callable[[dict[str, Any]], object] | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Send a command and wait for the answer.

        Args:
            command: see `helper.py`.
            timeout: seconds.
            on_answer: called with the answer on the client's thread, before any later message is
                handled.
            arguments: of the command.

        Raises:
            HelperError: it has died, or does not answer in time.
        """
        answers: _Answers = queue.SimpleQueue()
        number = next(self._numbers)
        line = (json.dumps({"id": number, "do": command, **arguments}) + "\n").encode()
        with self._lock:
            if self._gone:
                raise HelperError(self._why_silent())
            self._waiting[number] = answers, on_answer
            pipe: Any = self._process.stdin
            try:
                pipe.write(line)
                pipe.flush()
            except (OSError, ValueError) as error:
                raise HelperError(self._why_silent()) from error
        answer = self._get(answers, timeout)
        with self._lock:
            self._waiting.pop(number, None)
        if answer is None:
            if self._gone:
                raise HelperError(self._why_silent())
            raise HelperError(f"no answer to {command} within {timeout:g} s", silent=True)
        return answer

    @staticmethod
    def _get(answers: _Answers, timeout: float) -> dict[str, Any] | None:
        try:
            return answers.get(timeout=timeout)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Close the pipe: the helper brings this process back if needed, and ends."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def kill(self) -> None:
        """End the helper now; never waits long."""
        with contextlib.suppress(OSError):
            self._process.kill()
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_SECONDS)

    def join(self, timeout: float) -> bool:
        """Wait for its end; False after the timeout."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _listen(self) -> None:
        pipe = self._process.stdout
        if pipe is not None:
            with contextlib.suppress(OSError, ValueError):
                for line in pipe:
                    self._receive(line)
            pipe.close()
        self._process.wait()
        self._end_reason = self._why_silent()
        self._errors.close()
        with self._lock:
            self._gone = True
            waiting = [answers for answers, _ in self._waiting.values()]
        for answers in (self._ready, *waiting):
            answers.put(None)
        self.close()
        self._on_gone(self, self._end_reason)

    def _receive(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return
        if message.get("event") in {"ready", "unusable"}:
            self._ready.put(message)
        elif "event" in message:
            self._on_event(self, message)
        else:
            with self._lock:
                answers, on_answer = self._waiting.get(message.get("id"), (None, None))
            if on_answer is not None:
                on_answer(message)
            if answers is not None:
                answers.put(message)

    def _why_silent(self) -> str:
        """Its exit code and the last line of its errors."""
        if self._end_reason:
            return self._end_reason
        code = self._process.poll()
        try:
            size = os.fstat(self._errors.fileno()).st_size
            tail = os.pread(self._errors.fileno(), _TAIL, max(size - _TAIL, 0)).decode(
                errors="replace"
            )
        except (OSError, ValueError):
            tail = ""
        last = tail.strip().splitlines()[-1:] or [""]
        how = "does not answer" if code is None else f"ended with {code}"
        return f"the helper {how}" + (f": {last[0]}" if last[0] else "")
