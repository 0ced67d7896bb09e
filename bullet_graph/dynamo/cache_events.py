"""What the prefix cache holds, as events for Dynamo's router, and the thread that publishes them; knows no Dynamo.

Dynamo's router hashes the token ids of each block by itself. The hashes in the events only name blocks of this worker.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.engine.block_pool import BlocksRemoved, BlocksStored

_LOAD_INTERVAL_S = 0.1
_MOST_EVENTS = 256
"""Events of one batch: the publisher checks a batch as a whole before it sends any of it."""

Event = Mapping[str, Any]

logger = logging.getLogger(__name__)


def hash_of(key: bytes) -> int:
    """The signed 64-bit number that names a block: the beginning of its key."""
    return int.from_bytes(key[:8], "little", signed=True)


def event_of(change: BlocksStored | BlocksRemoved) -> Event:
    """A change of the prefix cache as an item of ``publish_batch``."""
    hashes = [hash_of(key) for key in change.keys]
    if isinstance(change, BlocksRemoved):
        return {"type": "removed", "block_hashes": hashes}
    event: dict[str, Any] = {
        "type": "stored",
        "token_ids": change.token_ids.tolist(),
        "num_block_tokens": [KV_BLOCK_TOKENS] * len(hashes),
        "block_hashes": hashes,
        "parent_hash": None if change.parent is None else hash_of(change.parent),
    }
    return event if change.cache_salt is None else event | {"cache_salt": change.cache_salt}


class CacheEvents:
    """Takes changes of the prefix cache from the engine's thread, and publishes them from a thread of its own.

    That thread also calls ``publish_load``, about ten times a second. Both start with :meth:`start`; what came before
    is kept until then.
    """

    def __init__(self, publish_load: Callable[[], None]) -> None:
        self._publish_load = publish_load
        self._changes: queue.SimpleQueue[BlocksStored | BlocksRemoved | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.put = self._changes.put
        """Take a change; a :data:`~bullet_graph.engine.block_pool.CacheListener`."""

    def start(self, publisher: Any) -> None:
        """Begin to publish by Dynamo's ``KvEventPublisher``; with None in its place, the load alone."""
        self._thread = threading.Thread(target=self._run, args=(publisher,), name="bullet-graph-dynamo", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, once it has published what came before."""
        self._changes.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self, publisher: Any) -> None:
        running, load_s = True, 0.0
        while running:
            changes = self._next_changes()
            running = None not in changes
            events = [event_of(change) for change in changes if change is not None]
            try:
                if events and publisher is not None:
                    publisher.publish_batch(events)
                if time.monotonic() >= load_s:
                    self._publish_load()
                    load_s = time.monotonic() + _LOAD_INTERVAL_S
            except Exception:
                # The router then sends some requests to the wrong worker, which answers them all the same.
                logger.exception("%d events of the prefix cache, or the load, could not be published", len(events))

    def _next_changes(self) -> list[BlocksStored | BlocksRemoved | None]:
        """What has come, at most a batch; nothing if none comes in time."""
        changes: list[BlocksStored | BlocksRemoved | None] = []
        try:
            changes.append(self._changes.get(timeout=_LOAD_INTERVAL_S))
            while len(changes) < _MOST_EVENTS:
                changes.append(self._changes.get_nowait())
        except queue.Empty:
            pass
        return changes
