"""Graphs that were not captured at the start follow while there is time: the rule, and the loop that follows it."""

import math
from dataclasses import dataclass, field

import pytest
from core_loop import MODEL, Arrival, CheckedExecutor, CoreLoop, arrivals
from examples import few
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph.graphs import capture_plan
from bullet_graph.partition.masks import WHOLE_GPU, SmPartition
from bullet_graph.planner.plan import ChunkLoad, DecodeLoad, Load, PromptLoad
from bullet_graph.planner.slack import PREPARE_MS, PREPARE_SHARE, spare_ms
from bullet_graph.slo import NO_TARGETS, Slo

SIZES = (1, 2, 4, 8, 16)
PLAN = capture_plan.CapturePlan(
    model="llama-3.1-8b",
    dtype="bfloat16",
    num_sms=MODEL.num_sms,
    max_num_seqs=16,
    decode=(capture_plan.DecodeSizes(None, SIZES), *(capture_plan.DecodeSizes(sms, SIZES) for sms in MODEL.decode_sms)),
    piecewise_rows=(16,),
)


@dataclass(frozen=True)
class Capture:
    """A capture: what, when, and whether the device had work."""

    key: capture_plan.CaptureKey
    start_s: float
    end_s: float
    busy: bool


@dataclass
class PreparingExecutor(CheckedExecutor):
    """Has the hot graphs of a plan; each of the others takes ``capture_ms`` of virtual time to capture."""

    capture_ms: float = PREPARE_MS
    captures: list[Capture] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.progress = capture_plan.CaptureProgress(PLAN, 2)
        for key in capture_plan.hot_keys(PLAN):
            self.progress.note(key)
        super().__post_init__()

    def max_batch_size(self, partition: SmPartition) -> int:
        # Also what the simulated executor holds against each launch.
        return self.progress.max_batch_size(partition)

    @property
    def num_missing_graphs(self) -> int:
        return len(self.progress.missing)

    def prepare_next(self) -> bool:
        key = self.progress.next
        if key is None:
            return False
        start_s = self.now()
        self.sleep_until(start_s + self.capture_ms / 1e3)
        self.captures.append(Capture(key, start_s, self.now(), any(self.in_flight.values())))
        self.progress.note(key)
        return True


def make_loop(policy: str, **settings: float) -> tuple[CoreLoop, PreparingExecutor]:
    executor = PreparingExecutor(**settings)  # type: ignore[arg-type]
    return CoreLoop(policy, executor=executor), executor


# ---- the rule ----


def load(
    *prompts: PromptLoad, slack_ms: float | None = None, chunk: ChunkLoad | None = None, now_s: float = 5.0
) -> Load:
    return Load(now_s, None if slack_ms is None else DecodeLoad(4, 400, 10.0, slack_ms, 10.0), prompts, 0, chunk)


def due_in(ms: float, tokens: int = 0) -> PromptLoad:
    return PromptLoad(tokens, 0, 5.0 + ms / 1e3)


CHUNK = ChunkLoad(tokens=400, attention_pairs=0.0, layers_left=5, deadline_s=5.03)


@pytest.mark.parametrize(
    ("found", "awaited_s", "spare"),
    [
        # Without targets there is all the time.
        (load(), [], math.inf),
        (load(PromptLoad(100, 0, math.inf), slack_ms=math.inf), [], math.inf),
        # Decoding waits as long as its slack, prompts as long as each of them is still on time.
        (load(slack_ms=12.0), [], 12),
        (load(slack_ms=-3.0), [], 0),
        (load(due_in(50, tokens=300)), [], 20),
        (load(due_in(50, tokens=100), due_in(60, tokens=300)), [(0.0, 9.0)], 20),
        (load(due_in(50, tokens=300), slack_ms=8.0), [], 8),
        # A prompt that is late whatever is done does not limit it.
        (load(due_in(20, tokens=300), due_in(100, tokens=300)), [], 40),
        (load(due_in(-1)), [], math.inf),
        # A chunk under way and prompts in flight count.
        (load(chunk=CHUNK), [], 10),
        (load(due_in(60, tokens=300), chunk=CHUNK), [], 10),
        (load(), [(5.010, 5.017)], 7),
        (load(), [(5.010, 5.009)], math.inf),
    ],
)
def test_time_to_spare_for_a_capture(found: Load, awaited_s: list[tuple[float, float]], spare: float) -> None:
    assert spare_ms(found, awaited_s, ms_per_token=0.1, layers=10) == pytest.approx(spare)


# ---- the loop ----

TARGETS = (NO_TARGETS, Slo(ttft_ms=500, tpot_ms=15), Slo(tpot_ms=9), Slo(ttft_ms=30))


@few(15)
@given(requests=arrivals(TARGETS, max_output=60), policy=st.sampled_from(["serial", "mixed", "split", "auto"]))
def test_nothing_is_lost_and_no_step_lacks_its_graph(requests: list[Arrival], policy: str) -> None:
    """The simulated device refuses a batch where none is captured that holds it."""
    loop, executor = make_loop(policy)
    loop.run(arrivals=requests)
    order = capture_plan.capture_order(PLAN, 2)[len(capture_plan.hot_keys(PLAN)) :]
    assert [capture.key for capture in executor.captures] == order[: len(executor.captures)]
    assert loop.core.stats().num_missing_graphs == len(order) - len(executor.captures)


def test_partitions_are_used_once_they_are_captured() -> None:
    loop, executor = make_loop("split")
    loop.run(arrivals=[(0.0, 800, 60, NO_TARGETS)] * 12)
    assert executor.num_missing_graphs > 0
    assert {launch.placement.partition for launch in executor.launches} == {WHOLE_GPU}
    while loop.core.prepare_next():
        pass
    loop.run(arrivals=[(0.0, 800, 60, NO_TARGETS)] * 12)
    assert len({launch.placement.partition for launch in executor.launches}) > 1


def test_captures_of_a_busy_engine_take_their_share_and_all_come_about() -> None:
    loop, executor = make_loop("mixed")
    loop.run(arrivals=[(0.0, 30, 900, NO_TARGETS)] * 16)
    captures = executor.captures
    assert executor.num_missing_graphs == 0
    assert all(capture.busy for capture in captures), "the device works on what was launched before"
    span_s = captures[-1].end_s - captures[0].start_s
    assert 0.9 <= sum(c.end_s - c.start_s for c in captures[:-1]) / (PREPARE_SHARE * span_s) <= 1.01


TPOT_MS = 1.3 * MODEL.decode(8, 8 * 300).ms


def decode_tpots_ms(loop: CoreLoop) -> list[float]:
    loop.run(arrivals=[(0.0, 30, 400, Slo(tpot_ms=TPOT_MS))] * 8)
    return [output.metrics.tpot_ms or 0.0 for output in loop.outputs.values()]


def test_no_target_is_missed_for_a_capture() -> None:
    loop, executor = make_loop("mixed")
    assert max(decode_tpots_ms(loop)) <= TPOT_MS
    assert executor.captures, "there was time for some, once the sequences were ahead"
    # The same captures whenever they may begin would be too many.
    hasty = make_loop("mixed")[0]
    hasty_step = hasty.core._prepare_between
    hasty.core._prepare_between = lambda: (hasty_step(), hasty.core.prepare_next())  # type: ignore[method-assign]
    assert max(decode_tpots_ms(hasty)) > TPOT_MS


DUE_MS = MODEL.prefill(900, 900 * 900 / 2).ms + 0.9 * PREPARE_MS


@pytest.mark.parametrize(
    ("count", "prompt", "output", "slo"),
    [(8, 30, 100, Slo(tpot_ms=1.02 * MODEL.decode(8, 8 * 300).ms)), (1, 900, 1, Slo(ttft_ms=DUE_MS))],
)
def test_nothing_is_captured_while_targets_leave_no_time(count: int, prompt: int, output: int, slo: Slo) -> None:
    loop, executor = make_loop("mixed")
    loop.run(arrivals=[(0.0, prompt, output, slo)] * count)
    assert not executor.captures
    assert not any(output.missed_targets for output in loop.outputs.values())
