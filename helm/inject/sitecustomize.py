"""First on the PYTHONPATH of a pod that the chart's policy took in: arms its Python processes.

The job comes first in everything. Its own sitecustomize, which this one hides, is run before ours
and is the module of that name. Our packages are put last on the path, so that the job's own
versions win; where one of those is older than a package of ours needs, nothing is added at all and
one line says so. A process that never touches CUDA stays as it was.

Every Python of the pod comes by here, so this is written for 3.6, and looks into folders instead of
importing what knows about versions.
"""
# ruff: noqa: UP036 - the first test of a version is the point
# ruff: noqa: PTH118, PTH120, PTH122, PTH123, PTH208, PLC0415 - imports cost every process of a job

import os
import sys

__all__ = []

_HERE = os.path.realpath(os.path.dirname(__file__))
_PACKAGES = os.path.join(os.path.dirname(_HERE), "packages")
_SAID = "_GPUMEM_OTEL_SAID"


def _is_jobs_own(entry: str) -> bool:
    # the last is what the kubelet leaves where envFrom held no PYTHONPATH
    real = os.path.realpath(entry or ".")
    return real not in {_HERE, _PACKAGES} and not entry.endswith("$(PYTHONPATH)")


def _run_hidden() -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        hidden = module_from_spec(spec)
        sys.modules["sitecustomize"] = hidden
        spec.loader.exec_module(hidden)


def _release(version: str) -> list:
    """The numbers of a version, up to the first part that is none: 1.5rc1 counts as 1.5."""
    numbers = []
    for part in version.split("+", maxsplit=1)[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if digits:
            numbers.append(int(digits))
        if digits != part:
            break
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


def _jobs_versions() -> dict:
    """Project -> version, of all that the job has installed."""
    found = {}
    for entry in sys.path:
        try:
            names = os.listdir(entry or ".")
        except OSError:  # an archive, or not there
            continue
        for name in names:
            stem, kind = os.path.splitext(name)
            if kind in {".dist-info", ".egg-info"} and "-" in stem:
                project, version = stem.split("-")[:2]
                found.setdefault(project.lower().replace(".", "_"), version)
    return found


def _too_old() -> str:
    """What of the job is older than we need; empty if nothing is."""
    if sys.version_info < (3, 10):
        return f"Python {sys.version_info[0]}.{sys.version_info[1]}, and 3.10 is needed"
    found = _jobs_versions()
    with open(os.path.join(_HERE, "needs.txt"), encoding="ascii") as needs:
        for line in needs:
            ours, theirs, oldest = line.split()
            # what the job has of ours comes with its own needs
            if ours in found or theirs not in found:
                continue
            if _release(found[theirs]) < _release(oldest):
                return f"{theirs} {found[theirs]}, and {oldest} is needed"
    return ""


def _say(reason: str) -> None:
    """Once for a process and all that it starts."""
    if os.environ.get(_SAID) != reason and sys.stderr is not None:
        os.environ[_SAID] = reason
        sys.stderr.write(f"gpumem-otel: stays out of this job: {reason}\n")


def _run() -> None:
    sys.path[:] = [entry for entry in sys.path if _is_jobs_own(entry)]
    try:
        _run_hidden()
    finally:
        try:
            reason = _too_old()
            if reason:
                _say(f"it has {reason}")
            else:
                sys.path.append(_PACKAGES)
                from gpumem_otel.api.auto import start_from_environment

                start_from_environment()
        except Exception as error:
            _say(f"{type(error).__name__}: {error}")


_run()
