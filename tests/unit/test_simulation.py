"""The engine's own loop, scheduler and planner in virtual time."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fakes.perf_tables import LLAMA_8B
from hypothesis import given
from hypothesis import strategies as st
from planner_loads import decoding, load_of
from simulated_engines import changed

from bullet_graph.cli.simulate import Simulator
from bullet_graph.config import EngineConfig, Policy, PromptOrder
from bullet_graph.engine.simulation import SimulatedEngine, Simulation, SimulationSettings, simulate
from bullet_graph.errors import ConfigError, PartitionError
from bullet_graph.hardware import H200
from bullet_graph.partition.masks import WHOLE_GPU, Lane, SmPartition
from bullet_graph.perf.performance import Prediction, SplitPrediction, attention_pairs
from bullet_graph.perf.predict import TableModel
from bullet_graph.perf.roofline import Roofline
from bullet_graph.perf.table import load_table
from bullet_graph.planner.tuning import TUNING
from bullet_graph.runtime.executor import Executor
from bullet_graph.runtime.rows import Chunk, make_batches
from bullet_graph.runtime.simulated import SimulatedExecutor
from bullet_graph.runtime.step import DecodeBatch, Placement, Step
from bullet_graph.slo import NO_TARGETS, Slo
from bullet_graph.workloads import Arrivals, Workload, WorkloadRequest, load_workload

MODEL = Roofline(H200, LLAMA_8B)
CONFIG = EngineConfig(model="tiny", policy=Policy("auto"), max_num_seqs=64)
SETTINGS = SimulationSettings(config=CONFIG, kv_cache_tokens=100_000, max_model_len=8192, host_overhead_ms=0.0)
TIGHT = Slo(ttft_ms=500, tpot_ms=15)


def workload(*lengths: tuple[int, int]) -> Workload:
    return Workload("test", tuple(WorkloadRequest(prompt, output, None) for prompt, output in lengths))


def run(
    lengths: list[tuple[int, int]], arrivals_s: list[float], *, slo: Slo = NO_TARGETS, **changes: Any
) -> Simulation:
    return simulate(MODEL, workload(*lengths), np.array(arrivals_s), changed(SETTINGS, **changes), slo=slo)


def output_lens(simulation: Simulation) -> list[int]:
    return [row.output_tokens for row in simulation.replay.served]


@pytest.mark.parametrize("policy", ["serial", "mixed", "auto"])
def test_a_request_alone_takes_the_predicted_times(policy: str) -> None:
    simulation = run([(1000, 3)], [2.0], policy=Policy.parse(policy))
    (output,) = simulation.replay.served
    prefill_ms = MODEL.prefill(1000, attention_pairs(1000)).ms
    first_ms, second_ms = MODEL.decode(1, 1001).ms, MODEL.decode(1, 1002).ms
    assert output.metrics.arrival_s == 2.0
    assert output.metrics.ttft_ms == pytest.approx(prefill_ms)
    assert output.metrics.itl_ms == pytest.approx((first_ms, second_ms))
    assert simulation.replay.duration_s == pytest.approx(2 + (prefill_ms + first_ms + second_ms) / 1e3)
    assert simulation.stats.num_steps == 3


def test_the_hosts_time_is_told_apart_from_the_devices() -> None:
    free, costly = (run([(1000, 50)], [0.0], host_overhead_ms=ms).replay for ms in (0.0, 1.0))
    ttft_ms, free_ttft_ms = (r.served[0].metrics.ttft_ms or 0.0 for r in (costly, free))
    # A launch before the prefill; later ones hide behind the device's work.
    assert ttft_ms == pytest.approx(free_ttft_ms + 1)
    assert costly.duration_s == pytest.approx(free.duration_s + 0.001)


def test_a_last_token_does_not_wait_until_the_host_has_launched_a_long_prompt() -> None:
    first, _ = run([(1000, 20), (8000, 1)], [0.0, 0.1], slo=TIGHT, host_overhead_ms=0.2).replay.served
    assert first.metrics.itl_ms[-1] < 15 < MODEL.num_layers * 0.5


def test_prompts_wait_until_decode_has_room_for_them() -> None:
    # Some 40 sequences hold this target, and 60 do not: 9 of them, if all run at once.
    tpot_ms = MODEL.decode(16, 16 * 1000).ms / TUNING.room_share
    assert MODEL.decode(60, 60 * 600).ms > 1.05 * tpot_ms
    arrivals_s = [0.05 * index for index in range(60)]
    slo = Slo(ttft_ms=500, tpot_ms=tpot_ms)
    served = run([(16, 1200)] * 60, arrivals_s, slo=slo, kv_cache_tokens=300_000).replay.served
    assert sum((row.metrics.tpot_ms or 0.0) <= tpot_ms for row in served) > 45


def test_without_targets_auto_is_as_quick_as_any_policy() -> None:
    model = TableModel(load_table("h200", model="llama-3.1-8b"), LLAMA_8B)
    load = load_workload("azure:conv", num_requests=150)

    def duration_s(policy: str) -> float:
        settings = changed(SETTINGS, policy=Policy.parse(policy), kv_cache_tokens=600_000, max_num_seqs=256)
        return simulate(model, load, np.zeros(150), settings).replay.duration_s

    assert duration_s("auto") <= 1.005 * min(map(duration_s, ("serial", "mixed:2048", "mixed:8192")))


@pytest.mark.parametrize("policy", ["mixed:2048", "auto"])
def test_the_longest_output_first_ends_sooner(policy: str) -> None:
    lengths = [(2000, 20)] * 100 + [(2000, 400)]

    def outcome(order: PromptOrder) -> Simulation:
        return run(
            lengths, [0.0] * len(lengths), policy=Policy.parse(policy), kv_cache_tokens=300_000, prompt_order=order
        )

    arrival, longest = outcome("arrival"), outcome("longest-output")
    # The rest of it, alone at the end, takes a second and more of some six.
    assert longest.replay.duration_s < 0.95 * arrival.replay.duration_s
    assert output_lens(longest) == output_lens(arrival)


def test_deadlines_count_from_arrival() -> None:
    conv = load_workload("azure:conv", num_requests=20)
    slo = Slo(ttft_ms=200, tpot_ms=8)
    soon, late = (simulate(MODEL, conv, np.full(20, at_s), SETTINGS, slo=slo).replay for at_s in (0.0, 1000.0))
    assert [o.metrics.ttft_ms for o in late.served] == pytest.approx([o.metrics.ttft_ms for o in soon.served])


def test_concurrency_is_limited_and_progress_is_told() -> None:
    seen: list[str | None] = []
    requests = workload(*[(100, 50)] * 4)
    single = simulate(
        MODEL, requests, np.zeros(4), SETTINGS, max_concurrency=1, on_done=lambda row: seen.append(row.error)
    )
    ends = [output.metrics.token_times_s[-1] for output in single.replay.served]
    assert [output.metrics.arrival_s for output in single.replay.served] == [0.0, *ends[:-1]]
    assert seen == [None] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_tokens": 8191}, "max_model_len=8192"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"host_overhead_ms": math.nan}, "host_overhead_ms"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(SETTINGS, **changes)


def test_sizes_that_the_model_does_not_know_are_refused() -> None:
    with pytest.raises(ConfigError, match="50 SMs is not in the performance table"):
        SimulatedEngine(MODEL, changed(SETTINGS, decode_sms=(32, 50)))
    with pytest.raises(ConfigError, match="split:48"):
        SimulatedEngine(MODEL, changed(SETTINGS, policy=Policy.parse("split:48"), decode_sms=(32,)))


# ---- the simulated executor against schedules worked by hand ----


NUM_LAYERS = 4
NARROW, WIDE = SmPartition(16, 34), SmPartition(32, 18)
"""Of 100 SMs, 32 or 64 to decode."""


class FakeModel:
    """100 SMs; prefill takes 1 ms a token and decode 10 ms a row on all of them, both in proportion on fewer."""

    num_sms = 100
    num_layers = NUM_LAYERS
    decode_sms: Sequence[int] = (32, 64)

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def decode(self, batch_size: int, kv_tokens: int, sms: int | None = None) -> Prediction:
        self.asked.append(("decode", batch_size, kv_tokens, sms))
        return Prediction(batch_size * 10 * 100 / (sms or 100), True)

    def prefill(self, tokens: int, pairs: float, sms: int | None = None) -> Prediction:
        self.asked.append(("prefill", tokens, pairs, sms))
        return Prediction(tokens * 100 / (sms or 100), True)

    def mixed(self, tokens: int, pairs: float, batch_size: int, kv_tokens: int) -> Prediction:
        self.asked.append(("mixed", tokens, pairs, batch_size, kv_tokens))
        return Prediction(tokens + batch_size, True)

    def split(self, decode_sms: int, batch_size: int, kv_tokens: int, tokens: int, pairs: float) -> SplitPrediction:
        self.asked.append(("split", decode_sms, batch_size, kv_tokens, tokens, pairs))
        # Each half as fast again as alone on the same SMs.
        return SplitPrediction(batch_size * 15 * 100 / decode_sms, tokens * 150 / (100 - decode_sms), True)

    def wave_chunk_tokens(self, max_tokens: int, sms: int | None = None) -> int:  # noqa: ARG002 - the protocol's
        return max_tokens


def make_step(chunks: Sequence[Chunk] = (), decode: Sequence[int] = (), num_logprobs: int | None = None) -> Step:
    return Step((), *make_batches(chunks, decode, blocks=np.arange(1, 1000)), num_logprobs)


def decode_step(*positions: int) -> Step:
    return make_step(decode=positions)


def prefill_step(*lengths: int, samples: bool = True) -> Step:
    return make_step([(0, length, samples) for length in lengths])


def executor(*, host_overhead_ms: float = 0.0) -> SimulatedExecutor:
    return SimulatedExecutor(FakeModel(), partitions=(NARROW, WIDE), host_overhead_ms=host_overhead_ms)


def on(
    lane: Lane, partition: SmPartition = WHOLE_GPU, *, layers: tuple[int, int] | None = None, turns: bool = False
) -> Placement:
    first, last = layers or (0, NUM_LAYERS)
    return Placement(lane, partition, first, None if last == NUM_LAYERS else last, turns)


def is_done(device: Executor, ticket: int) -> bool:
    return device.wait_any([ticket], device.now()) is not None


def finish_ms(device: Executor, ticket: int) -> float:
    device.wait(ticket)
    return device.now() * 1e3


def test_the_model_is_asked_with_what_the_step_holds() -> None:
    model = FakeModel()
    device = SimulatedExecutor(model, partitions=(NARROW,))
    device.launch(decode_step(5, 9), on("decode", NARROW))
    # Chunks of 3 tokens from position 0 and of 2 from position 10: 1 + 2 + 3 and 11 + 12 pairs.
    device.launch(make_step([(0, 3, True), (10, 2, True)]), on("prefill", NARROW))
    device.launch(make_step([(0, 3, True)], [7]), on("decode"))
    device.sleep_until(1)
    assert model.asked[:3] == [("decode", 2, 16, 32), ("prefill", 5, 29.0, 68), ("mixed", 3, 6.0, 1, 8)]
    assert ("split", 32, 2, 16, 5, 29.0) in model.asked[3:]


def test_common_blocks_take_less_time() -> None:
    """40 rows begin alike: the L2 cache saves 0.44 of 39 x 200 reads, groups of four rows 0.61 of 30 x 200."""
    model, slots = FakeModel(), np.arange(40, dtype=np.int32)
    device = SimulatedExecutor(model, partitions=(NARROW,), block_bytes=2**16)
    blocks = np.concatenate([[*range(200), 300 + slot] for slot in slots])
    decode = DecodeBatch(slots, np.full(40, 201 * 16 - 1), 0 * slots, 201 * np.arange(41), blocks)
    for partition in (WHOLE_GPU, NARROW):
        device.launch(Step((), None, decode, None), on("decode", partition))
    saved = [40 * 201 - tokens / 16 for _, _, tokens, _ in model.asked]
    assert saved == pytest.approx([0.44 * 39 * 200 + 0.61 * 30 * 200 - 88 * 16, 0.44 * 39 * 200], abs=1)


@pytest.mark.parametrize(
    ("model", "more", "expected"),
    [
        *(("llama-3.1-8b", {}, (2**16, 2)), ("llama-3.1-8b", {"kv_cache_dtype": "fp8"}, (None, 2))),
        *(("qwen3-30b-a3b", {}, (2**15, 1)), ("qwen3-30b-a3b", {"kv_cache_dtype": "fp8"}, (None, 1))),
        ("llama-3.1-8b", {"capture_plan": "llama-3.1-8b_bfloat16_conv"}, (2**16, 1)),  # without a graph of two rows
    ],
)
def test_what_holds_for_formats_experts_and_graphs(model: str, more: dict[str, Any], expected: tuple[Any, int]) -> None:
    config = EngineConfig(model=model, **more)
    simulator = Simulator(
        gpu="roofline:h200", config=config, trace="synthetic:conv", num_prompts=1, arrivals=Arrivals(request_rate=1.0)
    )
    settings = simulator.settings(Policy("auto"))
    assert (settings.block_bytes, settings.lone_rows) == expected


@pytest.mark.parametrize("lone_rows", [1, 2])
def test_a_simulated_engine_pads_as_its_settings_say(lone_rows: int) -> None:
    engine = SimulatedEngine(Roofline(H200, LLAMA_8B), changed(SETTINGS, lone_rows=lone_rows))
    assert engine.planner.plan(load_of(decoding(1, tpot=50.0))).least_rows == lone_rows


def test_tokens_are_zeros_of_the_right_count() -> None:
    device = executor()
    step = make_step([(0, 3, True), (0, 4, True)], [1, 2, 3], num_logprobs=5)
    mixed = device.wait(device.launch(step, on("decode")))
    assert mixed.token_ids.tolist() == [0] * 5
    assert mixed.token_ids.dtype == np.int32
    assert mixed.logprobs is None
    assert mixed.device_ms == pytest.approx(7 + 3)
    assert device.wait(device.launch(prefill_step(8, samples=False), on("prefill"))).token_ids.tolist() == []
    # Prompt rows alone on the decode lane are prefill.
    assert device.wait(device.launch(prefill_step(20), on("decode"))).device_ms == pytest.approx(20)


def test_slices_share_the_time_of_their_forward() -> None:
    device = executor()
    step = prefill_step(40)
    first, rest = (device.launch(step, on("prefill", layers=layers)) for layers in ((0, 1), (1, 4)))
    result = device.wait(first)
    assert device.now() == pytest.approx(0.010)
    assert (result.token_ids.tolist(), result.device_ms) == ([], pytest.approx(10))
    result = device.wait(rest)
    assert device.now() == pytest.approx(0.040)
    assert (result.token_ids.tolist(), result.device_ms) == ([0], pytest.approx(30))


@pytest.mark.parametrize("head_start_ms", [0, 75])
def test_a_split_runs_both_lanes_at_their_speed_beside_each_other(head_start_ms: float) -> None:
    """One row on 64 SMs takes 15.625 ms alone, 23.4375 beside; 54 tokens on 36 SMs take 150 and 225."""
    device = executor()
    prefill = device.launch(prefill_step(54), on("prefill", WIDE))
    device.sleep_until(head_start_ms / 1e3)
    assert device.wait(device.launch(decode_step(1), on("decode", WIDE))).device_ms == pytest.approx(23.4375)
    assert device.now() * 1e3 == pytest.approx(head_start_ms + 23.4375)
    # What it did beside the step is 23.4375 / 225 of its work; it does the rest alone.
    assert device.wait(prefill).device_ms == pytest.approx(23.4375 + 150 * (1 - 23.4375 / 225))


def test_between_two_splits_each_lane_has_its_own_ones_speed() -> None:
    device = executor()
    prefill = device.launch(prefill_step(54), on("prefill", WIDE))
    assert finish_ms(device, device.launch(decode_step(1), on("decode", NARROW))) == pytest.approx(1500 / 32)
    assert finish_ms(device, prefill) == pytest.approx(1500 / 32 + 150 * (1 - 1500 / 32 / 225))


@pytest.mark.parametrize(
    ("tokens", "partition", "prefill_ends_ms"),
    [(40, WHOLE_GPU, 50), (36, WIDE, 110)],  # 36 tokens on 36 SMs take 100 ms alone
)
def test_lanes_that_share_sms_get_half_the_time(tokens: int, partition: SmPartition, prefill_ends_ms: float) -> None:
    device = executor()
    prefill = device.launch(prefill_step(tokens), on("prefill", partition))
    assert finish_ms(device, device.launch(decode_step(1), on("decode"))) == pytest.approx(20)
    assert finish_ms(device, prefill) == pytest.approx(prefill_ends_ms)


def test_taking_turns_waits_for_what_the_other_lane_was_given_before() -> None:
    device = executor()
    step = prefill_step(40)
    first = device.launch(step, on("prefill", layers=(0, 2), turns=True))
    decode = device.launch(decode_step(1), on("decode", turns=True))
    last = device.launch(step, on("prefill", layers=(2, 4), turns=True))
    assert finish_ms(device, first) == pytest.approx(20)
    assert finish_ms(device, decode) == pytest.approx(30)
    result = device.wait(last)
    assert device.now() == pytest.approx(0.050)
    assert result.device_ms == pytest.approx(20), "waiting is not running"


def test_taking_turns_does_not_wait_for_what_came_later() -> None:
    device = executor()
    turns = device.launch(decode_step(1), on("decode", turns=True))
    free = device.launch(prefill_step(10), on("prefill"))
    assert finish_ms(device, turns) == pytest.approx(20)
    assert finish_ms(device, free) == pytest.approx(20)


def test_waiting_for_any() -> None:
    device = executor()
    prefill = device.launch(prefill_step(50), on("prefill", turns=True))
    decode = device.launch(decode_step(1), on("decode", turns=True))
    assert device.wait_any([decode, prefill], 0.02) is None
    assert device.now() == 0.02
    assert device.wait_any([decode, prefill], 0.01) is None
    assert device.now() == 0.02, "time does not run backwards"
    assert device.wait_any([decode, prefill], 1.0) == prefill
    assert device.now() == pytest.approx(0.05)
    # What is done stays so until it is read, and costs no time.
    assert device.wait_any([decode, prefill], None) == prefill
    device.wait(prefill)
    assert device.wait_any([decode], None) == decode
    assert device.now() == pytest.approx(0.06)
    # A launch that ends just then is in time.
    last = device.launch(decode_step(1), on("decode"))
    assert device.wait_any([last], device.now() + 0.01) == last


def test_the_first_of_the_list_wins_a_tie() -> None:
    for winner in (0, 1):
        device = executor()
        tickets = [device.launch(prefill_step(10), on("prefill")), device.launch(decode_step(1), on("decode"))]
        tickets = tickets[winner:] + tickets[:winner]
        assert device.wait_any(tickets, None) == tickets[0]
        assert all(is_done(device, ticket) for ticket in tickets)


def test_a_launch_costs_the_host_time_that_the_device_uses() -> None:
    device = executor(host_overhead_ms=4)
    first = device.launch(decode_step(1), on("decode"))
    assert device.now() == pytest.approx(0.004)
    second = device.launch(decode_step(1), on("decode"))
    assert device.now() == pytest.approx(0.008)
    assert finish_ms(device, first) == pytest.approx(14)
    assert finish_ms(device, second) == pytest.approx(24)
    device.sleep_until(0.1)
    assert finish_ms(device, device.launch(decode_step(1), on("decode"))) == pytest.approx(114)


def test_prompts_that_take_the_device_longer_than_the_host_are_launched_layer_by_layer() -> None:
    device = SimulatedExecutor(FakeModel(), eager_layer_ms=2)
    least = 2 * NUM_LAYERS
    work = ((least, NUM_LAYERS), (least + 1, NUM_LAYERS // 2))
    captured, eager = (device.launch(prefill_step(n), on("decode", layers=(0, layers))) for n, layers in work)
    assert device.now() == pytest.approx(least / 2e3)
    assert [finish_ms(device, one) for one in (captured, eager)] == pytest.approx([least, least + (least + 1) / 2])


@pytest.mark.parametrize(
    ("step", "placement", "error", "message"),
    [
        (decode_step(1), on("decode", SmPartition(1, 49)), PartitionError, "SmPartition"),
        (make_step([(0, 3, True)], [1]), on("decode", WIDE), PartitionError, "whole GPU"),
        (prefill_step(3), on("decode", WIDE), PartitionError, "whole GPU"),
        (decode_step(1), on("prefill"), ValueError, "decode lane alone"),
    ],
)
def test_wrong_placements_are_refused(step: Step, placement: Placement, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        executor().launch(step, placement)


@pytest.mark.parametrize("layers", [(1, 2), (2, 5), (2, 1), (0, 4)])
def test_layers_that_do_not_follow_are_refused(layers: tuple[int, int]) -> None:
    device = executor()
    device.launch(prefill_step(8), on("prefill", layers=(0, 2)))
    placement = Placement("prefill", WHOLE_GPU, *layers)
    with pytest.raises(ValueError, match="goes on at layer 2 of 4"):
        device.launch(prefill_step(8), placement)
    device.launch(prefill_step(8), on("prefill", layers=(2, 4)))
    device.launch(prefill_step(8), on("prefill"))


def test_a_ticket_is_read_once_and_none_after_shutdown() -> None:
    device = executor()
    first, second = (device.launch(decode_step(1), on("decode")) for _ in range(2))
    device.wait(first)
    with pytest.raises(KeyError, match="under way"):
        device.wait(first)
    device.shutdown()
    device.shutdown()
    with pytest.raises(KeyError):
        device.wait(second)


LAUNCHES = st.lists(
    st.tuples(st.sampled_from(["decode", "prefill"]), st.integers(1, 9), st.booleans(), st.integers(0, 30)),
    min_size=1,
    max_size=12,
)


def step_of(lane: Lane, size: int) -> Step:
    return decode_step(*[1] * size) if lane == "decode" else prefill_step(size)


@given(LAUNCHES, st.booleans())
def test_on_a_whole_gpu_no_time_is_lost_or_won(launches: list[tuple[Lane, int, bool, int]], with_pauses: bool) -> None:
    """Shares always add up to 1: work ends when it would have ended in any other order."""
    device = executor()
    tickets: dict[Lane, list[int]] = {"decode": [], "prefill": []}
    free_s = 0.0
    for lane, size, turns, pause_ms in launches:
        if with_pauses:
            device.sleep_until(device.now() + pause_ms / 1e3)
        tickets[lane].append(device.launch(step_of(lane, size), on(lane, turns=turns)))
        free_s = max(free_s, device.now()) + (10 * size if lane == "decode" else size) / 1e3
    order: dict[Lane, list[int]] = {"decode": [], "prefill": []}
    lane_of = {ticket: lane for lane, of_lane in tickets.items() for ticket in of_lane}
    while lane_of:
        ticket = device.wait_any(list(lane_of), None)
        assert ticket is not None
        order[lane_of.pop(ticket)].append(ticket)
        device.wait(ticket)
    assert device.now() == pytest.approx(free_s)
    assert order == tickets, "each lane is first in, first out"


@given(LAUNCHES, st.lists(st.sampled_from([WHOLE_GPU, NARROW, WIDE]), min_size=12, max_size=12))
def test_looking_changes_nothing(launches: list[tuple[Lane, int, bool, int]], partitions: list[SmPartition]) -> None:
    ends = []
    for stride_s in (None, 0.001):
        device = executor()
        tickets = [
            device.launch(step_of(lane, size), on(lane, partition, turns=turns))
            for (lane, size, turns, _), partition in zip(launches, partitions, strict=False)
        ]
        while stride_s is not None and not all(is_done(device, ticket) for ticket in tickets):
            device.sleep_until(device.now() + stride_s)
        ends.append([device.wait(ticket).device_ms for ticket in tickets])
    assert ends[0] == pytest.approx(ends[1])
