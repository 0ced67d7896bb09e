"""The bench of ``bullet-graph profile`` on the CPU, as far as it goes there: its largest forwards, and its ranks."""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is published for Linux only")

from decoders import new_decoder
from fakes.flashinfer_prefill import install

from bullet_graph.config import KV_BLOCK_TOKENS as BLOCK_TOKENS
from bullet_graph.config import EngineConfig
from bullet_graph.errors import PartitionError
from bullet_graph.models.presets import PRESETS
from bullet_graph.perf.profile_plan import ProfileLimits, ProfilePoint
from bullet_graph.runtime import bursts, profile
from bullet_graph.runtime.build import plan_ledger
from bullet_graph.runtime.bursts import FedLane, Workbench, run_burst
from bullet_graph.runtime.resolve import resolve
from bullet_graph.runtime.rows import lay_out
from bullet_graph.runtime.tensor_parallel import of_rank

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs Triton's interpreter")

CPU = torch.device("cpu")
NUM_BLOCKS, MAX_BATCH_SIZE = 16, 4
SLOW = "slow rank"


class FakeEvent:
    """Is done 2 ms after it is recorded; a millisecond lies between two, and three on the slow rank."""

    def __init__(self, **_: bool) -> None:
        pass

    def record(self) -> None:
        self.done_s = time.perf_counter() + 0.002

    def query(self) -> bool:
        return time.perf_counter() > self.done_s

    def elapsed_time(self, _: "FakeEvent") -> float:
        return 31.0 if threading.current_thread().name == SLOW else 10.0


@pytest.fixture(autouse=True)
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fake in (("Event", FakeEvent), ("stream", nullcontext), ("synchronize", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, fake)


def new_bench(monkeypatch: pytest.MonkeyPatch, num_layers: int) -> Workbench:
    install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(bursts, "lane_stream", lambda *_: None)
    backend: Any = None
    return Workbench(
        new_decoder(replace(PRESETS["tiny"], num_layers=num_layers), num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS),
        backend,
        limits=ProfileLimits(MAX_BATCH_SIZE, 8, 64, NUM_BLOCKS * BLOCK_TOKENS),
        seed=0,
    )


@torch.inference_mode()
def test_a_prompt_beside_the_most_rows_that_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = new_bench(monkeypatch, num_layers=1)
    point = ProfilePoint("mixed", batch_size=MAX_BATCH_SIZE, context_tokens=20, tokens=8, cached_tokens=20)
    logits, _ = bench._eager.run(lay_out(bench._chunk(point), bench._decode_rows(point), BLOCK_TOKENS))
    # All of them are sampled, and one more.
    assert logits.shape == (MAX_BATCH_SIZE + 1, PRESETS["tiny"].vocab_size)
    assert logits.isfinite().all()


@torch.inference_mode()
def test_prompts_beside_decode_are_launched_in_slices_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bursts, "_SLICE_LAYERS", 1)
    bench = new_bench(monkeypatch, num_layers=3)
    bench.num_sms = 132
    point = ProfilePoint("split", sms=32, batch_size=1, context_tokens=8, tokens=8)
    whole, _ = bench._eager.run(lay_out(bench._chunk(point), None, BLOCK_TOKENS), whole_gpu=False)
    eager, ends = bench._eager, []
    layers, finish = Mock(wraps=eager.run_layers), eager.finish
    monkeypatch.setattr(eager, "run_layers", layers)
    monkeypatch.setattr(eager, "finish", lambda forward: ends.append(finish(forward)[0].equal(whole)))
    lane = bench.lanes(point)[1]
    for _ in range(6):
        lane.launch()
    assert [call.args[1:] for call in layers.call_args_list] == [(0, 1), (1, 2), (2, None)] * 2
    assert all(call.kwargs == {"whole_gpu": False} for call in layers.call_args_list)
    assert ends == [True, True]


def test_a_time_is_of_whole_forwards() -> None:
    stream: Any = None
    lane = FedLane(stream, lambda: None, num_launches=4)
    ((first, last),) = run_burst([lane], 0.02)
    assert (last - first) % 4 == 0
    assert last - first >= 12
    # The events are 10 ms apart, whatever their number.
    assert lane.interval_ms((first, last)) == pytest.approx(10 / ((last - first) / 4))


class BareBench(Workbench):
    """Launches nothing, but notes it."""

    def __init__(self, ranks: Any = None) -> None:
        self._ranks = ranks
        self.launched: list[int] = []

    def lanes(self, point: ProfilePoint, announce: Callable[[int], object] = lambda _: None) -> list[FedLane]:
        def lane(index: int) -> FedLane:
            return FedLane(None, lambda: self.launched.append(index), lambda: announce(index))  # type: ignore[arg-type]

        return [lane(index) for index in range(2 if point.kind == "split" else 1)]


class OtherRank:
    """Stands in for the ranks: one, a thread."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.bench = BareBench()
        arguments = (self.messages.get, self.replies.put)
        self.thread = threading.Thread(target=self.bench.follow, args=arguments, name=SLOW)
        self.thread.start()
        self.watched, self.check = nullcontext, lambda: None

    def send(self, *message: Any) -> None:
        self.messages.put(message)

    def gather(self, name: str) -> list[Any]:
        reply = self.replies.get(timeout=10)
        assert reply[0] == name
        return [reply]


@pytest.mark.parametrize("kind", ["decode", "split"])
def test_the_other_ranks_replay_every_launch_and_the_slowest_counts(kind: Any) -> None:
    point = ProfilePoint(kind, batch_size=1)
    alone = BareBench().measure(point, 0.01)
    other = OtherRank()
    bench = BareBench(other)
    times = bench.measure(point, 0.01)
    other.send("stop")
    other.thread.join()
    assert len(times) == len(alone) == (2 if kind == "split" else 1)
    assert other.bench.launched == bench.launched
    assert len(bench.launched) > 5 * len(times)
    # As many steps are timed on both ranks; the time is the slow one's.
    for index, ms in enumerate(times):
        steps = 31 / ms
        assert steps == pytest.approx(round(steps))
        assert 3 <= steps < bench.launched.count(index)


def test_ranks_that_profile_agree_and_fail_together() -> None:
    config = EngineConfig(
        model="tiny", device="cpu", tensor_parallel_size=2, kv_cache_bytes=2**20, max_model_len=64, cpu_threads=1
    )
    runtime = of_rank(config, resolve(config), 0)
    ledger = plan_ledger(replace(config, kv_cache_bytes=2**21), runtime)
    room = plan_ledger(config, runtime).num_kv_blocks
    assert room < ledger.num_kv_blocks

    def run() -> None:
        with profile._on_ranks(profile.Prepared(config, runtime, ledger)) as (prepared, ranks):
            assert prepared.ledger.num_kv_blocks == room
            assert ranks is not None
            ranks.gather("times")

    # On the CPU, the other rank has no partitions.
    with pytest.raises(PartitionError, match="rank 1: "):
        run()
