"""Copies storages between device, host memory and disk, and reserves the room for them."""
