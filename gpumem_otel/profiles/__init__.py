"""Heap profiles of snapshots and recordings, and their encodings: pprof, folded stacks, tables."""
