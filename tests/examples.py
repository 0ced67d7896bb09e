"""How many examples a property that needs a whole simulation is tried with: few of them here, all of them in turn."""

from hypothesis import settings


def few(count: int) -> settings:
    """So many, and ten times as many in ``make test-thorough``."""
    return settings(max_examples=count * settings().max_examples // 100)
