"""Our own recordings: format, writer, reader, replay, and conversion to a snapshot of torch."""
