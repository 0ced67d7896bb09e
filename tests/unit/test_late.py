"""Predicted TTFT against what the simulated loop then takes, and requests that are refused by it."""

import numpy as np
import pytest
from fakes.perf_tables import LLAMA_8B

from bullet_graph.config import EngineConfig, Policy
from bullet_graph.engine.core import PREDICT_EVERY_S
from bullet_graph.engine.output import OutputKind
from bullet_graph.engine.prompt_queue import QUEUE_IN_SIGHT
from bullet_graph.engine.request import Request, Sample
from bullet_graph.engine.sequence import Sequence
from bullet_graph.engine.simulation import SimulatedEngine, SimulationSettings
from bullet_graph.errors import LateError
from bullet_graph.hardware import H200
from bullet_graph.perf.roofline import Roofline
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.serve.errors import ApiError
from bullet_graph.slo import NO_TARGETS, Slo

SLO = Slo(ttft_ms=500, tpot_ms=15)


def engine() -> SimulatedEngine:
    config = EngineConfig(model="tiny", policy=Policy("auto"), max_num_seqs=1024)
    settings = SimulationSettings(config=config, kv_cache_tokens=200_000, max_model_len=16_384)
    return SimulatedEngine(Roofline(H200, LLAMA_8B), settings)


def add(engine: SimulatedEngine, name: str, prompt_tokens: int, slo: Slo = SLO) -> None:
    engine.add(request(prompt_tokens, slo, name, engine.now()))


def request(prompt_tokens: int, slo: Slo, name: str = "1000", arrival_s: float = 0.0) -> Request:
    prompt = np.random.default_rng(int(name)).integers(0, 1000, prompt_tokens, np.int32)
    sequence = Sequence(name, 0, prompt, SamplingParams(max_tokens=4), 0, frozenset(), slo, arrival_s)
    return Request([Sample(sequence, None)], OutputKind.FINAL_ONLY)


@pytest.mark.parametrize("num_queued", [0, 3, 8])
@pytest.mark.parametrize("slo", [SLO, NO_TARGETS])
def test_the_prediction_is_what_the_loop_takes(num_queued: int, slo: Slo) -> None:
    loop = engine()
    for i in range(num_queued):
        add(loop, str(i), 1000, slo)
    predicted_ms = loop.predicted_ttft_ms(2000, slo)
    add(loop, "99", 2000, slo)
    last = next(output for outputs in iter(loop.step, None) for output in outputs if output.request_id == "99")
    assert last.metrics.ttft_ms == pytest.approx(predicted_ms, rel=0.3)


def test_a_request_that_would_come_too_late_is_refused_and_told_when_to_return() -> None:
    loop = engine()
    loop.sleep_until(100.0)
    for i in range(8):
        add(loop, str(i), 16_000)
    predicted_ms, slo = loop.predicted_ttft_ms(16_000, SLO), Slo(ttft_ms_per_token=1)
    # The earliest deadline comes first; tokens that are cached count for it, too.
    assert loop.predicted_ttft_ms(100, slo) < 0.1 * predicted_ms < loop.predicted_ttft_ms(16_000, slo, 15_900)
    assert loop.stats(SLO).predicted_ttft_ms < predicted_ms
    factor = predicted_ms / 500
    for targets, most in ((SLO, factor * 1.01), (SLO, None), (NO_TARGETS, 0.01)):
        loop.require_in_time(request(16_000, targets), most)
    with pytest.raises(LateError, match=f"after about {predicted_ms / 1e3:.1f} s, more than") as error:
        loop.require_in_time(request(16_000, SLO), factor * 0.99)
    told = ApiError.of(error.value)
    assert (told.status, told.body["error"]["code"]) == (429, "too_late")
    assert int(told.headers["Retry-After"]) - predicted_ms / 1e3 == pytest.approx(0.5, abs=0.5)
    while loop.has_unfinished_requests():
        loop.step()
    with pytest.raises(LateError):
        loop.require_in_time(request(16_000, Slo(ttft_ms=100)), 1.0)
    loop.require_in_time(request(16_000, Slo(ttft_ms=100), "7"), 1.0)  # the prefix cache holds its prompt


@pytest.mark.parametrize("num_queued", [1, QUEUE_IN_SIGHT + 1])
def test_a_long_queue_is_ranked_once_in_a_while(num_queued: int) -> None:
    loop = engine()
    loop.sleep_until(1.0)
    told = []
    for name in map(str, range(num_queued + 1)):
        add(loop, name, 1000, NO_TARGETS)
        told.append(loop.stats().predicted_ttft_ms)
    assert (told[-1] > told[-2]) == (num_queued == 1)
    loop.sleep_until(1.1 + PREDICT_EVERY_S)
    assert loop.stats().predicted_ttft_ms == loop.predicted_ttft_ms(1, NO_TARGETS) >= told[-1]
