"""The loop in virtual time: no phase starves under any targets, and TPOT is held where it can be."""

from collections import deque

from core_loop import MODEL
from examples import few
from hypothesis import example, given
from hypothesis import strategies as st

from bullet_graph.config import EngineConfig, Policy
from bullet_graph.engine.output import OutputKind
from bullet_graph.engine.simulation import SimulatedEngine, SimulationSettings
from bullet_graph.planner.tuning import TUNING
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.slo import Slo

ENDLESS = 30_000


class Loop(SimulatedEngine):
    """An engine with sequences that decode, all of one target."""

    def __init__(self, policy: str, slo: Slo, *, num_running: int, output_tokens: int) -> None:
        max_model_len = ENDLESS + 1
        config = EngineConfig(model="tiny", policy=Policy.parse(policy), max_num_seqs=64)
        sizes = {"kv_cache_tokens": 64 * max_model_len, "max_model_len": max_model_len}
        super().__init__(MODEL, SimulationSettings(config=config, **sizes))
        self.slo = slo
        self.running = [self.ask(1, output_tokens) for _ in range(num_running)]
        while len(self.scheduler.decoding()) < num_running:
            self.step()

    def ask(self, prompt_tokens: int, output_tokens: int, arrival_s: float = 0.0) -> str:
        name = f"{prompt_tokens} tokens at {arrival_s}: {len(self.requests)}"
        params = SamplingParams(max_tokens=output_tokens)
        kind = OutputKind.FINAL_ONLY
        self.add_request(name, range(prompt_tokens), params, output_kind=kind, arrival_s=arrival_s, slo=self.slo)
        return name


@few(20)
@example(policy="auto", tpot=5.0, ttft=None, prompts=[1], num_running=3, every_s=0.0)  # no room
@given(
    policy=st.sampled_from(("auto", "auto", "mixed", "split", "mixed:256", "serial")),
    tpot=st.none() | st.floats(0.5, 40.0),
    ttft=st.none() | st.floats(1.0, 2000.0),
    prompts=st.lists(st.integers(1, 6000), min_size=1, max_size=8),
    num_running=st.integers(0, 40),
    every_s=st.floats(0.0, 0.3),
)
def test_both_phases_go_on_under_any_targets(
    policy: str, tpot: float | None, ttft: float | None, prompts: list[int], num_running: int, every_s: float
) -> None:
    """Every prompt is prefilled in bounded time beside sequences that never end, and these get their tokens."""
    loop = Loop(policy, Slo(ttft_ms=ttft, tpot_ms=tpot), num_running=num_running, output_tokens=ENDLESS)
    waiting = deque((loop.now() + i * every_s, tokens) for i, tokens in enumerate(prompts))
    # Alone it would take about 25 µs a token; a tenth of that rate half of the time, a pause before, and the rest.
    limit_s = loop.now() + len(prompts) * every_s + 0.6e-3 * sum(prompts) + 2 * TUNING.pause_patience_s + 3.0
    decode = MODEL.decode(num_running + len(prompts), num_running * ENDLESS + sum(prompts))
    if tpot is not None and decode.ms > TUNING.room_share * tpot:
        # Where sequences leave no room, a prompt waits until its last deadline.
        limit_s += max(TUNING.patience_s, TUNING.patience_allowances * (ttft or 0.0) / 1e3)
    num_ended = 0
    while num_ended < len(prompts):
        while waiting and waiting[0][0] <= loop.now():
            arrival_s, tokens = waiting.popleft()
            loop.ask(tokens, 5, arrival_s)
        next_s = waiting[0][0] if waiting else None
        if loop.has_unfinished_requests():
            num_ended += len(loop.step(next_s))
        else:
            assert next_s is not None
            loop.sleep_until(next_s)
        assert loop.now() < limit_s
    for name in loop.running if policy != "serial" else ():
        output = loop.abort(name)
        assert output is not None
        assert max(output.metrics.itl_ms, default=0.0) < 450


@few(10)
@given(
    tpot=st.floats(9.0, 20.0),
    prompts=st.lists(st.integers(2000, 6000), min_size=4, max_size=10),
    num_running=st.integers(1, 40),
)
def test_tpot_is_held_where_decode_alone_leaves_room(tpot: float, prompts: list[int], num_running: int) -> None:
    """The device takes exactly the predicted times."""
    loop = Loop("auto", Slo(tpot_ms=tpot), num_running=num_running, output_tokens=100)
    for tokens in prompts:
        loop.ask(tokens, 1, loop.now())
    while loop.has_unfinished_requests():
        for output in loop.step():
            assert not output.missed_targets
