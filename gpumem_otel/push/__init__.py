"""Pushes of profiles: schedule, Pyroscope, transport, and the spool of what could not be sent."""
