"""The pure core: standard library only, deterministic, no clock, no file that was not handed in."""
