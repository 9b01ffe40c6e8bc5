"""Out of memory: notices a failed allocation, reports what held the memory, sends it in time."""
