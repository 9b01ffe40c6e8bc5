"""The `gpumem-otel` command: outside the package, so that Ctrl-C is quiet during its import too."""


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        from gpumem_otel.cli.main import main as run  # noqa: PLC0415 - most of the start-up time

        return run()
    except KeyboardInterrupt:
        return 130
