"""Files that appear as a whole, so that no reader ever sees half of one, and files that may come from anybody."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

PACKAGE_FOLDER = Path(__file__).resolve().parent


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """A file to write beside ``path``, whose place it takes after the block; where the block fails, it is removed."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield draft
        draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def open_regular(path: Path, *, follow_links: bool = False) -> BufferedReader:
    """Open a regular file for reading; OSError for a device or a pipe, and for a link unless ``follow_links``."""
    # O_NONBLOCK: a pipe without a writer would block.
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    file = open(os.open(path, flags), "rb")  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is not a regular file")
    return file
