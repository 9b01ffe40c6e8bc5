"""The `gpumem-otel` command: the table of verbs, and the one place where errors become exit codes.

Exit codes: 0 done; 1 failed; 2 bad usage or input; 127 no such command (`run`, `record`); 130
interrupted; 141 the reader of the output closed it (`| head`). An error is one line on stderr,
never a traceback.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import click

from gpumem_otel._version import __version__
from gpumem_otel.cli.output import error_line, forget_stdout
from gpumem_otel.errors import ConfigError, GpumemError, SnapshotError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROGRAM = "gpumem-otel"

_READER_GONE = 141
"""128 + SIGPIPE, as shells report of tools that the signal ends."""


class Verb(NamedTuple):
    """A row of the table: `gpumem_otel.cli.<module>` holds the command as `command`."""

    name: str
    module: str
    help: str


VERBS: tuple[Verb, ...] = (
    Verb("demo", "demo.command", "Show everything at work, with or without a GPU."),
    Verb("run", "run", "Run a training command with GPU memory export, no code change."),
    Verb("record", "record", "Run a training command and record its GPU memory to a file."),
    Verb("stats", "stats", "Print what a snapshot or recording says about each device."),
    Verb("top", "top", "Print what holds the memory, by stack, function or file."),
    Verb("segments", "segments", "Draw each segment with its blocks."),
    Verb("trace", "trace", "Print the recorded events, filtered."),
    Verb("compare", "compare", "Print what changed between two snapshots."),
    Verb("flamegraph", "flamegraph", "Write a page with flame graphs of a snapshot, or of two."),
    Verb("timeline", "timeline", "Write a page with the memory over time."),
    Verb("convert", "convert", "Turn a snapshot into pprof, folded stacks, speedscope or JSON."),
    Verb("dump", "dump", "Turn a recording into a snapshot pickle that memory_viz reads."),
    Verb("push", "push", "Send a snapshot, recording or pprof file to Pyroscope."),
    Verb("sd", "sd", "Print Prometheus targets of the jobs on this machine (file_sd)."),
    Verb("ctl", "ctl.command", "Ask running jobs to give GPU memory back, and to take it again."),
    Verb("cost", "cost", "Print what a job of this size costs in series and bytes."),
    Verb("doctor", "doctor", "Say what works here, and what to do about what does not."),
)

_EPILOG = """\b
Examples:
  gpumem-otel demo
  gpumem-otel run --serve -- python train.py
  gpumem-otel stats snapshot.pickle
  gpumem-otel convert snapshot.pickle -o live.pb.gz && go tool pprof -top live.pb.gz
  gpumem-otel push snapshot.pickle --url http://localhost:4040
"""


class _Verbs(click.Group):
    """Imports a verb's module when that verb is asked for, so that --help is fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return [verb.name for verb in VERBS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        for verb in VERBS:
            if verb.name == cmd_name:
                command = import_module(f"gpumem_otel.cli.{verb.module}").command
                if not isinstance(command, click.Command):  # a row without its file
                    raise TypeError(f"gpumem_otel.cli.{verb.module}.command is not a command")
                return command
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Verbs"):
            formatter.write_dl([(verb.name, verb.help) for verb in VERBS])


@click.group(
    cls=_Verbs,
    epilog=_EPILOG,
    no_args_is_help=False,
    subcommand_metavar="VERB [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name=PROGRAM, message="%(prog)s %(version)s")
def cli() -> None:
    """GPU memory of PyTorch jobs as flame graphs and metrics.

    IN may be "-" for standard input. "gpumem-otel VERB --help" tells more.
    """


def _say(message: str) -> None:
    with suppress(OSError):  # stderr may be closed
        error_line(message)


def _usage_line(error: click.UsageError) -> str:
    message = error.format_message().rstrip(".")
    path = error.ctx.command_path if error.ctx is not None else PROGRAM
    return f"{message} (see '{path} --help')"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with _somewhere_to_write():
        return _run(arguments)


@contextmanager
def _somewhere_to_write() -> Iterator[None]:
    """Python sets a stream that the caller has closed to None: what is written there is lost."""
    with open(os.devnull, "w", encoding="utf-8") as null, ExitStack() as stack:  # noqa: PTH123
        if sys.stdout is None:
            stack.enter_context(redirect_stdout(null))
        if sys.stderr is None:
            stack.enter_context(redirect_stderr(null))
        yield


def _run(arguments: list[str]) -> int:
    try:
        with cli.make_context(PROGRAM, arguments) as context:
            result = cli.invoke(context)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as stop:
        return _flushed(stop.exit_code)
    except click.UsageError as error:
        _say(_usage_line(error))
        return 2
    except click.ClickException as error:
        _say(error.format_message())
        return error.exit_code
    except (KeyboardInterrupt, click.exceptions.Abort):
        return 130
    except BrokenPipeError:
        forget_stdout()
        return _READER_GONE
    except (ConfigError, SnapshotError) as error:
        _say(str(error))
        return 2
    except GpumemError as error:
        _say(str(error))
        return 1
    except OSError as error:
        reason = error.strerror or type(error).__name__
        _say(f"{error.filename}: {reason}" if error.filename else reason)
        return 1
    except Exception as error:
        _say(f"unexpected {type(error).__name__}: {error}; this is a bug in {PROGRAM}")
        return 1


def _flushed(code: int) -> int:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        forget_stdout()
        return _READER_GONE
    return code


if __name__ == "__main__":
    sys.exit(main())
