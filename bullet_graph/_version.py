"""The package's version, apart from everything else so that the build can read it without imports."""

__version__ = "0.1.0"
