"""Gives a job's GPU memory back and takes it again: values, validation and wiring."""
