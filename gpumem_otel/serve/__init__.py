"""The read-only listener for scrapes and pulls, and the register of the jobs on this machine."""
