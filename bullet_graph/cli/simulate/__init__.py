"""``bullet-graph simulate``: the engine in virtual time."""
