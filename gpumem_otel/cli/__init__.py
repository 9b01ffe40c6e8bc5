"""The command line: a file or a folder for each verb, and what several of them share."""
