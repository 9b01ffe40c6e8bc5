"""The line profiler: GPU memory by line of the functions that are profiled."""
