"""The simulated executor against schedules worked by hand."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph.errors import PartitionError
from bullet_graph.partition.masks import WHOLE_GPU, Lane, SmPartition
from bullet_graph.perf.performance import Prediction, SplitPrediction
from bullet_graph.runtime.executor import Executor
from bullet_graph.runtime.rows import Chunk, make_batches
from bullet_graph.runtime.simulated import SimulatedExecutor
from bullet_graph.runtime.step import Placement, Step

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
    captured, eager = (device.launch(prefill_step(tokens), on("decode")) for tokens in (least, least + 1))
    assert device.now() == pytest.approx(least / 1e3)
    assert finish_ms(device, captured) == pytest.approx(least)
    assert finish_ms(device, eager) == pytest.approx(2 * least + 1)


MIXED = make_step([(0, 3, True)], [1])


@pytest.mark.parametrize(
    ("step", "placement", "error", "message"),
    [
        (decode_step(1), on("decode", SmPartition(1, 49)), PartitionError, "SmPartition"),
        (MIXED, on("decode", WIDE), PartitionError, "whole GPU"),
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
