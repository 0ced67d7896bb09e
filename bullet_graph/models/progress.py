"""Progress bars that leave the program around the engine alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm


@contextmanager
def progress_bar(show: bool, **settings: Any) -> Iterator[Callable[[float], object]]:
    """Yield what advances the bar.

    Not even a disabled bar is made unless it is wanted: tqdm fixes multiprocessing's start method with each.

    Args:
        show: whether there is a bar.
        settings: tqdm's.
    """
    if not show:
        yield lambda _: None
        return
    with tqdm(**settings) as bar:
        yield bar.update
