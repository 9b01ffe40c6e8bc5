"""The folder that `gpumem-otel run` puts on PYTHONPATH; it must hold nothing else."""
