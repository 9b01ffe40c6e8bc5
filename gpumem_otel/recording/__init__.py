"""Our own recordings: format, writer, reader, and the source that plays one back."""
