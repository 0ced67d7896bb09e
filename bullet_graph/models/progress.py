"""Progress bars that leave the program around the engine alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm


@contextmanager
def progress_bar(show: bool, **settings: Any) -> Iterator[Callable[[float], object]]:
    """Yield a function that advances the bar, which tqdm's ``settings`` describe.

    Without ``show`` not even a disabled bar is made: each one makes tqdm fix multiprocessing's start method.
    """
    if not show:
        yield lambda _: None
        return
    with tqdm(**settings) as bar:
        yield bar.update
