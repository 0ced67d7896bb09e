"""What a comparison tells of the host's processors."""

from pathlib import Path

import psutil
import pytest

from bench.peers.host import HostClock

linux_alone = pytest.mark.skipif(not psutil.LINUX, reason="of the kernel's counters, which tests can fake")


@pytest.fixture
def stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's counters."""
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    return tmp_path / "stat"


def count(stat: Path, *seconds: int) -> None:
    ticks = " ".join(str(100 * value) for value in seconds)
    stat.write_text(f"cpu  {ticks} 0 0\ncpu0 1 2 3\n", encoding="ascii")


@linux_alone
def test_shares_of_the_time_between(stat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 8)
    #           user nice system idle iowait irq softirq steal
    count(stat, 100, 0, 50, 1000, 10, 0, 0, 5)
    clock = HostClock()
    count(stat, 130, 2, 60, 1130, 16, 1, 1, 25)
    use = clock.use()
    assert use is not None
    # 200 s: 44 busy (30 + 2 + 10 + 1 + 1), 136 idle, 20 stolen.
    assert (use.num_cpus, use.busy_cpus, use.stolen_cpus) == (8, 8 * 44 / 200, 8 * 20 / 200)


@linux_alone
def test_nothing_is_made_up(stat: Path) -> None:
    assert HostClock().use() is None
    count(stat, 1, 2, 3, 4, 5, 6, 7, 8)
    assert HostClock().use() is None
    stat.write_text("intr 5\n", encoding="ascii")
    assert HostClock().use() is None


def test_this_host() -> None:
    clock = HostClock()
    while (use := clock.use()) is None:
        pass
    assert 0 <= use.busy_cpus <= use.num_cpus
