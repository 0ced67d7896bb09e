"""The OpenAI-compatible server above :class:`~bullet_graph.engine.async_engine.AsyncEngine` (extra ``serve``)."""
