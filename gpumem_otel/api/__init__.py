"""What a job or a notebook calls: install, watch, step, yields, line profiler, snapshots."""
