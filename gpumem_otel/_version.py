"""The version, read by the build and by `gpumem-otel --version`."""

__version__ = "0.1.0"
