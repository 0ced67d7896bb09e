"""What rank 0 makes of a failure, without other processes."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, call

import pytest

from bullet_graph.errors import ConfigError, LateError, RankError
from bullet_graph.runtime import ranks as ranks_module
from bullet_graph.runtime.executor import clear_frames
from bullet_graph.runtime.memory import DeviceMemory, MemoryLedger
from bullet_graph.runtime.ranks import RankedExecutor, Ranks, as_failure
from bullet_graph.runtime.tensor_parallel import agreed


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(1)
    ranks._watcher.join()  # there is nobody to watch
    ranks.num_ranks = 2
    yield ranks
    ranks.stop()


def test_no_token_of_a_launch_that_a_failure_has_ended(ranks: Ranks) -> None:
    def ended(*_: Any) -> int:
        # The abort lets the launch end, with wrong sums, while it is waited for.
        ranks.fail(RankError("rank 1 ended"))
        return 7

    with pytest.raises(RankError, match="rank 1 ended"):
        RankedExecutor(Mock(now=lambda: 0.0, wait_any=ended), ranks).wait(7)
    # What the planner asks an executor is the same on all ranks.
    assert RankedExecutor(Mock(lone_rows=2), ranks).lone_rows == 2


def test_an_error_of_this_rank_ends_the_others(ranks: Ranks) -> None:
    other = Mock()
    ranks.communicators = {"decode": other}
    with pytest.raises(ValueError, match="its own error"):
        ranks.explain(ValueError("its own error"))
    other.abort.assert_called_once()


def test_a_failure_that_is_met_again_does_not_become_its_own_cause(ranks: Ranks) -> None:
    """Shutdowns follow the causes to free what their frames hold: a ring would keep them there for ever."""

    def break_off(_: bytes) -> None:
        ranks.failure = RankError("rank 1 ended")
        raise BrokenPipeError

    ranks._connections = [Mock(send_bytes=break_off)]
    with pytest.raises(RankError, match="rank 1 ended") as met:
        RankedExecutor(Mock(num_missing_graphs=1), ranks).prepare_next()
    assert isinstance(met.value.__cause__, BrokenPipeError)
    clear_frames(met.value)
    # The other way to a ring: the failure was already known to what is raised because of it.
    met.value.__cause__.__context__ = met.value
    clear_frames(met.value)


def test_a_rank_that_is_slow_to_end_is_told_all_the_same(ranks: Ranks) -> None:
    ranks._processes = [Mock(poll=lambda: None)]
    assert "ended with no exit code yet" in str(ranks._verdict({}, [(0.0, 1, None)]))


def test_a_failure_is_told_though_the_driver_holds_an_abort_back(ranks: Ranks) -> None:
    entered, held = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        held.wait(5)

    ranks.communicators = {"decode": Mock(abort=hold)}
    failing = threading.Thread(target=ranks.fail, args=(RankError("rank 1 ended"),), daemon=True)
    failing.start()
    assert entered.wait(10)
    with pytest.raises(RankError, match="rank 1 ended"):
        ranks.gather("built")
    held.set()
    failing.join()


def test_ranks_that_do_not_come_in_a_start(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("START_TIMEOUT_S", "_RENDEZVOUS_TIMEOUT_S"):
        monkeypatch.setattr(ranks_module, limit, 0.1)
    with pytest.raises(RankError, match=r"rank 1 hangs, .* 'built' did not come within 0\.1 s"):
        ranks.gather("built")
    ranks.failure, ranks._arrived = None, {"ready": {1: ("ready",)}}
    with pytest.raises(RankError, match=r"the ranks did not connect .they have 0\.1 s.: "):
        ranks.connect(Mock(type="cpu", index=None))


def test_sums_in_peer_memory_are_ended_before_nccl_s(ranks: Ranks) -> None:
    ended = Mock()
    ranks.communicators = {"decode": ended.decode, "prefill": ended.prefill}
    ranks.fail(RankError("rank 1 ended"))
    assert ended.mock_calls == [call.decode.abort(), call.prefill.abort()]


def test_what_a_failed_device_holds_is_never_freed(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Mock()
    monkeypatch.setattr(ranks_module, "keep_for_ever", kept)
    stuck, ended = Mock(close=Mock(side_effect=TimeoutError)), Mock()
    ranks.communicators = {"decode": stuck, "prefill": ended}
    ranks.close()
    assert kept.mock_calls == [call(stuck)]
    ended.close.assert_called_once()


@pytest.mark.parametrize(("own", "others", "least"), [(5, (9, 7), 5), (9, (7, 8), 7)])
def test_the_rank_with_the_least_room_decides_rank_0_included(own: int, others: tuple[int, ...], least: int) -> None:
    ranks = Mock(gather=lambda name: [(name, blocks) for blocks in others])
    ledger = MemoryLedger(DeviceMemory(1000, 1000), 1000, 0, 0, 0, 0, 10 * own, own)
    assert agreed(ranks, ledger) == replace(ledger, num_kv_blocks=least, kv_cache_bytes=10 * least)
    ranks.send.assert_called_once_with("blocks", least)


def test_a_ranks_error_keeps_its_kind_where_that_takes_a_text_alone() -> None:
    found = [as_failure(1, kind, "no") for kind in (ConfigError, LateError, ValueError)]
    assert [type(error) for error in found] == [ConfigError, RankError, RankError]
