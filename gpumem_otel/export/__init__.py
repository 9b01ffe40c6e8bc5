"""Outgoing: metrics and pushed profiles."""
