"""The driver's checkpoint of a process, made by a helper process."""
