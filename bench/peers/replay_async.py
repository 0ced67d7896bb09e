"""The replay for asyncio, under the name that it had here before it moved into the package."""

from bullet_graph.engine.replay_async import AsyncReplay, StreamingSystem, replay

__all__ = ["AsyncReplay", "StreamingSystem", "replay"]
