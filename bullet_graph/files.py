"""Files that appear as a whole: no reader ever sees half of one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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
