"""Starts, stops and forks the components of one process."""
