"""Short forms of ``python -m bench.fuzz`` and ``bench.soak``, whose long forms are in the log."""

import pytest

from bench.fuzz import fuzz
from bench.soak import judge, soak


@pytest.mark.timeout(120)
def test_nothing_gives_way_within_seconds() -> None:
    """Other tests run beside it, so a stall may be longer here than in the long form."""
    result = fuzz(seconds=1, seed=0, max_stall_ms=3000, max_growth_mib=256)
    assert result["problems"] == []
    assert min(result["answers"][kind] for kind in ("good 200", "body 400")) > 0
    assert sum(result["files"].values()) >= 4


@pytest.mark.timeout(60)
def test_a_short_soak_leaves_nothing_behind() -> None:
    options = ["--model", "tiny", "--device=cpu", "--kv-cache-bytes", "8MiB", "--max-model-len", "1024"]
    seen = soak([*options, "--no-warmup"], minutes=0.08, users=4, longest=800)
    assert judge(seen, max_growth_mib=256, max_slowdown_percent=100)["problems"] == []
    assert all(seen["ends"][end] > 0 for end in ("streamed", "whole", "left"))
    assert seen["samples"][-1]["prefix_cache_hits"] > 0


def test_what_a_soak_complains_of() -> None:
    memory = [{"rss_bytes": (1 + n // 30) << 20, "device_bytes": (n // 30) << 21} for n in range(36)]
    samples = [one | {"generation_tokens": 100 * n - n * n, "second": n} for n, one in enumerate(memory)]
    after = {"running": 0, "waiting": 1, "kv_cache_usage": 0.0}
    seen = {"samples": samples, "ends": {"whole": 3, "status 500": 2}, "after": after}
    problems = judge(seen, max_growth_mib=0.5, max_slowdown_percent=50.0)["problems"]
    assert problems[:2] == ["2 × status 500", "afterwards waiting is 1"]
    assert problems[2:] == [
        "resident memory grew by 1.0 MiB of 0.5 allowed",
        "the GPU's memory grew by 2.0 MiB of 0.5 allowed",
        "57.8 % fewer tokens/s; at most 50 % are allowed",
    ]
    assert judge(seen, max_growth_mib=2.0, max_slowdown_percent=60.0)["problems"] == problems[:2]
