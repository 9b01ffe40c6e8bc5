"""`gpumem-otel demo`: trains a small model or replays a recording, and shows its memory."""
