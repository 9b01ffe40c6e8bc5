"""`gpumem-otel ctl`: ask running jobs to give their GPU memory back, and to take it again."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from gpumem_otel.cli.ctl.reach import Reach, as_entry, clients_of, json_on_error
from gpumem_otel.cli.output import CommandFailed, error_line, print_json, warn
from gpumem_otel.cli.shared_options import json_option, options
from gpumem_otel.yielding.request_fields import (
    DeviceNumbers,
    Flag,
    Names,
    OneOf,
    Seconds,
    fields_of,
)
from gpumem_otel.yielding.values import RestoreRequest, YieldLevel, YieldRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpumem_otel.cli.ctl.client import Client
    from gpumem_otel.cli.ctl.jobs import OperationProgress, Outcome
    from gpumem_otel.yielding.request_fields import RequestField

_EPILOG = """\b
Examples:
  gpumem-otel ctl state
  gpumem-otel ctl yield --dry-run
  gpumem-otel ctl yield --lease 30m
  gpumem-otel ctl restore
  gpumem-otel ctl state --target https://node7:9564 --token-file token --ca-file ca.pem

\b
Without --target, the jobs of this user on this machine that were started with
GPUMEM_OTEL_CONTROL=1, or those of all users for root. TIME is seconds, or a number
with s, m, h or d: 90, 30m, 1.5h. Exit codes: 0 done, 1 refused or failed, 2 bad usage.
"""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

_RANK = ("namespace", "service_name", "run_id", "rank")
"""The fields that name a process of a job; all but the last name the job."""


def _duration(value: str) -> float:
    """Seconds, or a number with s, m, h or d."""
    text = value.strip().lower()
    unit = _UNITS.get(text[-1:])
    number = text if unit is None else text[:-1]
    # float() also accepts nan, inf and 1_0
    if not number.isascii() or not number.replace(".", "", 1).isdigit():
        raise click.BadParameter(
            f"{value!r} is not a duration: seconds, or a number with s, m, h or d (90, 30m, 1.5h)"
        )
    return float(number) * (1.0 if unit is None else unit)


def _requesting(request_type: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options of a request, one for each of its fields."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for name, field in reversed(tuple(fields_of(request_type).items())):
            option = field.option or f"--{name.replace('_', '-')}"
            function = click.option(option, name, **_option_of(field))(function)
        return function

    return add


def _option_of(field: RequestField) -> dict[str, Any]:
    """The arguments of `click.option` for a field."""
    kind = field.kind
    if isinstance(kind, OneOf):
        return {"help": field.help, "type": click.Choice(kind.words)}
    if isinstance(kind, DeviceNumbers):
        return {"help": field.help, "type": int, "multiple": True}
    if isinstance(kind, Names):
        return {"help": field.help, "type": click.Choice(kind.words), "multiple": True}
    if isinstance(kind, Seconds):
        default = "" if field.default is None else f", default {field.default:g}"
        text = f"{field.help.removesuffix('.')} ({kind}{default})."
        return {"help": text, "type": _duration, "metavar": "TIME"}
    return {"help": field.help, "is_flag": isinstance(kind, Flag)}


_reaching = options(
    click.option(
        "--target",
        "targets",
        multiple=True,
        metavar="URL",
        help="unix:///path/to.sock, http://host:port or https://host:port; several times.",
    ),
    click.option("--run-dir", metavar="DIR", help="Where jobs have their sockets."),
    click.option("--token-file", default="", metavar="FILE", help="Bearer token."),
    click.option("--ca-file", default="", metavar="FILE", help="CA of the servers."),
    click.option("--cert-file", default="", metavar="FILE", help="Client certificate."),
    click.option("--key-file", default="", metavar="FILE", help="Its key."),
    click.option(
        "--insecure", is_flag=True, help="Send a token over plain HTTP to another machine."
    ),
    json_option("Print JSON."),
)
"""The options of all verbs."""

_following = options(
    click.option(
        "--all", "every", is_flag=True, help="All jobs of this machine, where it has many."
    ),
    click.option("--wait/--no-wait", default=True, help="Follow it to its end (the default)."),
)
"""The options of commands."""


@click.group(
    "ctl",
    epilog=_EPILOG,
    no_args_is_help=False,  # errors are one line, and the help is not
    short_help="Ask jobs to yield and restore GPU memory.",
)
def command() -> None:
    """Ask running jobs to give their GPU memory back, and to take it again."""


@command.command("state")
@_reaching
def _state(as_json: bool, **reach: Any) -> int:
    """Print where each process stands."""
    from gpumem_otel.cli.ctl.jobs import at_once, state_of
    from gpumem_otel.cli.ctl.view import state_table

    outcomes = at_once(clients_of(Reach(**reach), as_json=as_json), state_of)
    if as_json:
        print_json([as_entry(outcome) for outcome in outcomes])
    elif any(not outcome.error for outcome in outcomes):
        click.echo(state_table(outcomes, time.time_ns()), nl=False)
    return _report_errors(outcomes)


@command.command("watch")
@_reaching
def _watch(as_json: bool, **reach: Any) -> int:
    """Print each change of each process until interrupted; with --json a line of JSON for each."""
    from gpumem_otel.cli.ctl.jobs import watch as follow
    from gpumem_otel.cli.ctl.view import change_line

    clients = clients_of(Reach(**reach))
    events: queue.SimpleQueue[Outcome | str] = queue.SimpleQueue()
    stop = threading.Event()

    def run(client: Client) -> None:
        try:
            follow(client, events.put, stop)
        except CommandFailed as error:
            events.put(error.format_message())
        except Exception as error:
            events.put(f"{client.target.url}: {type(error).__name__}: {error}")

    for client in clients:
        threading.Thread(target=run, args=(client,), daemon=True).start()
    left, answered = len(clients), False
    while left:
        event = events.get()
        if isinstance(event, str):
            left -= 1
            warn(event)
            continue
        answered = True
        click.echo(json.dumps(as_entry(event)) if as_json else change_line(event))
    raise CommandFailed("no process answers any more" if answered else "no process answered")


@command.command("yield")
@_reaching
@_following
@_requesting(YieldRequest)
def _yield(**given: Any) -> int:
    """Give GPU memory back."""
    return _command("yield", YieldRequest, given)


@command.command("restore")
@_reaching
@_following
@_requesting(RestoreRequest)
def _restore(**given: Any) -> int:
    """Take GPU memory again."""
    return _command("restore", RestoreRequest, given)


def _command(kind: str, request_type: type, given: dict[str, Any]) -> int:
    """Send it to each process and follow it."""
    from gpumem_otel.cli.ctl import jobs as ctl_jobs
    from gpumem_otel.cli.ctl.view import bars, report_lines

    # What was not given is left to the job's own defaults; 0 was given.
    body = {
        name: value
        for name in fields_of(request_type)
        if (value := given.pop(name)) is not None and value is not False and value != ()
    }
    as_json, every, wait = given.pop("as_json"), given.pop("every"), given.pop("wait")
    reach = Reach(**given)
    with json_on_error(tuple(dict.fromkeys(reach.targets)), as_json=as_json):
        fault = _fault(kind, body)
        if fault:
            raise click.UsageError(fault)
    clients = clients_of(reach, as_json=as_json)
    if not reach.targets and not every:
        with json_on_error([client.target.url for client in clients], as_json=as_json):
            _refuse_several_jobs(clients)
    names_shown = {client.target.url: f"{kind} {i}" for i, client in enumerate(clients)}
    call = partial(ctl_jobs.command, kind=kind, body=body, wait=wait)
    begun: set[str] = set()
    try:
        with bars(names_shown, kind, silent=as_json) as show:

            def shown(progress: OperationProgress) -> None:
                begun.add(progress.url)
                show(progress)

            outcomes = ctl_jobs.at_once(clients, call, shown)
    except KeyboardInterrupt:
        warn(_interrupted(kind, begun=bool(begun)))
        raise
    if as_json:
        print_json([as_entry(outcome) for outcome in outcomes])
    else:
        for outcome in outcomes:
            if not outcome.error:
                click.echo("\n".join(report_lines(outcome)))
    return _report_errors(outcomes)


def _interrupted(kind: str, *, begun: bool) -> str:
    """What to do after Ctrl-C: a command that a job has begun cannot be cancelled."""
    from gpumem_otel.cli.ctl import jobs as ctl_jobs

    if not begun:
        return f"{ctl_jobs.begun(kind)}: no answer came so far"
    way = "" if kind == "restore" else (
        ", `gpumem-otel ctl restore` takes the memory again once it has ended"
    )  # fmt: skip
    return f"not waited for: the {kind} goes on. `gpumem-otel ctl state` shows it{way}"


def _fault(kind: str, body: dict[str, Any]) -> str:
    """Why every job would refuse this, "" where none would for its form alone."""
    from gpumem_otel.yielding.validation import restore_fault, yield_fault

    if kind == "restore":
        return restore_fault(RestoreRequest(**body))
    level = YieldLevel(body.get("level", YieldLevel.AUTO))
    return yield_fault(YieldRequest(**{**body, "level": level}))


def _refuse_several_jobs(clients: Sequence[Client]) -> None:
    """A command without a target must not reach more than one job.

    Raises:
        CommandFailed: a process did not answer, and may be of another job.
        UsageError: the processes are of several jobs, or claim the same rank.
    """
    from gpumem_otel.cli.ctl.jobs import at_once, state_of

    outcomes = at_once(clients, state_of)
    for outcome in outcomes:
        if outcome.error:
            raise CommandFailed(f"{outcome.error}; choose processes with --target, or give --all")
    ranks = Counter(tuple(outcome.process.get(name) for name in _RANK) for outcome in outcomes)
    jobs = len({rank[:-1] for rank in ranks})
    if jobs > 1 or any(count > 1 for count in ranks.values()):
        several = f"{jobs} jobs" if jobs > 1 else "processes that claim the same rank of one job"
        raise click.UsageError(
            f"{several} take commands here: choose processes with --target ('gpumem-otel ctl "
            "state' lists them), or give --all"
        )


def _report_errors(outcomes: Sequence[Outcome]) -> int:
    """Print the errors; returns the exit code."""
    errors = [outcome.error for outcome in outcomes if outcome.error]
    for line in errors:
        error_line(line)
    return 1 if errors else 0
