"""Commands to several processes at once: one daemon thread each, followed to the end."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.cli.ctl.client import CONNECT_SECONDS, Reply, Unreachable
from gpumem_otel.cli.output import CommandFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gpumem_otel.cli.ctl.client import Client

_POLL_SECONDS: Final = 1.0
"""Length of a long poll of the state; each change of it is shown as progress."""

_WATCH_SECONDS: Final = 20.0

_LOST_SECONDS: Final = 10.0
"""A process that does not answer for so long is no longer followed."""

_SUBMIT_SECONDS: Final = 120.0
"""Time limit of the answer to a command: a dry run waits for a safe point."""

_OK: Final = 200
_BEGUN: Final = 202
_BUSY: Final = 503


@dataclass(frozen=True, slots=True)
class OperationProgress:
    """How far an operation of one process is.

    Attributes:
        process: the job and rank that it reports.
    """

    url: str
    phase: str
    done_bytes: int
    total_bytes: int
    process: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request to one process.

    Attributes:
        value: state or operation, as JSON.
        error: one line, "" without an error.
    """

    url: str
    value: Any = None
    error: str = ""
    process: dict[str, Any] = field(default_factory=dict)


def at_once(
    clients: Sequence[Client],
    call: Callable[[Client, Callable[[OperationProgress], None]], Outcome],
    show: Callable[[OperationProgress], None] = lambda _: None,
) -> list[Outcome]:
    """Run a call for each client on a daemon thread; outcomes in the order of the clients.

    Args:
        clients: each of another target.
        call: must raise nothing but `CommandFailed`.
        show: called on this thread.
    """
    events: queue.SimpleQueue[tuple[int, Outcome | OperationProgress]] = queue.SimpleQueue()

    def run(index: int, client: Client) -> None:
        try:
            events.put((index, call(client, lambda progress: events.put((index, progress)))))
        except CommandFailed as error:
            events.put((index, Outcome(client.target.url, error=error.format_message())))
        except Exception as error:
            line = f"{client.target.url}: {type(error).__name__}: {error}"
            events.put((index, Outcome(client.target.url, error=line)))

    for index, client in enumerate(clients):
        threading.Thread(target=run, args=(index, client), daemon=True).start()
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(clients):
        index, event = events.get()
        if isinstance(event, Outcome):
            outcomes[index] = event
        else:
            show(event)
    return [outcomes[index] for index in range(len(clients))]


def state_of(client: Client, _show: Callable[[OperationProgress], None]) -> Outcome:
    """The state of one process."""
    return _state(client, client.ask("GET", "/v1/state"))


def watch(client: Client, changed: Callable[[Outcome], None], stop: threading.Event) -> None:
    """Report the state and each change of it, until it is stopped.

    Raises:
        CommandFailed: the process no longer answers.
    """
    version = -1
    while not stop.is_set():
        outcome = _next_state(client, version, _WATCH_SECONDS)
        if outcome.error:
            raise CommandFailed(outcome.error)
        if outcome.value["version"] != version:
            version = outcome.value["version"]
            changed(outcome)


def command(
    client: Client,
    show: Callable[[OperationProgress], None],
    *,
    kind: str,
    body: dict[str, Any],
    wait: bool,
) -> Outcome:
    """Begin a yield or restore and follow it to its end.

    Args:
        client: of the process.
        show: called with the progress.
        kind: `yield` or `restore`.
        body: of the request.
        wait: follow it; else the outcome is the operation that was begun.

    Raises:
        CommandFailed: it does not answer.
    """
    url = client.target.url
    process = state_of(client, show)
    if process.error:
        return process
    timeout = _SUBMIT_SECONDS + float(body.get("wait_seconds") or 0)
    key = uuid.uuid4().hex
    send = partial(client.ask, "POST", f"/v1/{kind}", body, key=key, timeout=timeout)
    try:
        try:
            reply = send()
        except Unreachable as error:
            if error.waited:
                raise
            reply = send()  # it may have begun: the same key does not begin it twice
    except Unreachable as error:
        raise CommandFailed(f"{error.format_message()}; {begun(kind)}") from error
    if reply.status not in {_OK, _BEGUN} or not _is_operation(reply.value):
        return Outcome(url, error=f"{url}: {reply.error}", process=process.process)
    operation = reply.value
    if wait:
        for operation in _followed(client, reply.value):
            if operation["state"] == "running":
                done, total = operation["done_bytes"], operation["total_bytes"]
                show(OperationProgress(url, operation["phase"] or "", done, total, process.process))
    failed = operation["state"] in {"refused", "failed"}
    reason = f"{url}: {kind} {operation['state']}: {operation['error']}" if failed else ""
    return Outcome(url, operation, reason, process.process)


def begun(kind: str) -> str:
    """What to do where no answer came to a command."""
    return f"`gpumem-otel ctl state` shows whether the {kind} has begun"


def _followed(client: Client, operation: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The operation again and again, until it has ended.

    Raises:
        CommandFailed: the process no longer answers, or no longer has the operation.
    """
    version, lost = -1, 0.0
    yield operation
    while operation["state"] == "running":
        try:
            state = _next_state(client, version, _POLL_SECONDS)
            if state.error:
                raise CommandFailed(state.error)
            version = state.value["version"]
            current = state.value["operation"] or {}
            if current.get("id") != operation["id"]:
                reply = client.ask("GET", f"/v1/operations/{operation['id']}")
                if not _is_operation(reply.value):
                    raise CommandFailed(f"{client.target.url}: {reply.error}")
                current = reply.value
            operation = current
            lost = 0.0
        except Unreachable:
            now = time.monotonic()
            lost = lost or now
            if now - lost > _LOST_SECONDS:
                raise CommandFailed(
                    f"{client.target.url}: the {operation['kind']} began, and there has been no "
                    f"answer for {now - lost:.0f} s: the process is stopped, or has ended, if "
                    "`gpumem-otel ctl state` does not list it"
                ) from None
            time.sleep(_POLL_SECONDS / 4)
            continue
        yield operation


def _next_state(client: Client, version: int, wait_seconds: float) -> Outcome:
    """The state once its version has changed, or after `wait_seconds`."""
    path = f"/v1/state?version={version}&wait_seconds={wait_seconds:g}"
    reply = client.ask("GET", path, timeout=wait_seconds + CONNECT_SECONDS)
    if reply.status == _BUSY:  # too many requests wait: poll instead
        time.sleep(_POLL_SECONDS)
        reply = client.ask("GET", "/v1/state")
    if reply.status == _BUSY:
        raise Unreachable(f"{client.target.url}: {reply.error}")
    return _state(client, reply)


def _state(client: Client, reply: Reply) -> Outcome:
    url = client.target.url
    value = reply.value
    right = (
        reply.status == _OK
        and isinstance(value, dict)
        and isinstance(value.get("status"), dict)
        and isinstance(value.get("process"), dict)
    )
    if not right:
        return Outcome(url, error=f"{url}: {reply.error}")
    return Outcome(url, value["status"], process=value["process"])


def _is_operation(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("id"), str) and "state" in value
