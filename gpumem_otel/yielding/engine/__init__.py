"""Runs one yield or restore at a time: safe points, phases, leases, interrupts, reports."""
