"""``bullet-graph bench``: measurements of the engine."""
