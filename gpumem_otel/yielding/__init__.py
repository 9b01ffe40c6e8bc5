"""Giving the GPU back and taking it again."""
