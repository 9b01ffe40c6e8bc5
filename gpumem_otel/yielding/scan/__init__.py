"""Finds what a yield can move, and who else uses the GPU meanwhile."""
