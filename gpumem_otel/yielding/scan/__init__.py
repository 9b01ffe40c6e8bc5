"""Finds the storages that a yield can move, and other threads that use the GPU."""
