"""The folder that `gpumem-otel run` puts on PYTHONPATH; nothing else may lie in it."""
