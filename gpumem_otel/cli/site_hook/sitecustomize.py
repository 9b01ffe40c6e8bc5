"""On PYTHONPATH by `gpumem-otel run`: every Python process of the job runs this at its start.

It first runs the sitecustomize that this one hides, then starts the agent. It imports neither torch
nor the OpenTelemetry SDK; a process that never uses CUDA is not changed.
"""

__all__: list[str] = []


def _run() -> None:
    # function scope: our names must not stay in the job's sitecustomize module
    import sys
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    from os.path import dirname, realpath

    here = realpath(dirname(__file__))  # noqa: PTH120 - pathlib costs every process
    others = [entry for entry in sys.path if realpath(entry or ".") != here]
    sys.path[:] = others
    spec = PathFinder.find_spec("sitecustomize", others)
    try:
        if spec is not None and spec.loader is not None:
            hidden = module_from_spec(spec)
            sys.modules["sitecustomize"] = hidden
            spec.loader.exec_module(hidden)
    finally:
        try:
            from gpumem_otel.api.auto import start_from_environment

            start_from_environment()
        except Exception as error:
            # the job goes on without us, and its user should know
            if sys.stderr is not None:
                sys.stderr.write(
                    f"gpumem-otel: {sys.executable} runs without it: "
                    f"{type(error).__name__}: {error}\n"
                )


_run()
