"""Values, protocols, counters and text that every feature shares; imports no feature."""
