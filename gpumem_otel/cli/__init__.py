"""The command line: one file per verb, a table of verbs."""
