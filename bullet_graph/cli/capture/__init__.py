"""``bullet-graph capture``: caches of precomputed captures."""
