"""Incoming: the listener; handlers are request -> response functions, the server a shell."""
