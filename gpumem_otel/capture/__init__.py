"""Touches torch, inside the job; torch itself is imported by nobody but the job."""
