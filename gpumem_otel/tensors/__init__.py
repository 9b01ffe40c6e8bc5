"""The tensor report: which tensors live, who holds them, and the tracebacks that keep them."""
