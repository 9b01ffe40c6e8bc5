"""Reads the job's Python objects, storages and threads without disturbing them."""
