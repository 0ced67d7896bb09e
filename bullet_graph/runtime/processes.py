"""Processes of this package that a process starts."""

import os
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe


def environment_of_child(**changes: str) -> dict[str, str]:
    """This process's environment with changes. Modules are found where this process finds them."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), **changes}


def start_process(module: str, *arguments: str, **environment: str) -> "tuple[Connection, subprocess.Popen[bytes]]":
    """Run a module that serves one end of a pipe, whose file descriptor is its first argument; returns the other end.

    It ends by itself when the other end closes.
    """
    ours, theirs = Pipe()
    try:
        # A process group of its own: an interrupt of the keyboard is for this process alone.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments],
            stdin=subprocess.DEVNULL,
            env=environment_of_child(**environment),
            pass_fds=(theirs.fileno(),),
            process_group=0,
        )
    finally:
        theirs.close()
    return ours, process
