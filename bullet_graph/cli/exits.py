"""Exit codes of the console script, besides 0 and Python's own 1 for an unexpected exception."""

EXIT_ERROR = 2
"""An error of the caller's or the machine's, told in one line (click uses 2 for wrong options too)."""

EXIT_INTERRUPTED = 130
"""Ctrl-C: 128 + SIGINT, as shells report it."""
