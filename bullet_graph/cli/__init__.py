"""The command line: thin click commands over the public API. Its exit codes, besides 0 and Python's own 1:"""

EXIT_ERROR = 2
"""An error of the caller or the machine, reported in one line; click uses it for wrong options, too."""

EXIT_INTERRUPTED = 130
"""Ctrl-C: 128 + SIGINT, as shells report it."""
