"""A short form of ``python -m bench.fuzz``, whose long form is in the report."""

import pytest

from bench.fuzz import fuzz


@pytest.mark.timeout(120)
def test_nothing_gives_way_within_seconds() -> None:
    """Other tests run beside it, so a stall may be longer here than in the long form."""
    result = fuzz(seconds=1, seed=0, max_stall_ms=3000, max_growth_mib=256)
    assert result["problems"] == []
    assert result["answers"]["good 200"] > 0
    assert result["answers"]["body 400"] > 0
    assert sum(result["files"].values()) >= 4
