"""The magics `%gpumem` and `%%gpumem`; loaded only where IPython asks for them.

%gpumem                      what is allocated now, and what holds most of it
%gpumem -f step step(batch)  run one statement, and profile the lines of `step`
%%gpumem                     run the cell, and profile its lines
"""

from __future__ import annotations

import argparse
import ast
import html
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.api import lifecycle
from gpumem_otel.api.line_profiler import LineProfiler
from gpumem_otel.api.snapshots import Profile
from gpumem_otel.capture.device_stats import StatsReader
from gpumem_otel.errors import CaptureError, ConfigError
from gpumem_otel.profiles.tables import stats_table, top_table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

    from gpumem_otel.line_profiling.render import LineReport

_NAME: Final = "gpumem"


def load_ipython_extension(ipython: Any) -> None:
    """Register the magics; called by `%load_ext gpumem_otel`."""
    ipython.register_magic_function(Magic(ipython), "line_cell", _NAME)


def unload_ipython_extension(ipython: Any) -> None:
    """Remove the magics; called by `%unload_ext gpumem_otel`."""
    for kind in ("line", "cell"):
        ipython.magics_manager.magics[kind].pop(_NAME, None)


_TOP: Final = 3
"""Stacks that `%gpumem` prints for each device."""

_UNUSED: Final = "this process uses no GPU memory: CUDA is not initialised\n"
_NOT_INSTALLED: Final = "what holds it: call gpumem_otel.install() before the model is built\n"


class MemoryNow:
    """What `%gpumem` shows: the allocator's counters, and the largest stacks.

    Args:
        counters: as text.
        profile: what is alive; None if nothing records it.
        missing: why there is no profile, one line.
    """

    def __init__(self, counters: str, profile: Profile | None, missing: str = "") -> None:
        self.profile = profile
        self._counters = counters
        self._missing = missing

    def __str__(self) -> str:
        if self.profile is None:
            return self._counters + self._missing
        tops = [top_table(part, "stack", _TOP) for part in self.profile.parts]
        return "\n".join([self._counters, *tops])

    def __repr__(self) -> str:
        return str(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Text, and in a notebook the page with the flame graph if that was built."""
        shown = {"text/plain": str(self)}
        if self.profile is not None:
            counters = f"<pre>{html.escape(self._counters)}</pre>"
            shown["text/html"] = counters + self.profile._repr_html_()
        return shown


def _now() -> MemoryNow:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return MemoryNow("", None, _UNUSED)
    reader = StatsReader(torch)
    counters = stats_table(reader.full(reader.devices()))
    agent = lifecycle.current()
    if agent is None or agent.reader is None:
        return MemoryNow(counters, None, _NOT_INSTALLED)
    try:
        return MemoryNow(counters, Profile(*agent.reader.live()))
    except CaptureError as error:
        return MemoryNow(counters, None, f"what holds it cannot be read: {error}\n")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """Report an error to the notebook instead of ending its kernel."""
        raise ConfigError(f"%gpumem: {message}; see %gpumem -h")

    def exit(self, status: int = 0, message: str | None = None) -> Any:
        """After `-h`."""
        raise _Shown(status, message)


class _Shown(Exception):  # noqa: N818 (no error: the help text is on the screen)
    pass


def _parser() -> _Parser:
    parser = _Parser(prog="%gpumem", description="GPU memory now, or of lines of code.")
    add = parser.add_argument
    add("-f", "--function", metavar="FUNC", action="append", default=[], help="profile its lines")
    add("-c", "--column", metavar="NAME", action="append", default=[], help="counter to show")
    add("-g", "--gpu", metavar="N", type=int, help="device to show; all are read")
    add("-q", "--quiet", action="store_true", help="show nothing")
    add("-r", "--return-profiler", action="store_true", help="return the LineProfiler")
    add("-T", "--dump-profile", metavar="FILE", help="write the text to a file")
    add("statement", nargs=argparse.REMAINDER, help="what to run; of %%%%gpumem the cell")
    return parser


class Magic:
    """`%gpumem` and `%%gpumem`: called by IPython with the line, and the cell if there is one."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.__doc__ = _parser().format_help()

    def __call__(
        self, line: str = "", cell: str | None = None
    ) -> LineReport | LineProfiler | MemoryNow | None:
        """What IPython shows as the cell's value.

        Raises:
            ConfigError: an option or a function that does not exist.
        """
        options, statement = _split(line)
        try:
            chosen = _parser().parse_args(options)
        except _Shown:
            return None
        if cell is None and not statement:
            if chosen.function:
                raise ConfigError("%gpumem -f: give a statement to run, or use %%gpumem")
            return _now()
        profiler = self._run(chosen, statement, cell)
        report = profiler.display(columns=chosen.column)
        if chosen.dump_profile:
            Path(chosen.dump_profile).write_text(str(report), encoding="utf-8")
        if chosen.return_profiler:
            return profiler
        return None if chosen.quiet else report

    def _run(self, chosen: argparse.Namespace, statement: str, cell: str | None) -> LineProfiler:
        profiler = LineProfiler(columns=chosen.column, target_gpu=chosen.gpu)
        codes = self._compiled(statement if cell is None else cell)
        if cell is not None:
            profiler.recorder.add_code("cell", "", codes, whole_file=True)
        for name in chosen.function:
            self._add(profiler, name, codes)
        try:
            with profiler:
                for code in codes:
                    exec(code, self._shell.user_ns)  # noqa: S102 (the user's own cell)
        except BaseException:
            if not chosen.quiet:
                profiler.print_stats()  # what the lines did until then
            raise
        return profiler

    def _compiled(self, text: str) -> tuple[CodeType, ...]:
        """The code; a last expression is compiled separately, so that its value is shown."""
        compiler = self._shell.compile
        text = self._shell.transform_cell(text)
        # known to linecache, so that the report and tracebacks show the lines
        name = compiler.cache(text, self._shell.execution_count)
        tree = compiler.ast_parse(text, name)
        last: list[ast.stmt] = []
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = [tree.body.pop()]
        parts: list[tuple[ast.AST, str]] = [(tree, "exec")] if tree.body else []
        if last:
            parts.append((ast.Interactive(last), "single"))
        return tuple(compiler(part, name, mode) for part, mode in parts)

    def _add(self, profiler: LineProfiler, name: str, codes: tuple[CodeType, ...]) -> None:
        """Add a function that the cell itself defines, else an existing one."""
        for code in _nested(codes):
            if code.co_name == name:
                profiler.recorder.add_code(name, "", (code,))
                return
        try:
            function = eval(name, self._shell.user_ns)  # noqa: S307 (the user's own name)
        except (NameError, AttributeError, SyntaxError) as error:
            raise ConfigError(f"%gpumem -f {name}: there is no such function ({error})") from None
        profiler.add_function(function)


def _split(line: str) -> tuple[list[str], str]:
    """The options before the statement, and the statement as it was written."""
    rest, options = line.strip(), []
    takes_value = {"-f", "--function", "-c", "--column", "-g", "--gpu", "-T", "--dump-profile"}
    while rest.startswith("-"):
        word, _, rest = rest.partition(" ")
        options.append(word)
        rest = rest.lstrip()
        if word in takes_value and rest:
            value, _, rest = rest.partition(" ")
            options += shlex.split(value) or [value]
            rest = rest.lstrip()
    return options, rest


def _nested(codes: tuple[CodeType, ...]) -> Iterator[CodeType]:
    for code in codes:
        inner = tuple(const for const in code.co_consts if hasattr(const, "co_code"))
        yield from inner
        yield from _nested(inner)
