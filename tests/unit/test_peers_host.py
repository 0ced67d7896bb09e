"""What a comparison tells of the host's processors."""

import os
from pathlib import Path

import pytest

from bench.peers.host import HostClock


def counters(path: Path, *ticks: int) -> Path:
    path.write_text(f"cpu  {' '.join(map(str, ticks))} 0 0\ncpu0 1 2 3\n", encoding="ascii")
    return path


def test_shares_of_the_time_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    #                                        user nice system idle iowait irq softirq steal
    clock = HostClock(counters(tmp_path / "s", 100, 0, 50, 1000, 10, 0, 0, 5))
    counters(tmp_path / "s", 130, 2, 60, 1130, 16, 1, 1, 25)
    use = clock.use()
    assert use is not None
    # 200 ticks: 44 busy (30 + 2 + 10 + 1 + 1), 136 idle, 20 stolen.
    assert (use.num_cpus, use.busy_cpus, use.stolen_cpus) == (8, 8 * 44 / 200, 8 * 20 / 200)


def test_nothing_is_made_up(tmp_path: Path) -> None:
    assert HostClock(tmp_path / "missing").use() is None
    clock = HostClock(counters(tmp_path / "s", 1, 2, 3, 4, 5, 6, 7, 8))
    assert clock.use() is None
    (tmp_path / "odd").write_text("intr 5\n", encoding="ascii")
    assert HostClock(tmp_path / "odd").use() is None


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux alone tells")
def test_this_host() -> None:
    clock = HostClock()
    while (use := clock.use()) is None:
        pass
    assert 0 <= use.busy_cpus <= use.num_cpus
