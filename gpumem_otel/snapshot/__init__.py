"""Torch's memory snapshot: its format, loading, trace replay, stacks, tensor classes, layout."""
