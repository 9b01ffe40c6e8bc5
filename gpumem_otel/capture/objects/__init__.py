"""What can be read of the job's Python objects, storages and threads without disturbing them."""
