"""The control API: commands to yield and restore, over a Unix socket or TCP."""
