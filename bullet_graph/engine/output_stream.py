"""From the engine's thread to the tasks of event loops."""

import asyncio
from collections import deque
from contextlib import suppress

from bullet_graph.engine.output import RequestOutput


class OutputStream:
    """Carries one request's outputs from the engine's thread to the task that waits for them; made in that task.

    Attributes:
        loop: the task's.
        items: what it has not taken yet: outputs, or the error that ended the request.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.items: deque[RequestOutput | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: RequestOutput | Exception) -> None:
        """From another thread."""
        put_all(self.loop, [(self, item)])

    def take(self, item: RequestOutput | Exception) -> None:
        """In the loop's own thread."""
        self.items.append(item)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # done: its task was cancelled
            waiter.set_result(None)

    def arrival(self) -> asyncio.Future[None]:
        """Done once there is an item; for the one task that takes them, when there is none."""
        # An asyncio.Queue, which may have many on both sides, costs twice as much a token.
        self._waiter = self.loop.create_future()
        return self._waiter


def put_all(
    loop: asyncio.AbstractEventLoop, items: list[tuple[OutputStream, RequestOutput | Exception]]
) -> None:
    """Hand items to their streams, which are all this loop's, from another thread."""

    def take() -> None:
        for stream, item in items:
            stream.take(item)

    # Raised where the loop is closed: its tasks are gone, too, so nobody waits for the items.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(take)
