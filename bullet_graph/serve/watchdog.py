"""Notices that the engine makes no progress, even if its thread is stuck, and gives it up."""

import asyncio
import logging

from bullet_graph.engine.async_engine import AsyncEngine

_MOST_S_BETWEEN_LOOKS = 1.0

logger = logging.getLogger(__name__)


class Watchdog:
    """Looks at the lanes again and again.

    Args:
        engine: given up when a lane makes no progress.
        limit_s: longest time that counts as progress; above the longest step, and what is compiled in it.
    """

    def __init__(self, engine: AsyncEngine, limit_s: float) -> None:
        self._engine = engine
        self._limit_s = limit_s

    async def run(self) -> None:
        """Look until the engine is dead, of whatever cause."""
        while self._engine.failure is None:
            await asyncio.sleep(min(self._limit_s / 4, _MOST_S_BETWEEN_LOOKS))
            self.look()

    def look(self) -> None:
        """Fail all requests if nothing has moved for too long."""
        stalled = self._engine.stalled(self._limit_s)
        if stalled is None or self._engine.failure is not None:
            return
        limit = f"{self._limit_s:g} s (--watchdog-timeout)"
        reason = f"the engine made no progress for {limit}: {stalled}; restart the server"
        logger.error(reason)
        self._engine.fail(reason)
