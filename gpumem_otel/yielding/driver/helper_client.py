"""The parent's end of the pipes to its keeper."""

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
    """The keeper could not be started, has died, or says nothing.

    Attributes:
        silent: it lives, but a call of the driver does not return.
    """

    def __init__(self, message: str, *, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperSettings:
    """How keepers are started.

    Attributes:
        driver: name of the module with the driver's functions.
        nvml: likewise of NVML.
        environ: their environment.
        python: the interpreter.
        start_seconds: until one must have loaded the driver.
        first_pause_seconds: see `Keeper`, as is the next.
    """

    driver: str = DRIVER
    nvml: str = NVML
    environ: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    python: str = sys.executable
    start_seconds: float = 30.0
    first_pause_seconds: float = 0.25
    longest_pause_seconds: float = 10.0


class HelperClient:
    """One keeper process, from start to end.

    It is started without the site module, in a session of its own and in the root folder, with our
    `sys.path`: no hook of the environment runs in it, a Ctrl-C of the terminal does not reach it,
    and it holds no folder of the job.

    Args:
        on_event: called on the link's thread with each message that answers no request.
        on_gone: called there once the keeper has ended, with what it said last.

    Raises:
        KeeperError: it did not come up; it has ended.
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
        self._words = ""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = self._spawn(settings)
        self.pid = self._process.pid
        self._thread = threading.Thread(target=self._listen, name="gpumem-otel-keeper", daemon=True)
        self._thread.start()
        told = self._get(self._ready, settings.start_seconds)
        if told is None or told["event"] != "ready":
            silent = told is None and self.alive
            self.kill()
            said = self._last_words() if told is None else str(told["error"])
            raise HelperError(said, silent=silent)

    def _spawn(self, settings: HelperSettings) -> subprocess.Popen[bytes]:
        told = json.dumps(
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
                [settings.python, "-S", "-m", _MODULE, told],
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
        """Whether it has not ended yet."""
        return not self._gone

    def ask(
        self,
        what: str,
        timeout: float,
        on_answer: Callable[[dict[str, Any]], object] | None = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Its answer.

        Args:
            what: see `keeper`.
            timeout: seconds.
            on_answer: called with the answer on the link's thread, before anything that the
                keeper says after it is heard.
            arguments: of the command.

        Raises:
            KeeperError: it has died, or does not answer within the time.
        """
        answers: _Answers = queue.SimpleQueue()
        number = next(self._numbers)
        line = (json.dumps({"id": number, "do": what, **arguments}) + "\n").encode()
        with self._lock:
            if self._gone:
                raise HelperError(self._last_words())
            self._waiting[number] = answers, on_answer
            pipe: Any = self._process.stdin
            try:
                pipe.write(line)
                pipe.flush()
            except (OSError, ValueError) as error:
                raise HelperError(self._last_words()) from error
        answer = self._get(answers, timeout)
        with self._lock:
            self._waiting.pop(number, None)
        if answer is None:
            if self._gone:
                raise HelperError(self._last_words())
            raise HelperError(f"no answer to {what} within {timeout:g} s", silent=True)
        return answer

    @staticmethod
    def _get(answers: _Answers, timeout: float) -> dict[str, Any] | None:
        try:
            return answers.get(timeout=timeout)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Send it away: it brings us back first, where that is still to be done."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def kill(self) -> None:
        """End it now, whatever it does; never waits long."""
        with contextlib.suppress(OSError):
            self._process.kill()
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_SECONDS)

    def join(self, timeout: float) -> bool:
        """Wait for its end."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _listen(self) -> None:
        pipe = self._process.stdout
        if pipe is not None:
            with contextlib.suppress(OSError, ValueError):
                for line in pipe:
                    self._heard(line)
            pipe.close()
        self._process.wait()
        self._words = self._last_words()
        self._errors.close()
        with self._lock:
            self._gone = True
            waiting = [answers for answers, _ in self._waiting.values()]
        for answers in (self._ready, *waiting):
            answers.put(None)
        self.close()
        self._on_gone(self, self._words)

    def _heard(self, line: bytes) -> None:
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

    def _last_words(self) -> str:
        if self._words:
            return self._words
        code = self._process.poll()
        try:
            size = os.fstat(self._errors.fileno()).st_size
            said = os.pread(self._errors.fileno(), _TAIL, max(size - _TAIL, 0)).decode(
                errors="replace"
            )
        except (OSError, ValueError):
            said = ""
        last = said.strip().splitlines()[-1:] or [""]
        how = "says nothing" if code is None else f"ended with {code}"
        return f"the keeper {how}" + (f": {last[0]}" if last[0] else "")
