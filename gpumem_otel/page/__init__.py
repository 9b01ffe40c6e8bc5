"""The HTML page: what it is given, in columns, and the file that holds it."""
