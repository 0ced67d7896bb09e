"""The arms that run prompts on a lane of their own, targets, policies and traces, on the CPU."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from async_engines import collect
from engines import GREEDY, Model, at_any_depth, make_engine, run_to_end, tokens_of

from bullet_graph import (
    AsyncEngine,
    ConfigError,
    Engine,
    EngineDeadError,
    RequestError,
    RequestOutput,
    SamplingParams,
    Slo,
)
from bullet_graph.engine.plan import ArmName
from bullet_graph.perf.trace_file import read_trace
from bullet_graph.runtime.cpu import CpuExecutor
from bullet_graph.runtime.step import Placement, Step

ARMS = ("serial", "mixed", "mixed:16", "sliced", "auto")
LENGTHS = (4, 1, 40, 90, 17, 33)
PROMPTS = [[(7 * i + 3 * j) % 300 for j in range(length)] for i, length in enumerate(LENGTHS)]
PROMPT = PROMPTS[2]
EASY = Slo(ttft_ms=1e6, tpot_ms=1e6)
IMPOSSIBLE = Slo(ttft_ms=1e-6, tpot_ms=1e-6)


def make(model: Model | str | Path = "tiny", arm: str = "sliced", **settings: object) -> Engine:
    folder = model.folder if isinstance(model, Model) else model
    return make_engine(folder, arm=arm, perf_table="roofline", **settings)


@pytest.fixture(scope="module")
def expected(model: Model) -> list[tuple[int, ...]]:
    return [model.greedy(prompt, 12) for prompt in PROMPTS]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Step, Placement]]:
    """What was launched so far."""
    seen: list[tuple[Step, Placement]] = []
    launch = CpuExecutor.launch

    def note(self: CpuExecutor, step: Step, placement: Placement) -> int:
        seen.append((step, placement))
        return launch(self, step, placement)

    monkeypatch.setattr(CpuExecutor, "launch", note)
    return seen


@pytest.fixture
def one_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices as short as they can be: by themselves, prompts this short end in their first slice."""
    monkeypatch.setattr("bullet_graph.engine.planner.SOLO_SLICE_MS", 0.0)
    monkeypatch.setattr("bullet_graph.engine.options.DECODES_PER_SLICE", 0.0)


short_slices = pytest.mark.usefixtures("one_layer_at_a_time")


def step_into_a_prefill(engine: Engine, launches: list[tuple[Step, Placement]]) -> None:
    """Step until a chunk has some of its layers behind it, and others before it."""
    while not (launches and launches[-1][1].last_layer is not None):
        engine.step()


# ---- the same tokens in every arm ----


@at_any_depth
@short_slices
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("slo", [Slo(), EASY, IMPOSSIBLE], ids=["none", "easy", "impossible"])
def test_prompts_that_come_while_others_decode(
    model: Model, expected: list[tuple[int, ...]], arm: str, slo: Slo
) -> None:
    with make(model, arm, slo=slo) as engine:
        outputs: dict[str, RequestOutput] = {}
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, GREEDY)
            for _ in range(3):
                outputs |= {output.request_id: output for output in engine.step()}
        outputs |= {name: states[-1] for name, states in run_to_end(engine).items()}
        assert [tokens_of(outputs[str(i)])[0] for i in range(len(PROMPTS))] == expected
        assert engine.stats().kv_blocks_used == 0


@short_slices
def test_the_same_seed_gives_the_same_tokens_in_every_arm(model: Model) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, n=2, seed=7, max_tokens=12, ignore_eos=True)
    found = set()
    for arm in ARMS:
        with make(model, arm) as engine:
            outputs = engine.generate(PROMPTS, params, use_tqdm=False)
        found.add(tuple(tuple(tokens_of(output)) for output in outputs))
    assert len(found) == 1
    ((first, *_),) = found
    assert first[0] != first[1]


@short_slices
def test_slices_cover_a_prompt_while_others_decode(
    model: Model, launches: list[tuple[Step, Placement]]
) -> None:
    with make(model) as engine:
        engine.add_request("a", PROMPTS[0], GREEDY)
        for _ in range(4):
            engine.step()
        del launches[:]
        engine.add_request("b", PROMPTS[3], GREEDY)
        run_to_end(engine)
    slices = [i for i, (_, placement) in enumerate(launches) if placement.lane == "prefill"]
    assert [(launches[i][1].first_layer, launches[i][1].last_layer) for i in slices] == [(0, 1), (1, None)]
    assert all(launches[i][1].takes_turns for i in slices)
    assert any(step.decode is not None for step, _ in launches[slices[0] : slices[1]])


# ---- aborts ----


@short_slices
def test_an_abort_between_two_slices_frees_all_blocks(
    model: Model, launches: list[tuple[Step, Placement]], expected: list[tuple[int, ...]]
) -> None:
    with make(model) as engine:
        engine.add_request("a", PROMPTS[3], GREEDY)
        step_into_a_prefill(engine, launches)
        engine.abort("a")
        outputs = run_to_end(engine)
        assert [output.outputs[0].finish_reason for output in outputs["a"]] == ["abort"]
        assert engine.stats().kv_blocks_used == engine.stats().num_running == 0
        assert launches[-1][1].last_layer is None
        (output,) = engine.generate([PROMPTS[4]], GREEDY, use_tqdm=False)
        assert tokens_of(output) == [expected[4]]


@short_slices
def test_an_abort_leaves_the_others_of_its_chunk_alone(
    model: Model, launches: list[tuple[Step, Placement]], expected: list[tuple[int, ...]]
) -> None:
    with make(model) as engine:
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, GREEDY)
        step_into_a_prefill(engine, launches)
        for i in (0, 3, 5):
            engine.abort(str(i))
        # Its blocks are still written: a newcomer must not get them.
        engine.add_request("new", PROMPTS[3], GREEDY)
        outputs = run_to_end(engine)
        assert [tokens_of(outputs[str(i)][-1])[0] for i in (1, 2, 4)] == [expected[i] for i in (1, 2, 4)]
        assert tokens_of(outputs["new"][-1]) == [expected[3]]
        assert engine.stats().kv_blocks_used == 0


# ---- targets ----


def test_targets_of_a_request_go_before_the_engines() -> None:
    engines = Slo(ttft_ms=1e6, tpot_ms=1e6)
    with make(arm="auto", slo=engines) as engine:
        engine.add_request("default", PROMPT, GREEDY)
        engine.add_request("tpot", PROMPT, GREEDY, slo=Slo(tpot_ms=1e-6))
        engine.add_request("both", PROMPT, GREEDY, slo=Slo(ttft_ms_per_token=1e-9, tpot_ms=1e-6))
        outputs = {name: states[-1] for name, states in run_to_end(engine).items()}
    assert outputs["default"].slo == engines
    assert outputs["tpot"].slo == Slo(ttft_ms=1e6, tpot_ms=1e-6)
    assert outputs["both"].slo == Slo(ttft_ms_per_token=1e-9, tpot_ms=1e-6)
    assert {name: output.missed_targets for name, output in outputs.items()} == {
        "default": (),
        "tpot": ("tpot",),
        "both": ("ttft", "tpot"),
    }


async def test_targets_of_streams() -> None:
    async with AsyncEngine(make(arm="auto", slo=EASY)) as engine:
        default, own = await asyncio.gather(
            collect(engine, PROMPT), collect(engine, PROMPT, slo=Slo(tpot_ms=1e-6))
        )
    assert (default[-1].slo, default[-1].missed_targets) == (EASY, ())
    assert (own[-1].slo, own[-1].missed_targets) == (Slo(ttft_ms=1e6, tpot_ms=1e-6), ("tpot",))


def test_without_targets_none_is_missed() -> None:
    with make(arm="auto") as engine:
        (output,) = engine.generate([PROMPT], GREEDY, use_tqdm=False)
    assert output.slo == Slo()
    assert output.missed_targets == ()


@pytest.mark.parametrize(
    ("arm", "seen"),
    [
        ("serial", {"serial", "solo"}),
        ("mixed", {"mixed", "solo"}),
        ("sliced", {"sliced", "solo"}),
    ],
)
def test_the_time_spent_in_each_arm(arm: ArmName, seen: set[str]) -> None:
    with make(arm=arm) as engine:
        engine.add_request("a", PROMPTS[0], GREEDY)
        for _ in range(4):
            engine.step()
        engine.add_request("b", PROMPTS[3], GREEDY)
        started_s = engine.now()
        run_to_end(engine)
        seconds = engine.stats().arm_seconds
        assert set(seconds) == seen
        assert all(value > 0 for value in seconds.values())
        assert seconds[arm] < engine.now() - started_s


# ---- another policy ----


def test_a_policy_takes_the_place_of_another(
    model: Model, launches: list[tuple[Step, Placement]], expected: list[tuple[int, ...]]
) -> None:
    with make(model, "serial", slo=EASY) as engine:
        for arm, slo in (("sliced", IMPOSSIBLE), ("auto", Slo()), ("mixed:16", EASY), ("serial:7", Slo())):
            engine.set_policy(arm, slo)
            del launches[:]
            (output,) = engine.generate([PROMPTS[3]], GREEDY, use_tqdm=False)
            assert tokens_of(output) == [expected[3]]
            assert (str(engine.config.arm), output.slo) == (arm, slo)
            prefills = [(step, placement) for step, placement in launches if step.prefill is not None]
            lane = "prefill" if arm == "sliced" else "decode"
            assert {placement.lane for _, placement in prefills} == {lane}
            rows = {"mixed:16": 16, "serial:7": 7}.get(arm, 90)
            assert max(len(step.prefill.token_ids) for step, _ in prefills if step.prefill) == rows


@short_slices
def test_a_policy_cannot_change_under_requests(
    model: Model, launches: list[tuple[Step, Placement]], expected: list[tuple[int, ...]]
) -> None:
    with make(model) as engine:
        engine.add_request("a", PROMPTS[3], GREEDY)
        step_into_a_prefill(engine, launches)
        with pytest.raises(RequestError, match="finish or abort them first"):
            engine.set_policy("mixed")
        engine.abort("a")
        with pytest.raises(RequestError, match="finish or abort them first"):
            engine.set_policy("mixed")
        run_to_end(engine)
        engine.set_policy("mixed")
        assert tokens_of(engine.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0]) == [expected[2]]


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("split", "needs a decode lane"),
        ("split:48", "needs a decode lane of 48 SMs"),
        ("fast", "unknown arm"),
    ],
)
def test_a_policy_that_cannot_be_leaves_the_old_one(
    model: Model, expected: list[tuple[int, ...]], arm: str, message: str
) -> None:
    with make(model, "sliced", slo=EASY) as engine:
        with pytest.raises(ConfigError, match=message):
            engine.set_policy(arm)
        assert (str(engine.config.arm), engine.config.slo) == ("sliced", EASY)
        (output,) = engine.generate([PROMPTS[2]], GREEDY, use_tqdm=False)
        assert tokens_of(output) == [expected[2]]
        assert output.slo == EASY
        assert set(engine.stats().arm_seconds) == {"sliced", "solo"}


def test_a_policy_that_predicts_needs_a_table() -> None:
    with make_engine(arm="mixed") as engine:
        for arm in ("sliced", "auto"):
            with pytest.raises(ConfigError, match="needs a performance table"):
                engine.set_policy(arm)
        assert str(engine.config.arm) == "mixed"


def test_no_policy_for_an_engine_that_is_shut_down() -> None:
    engine = make()
    engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.set_policy("mixed")


# ---- decision traces ----


@short_slices
@pytest.mark.parametrize("arm", ["mixed", "sliced", "auto"])
def test_a_trace_holds_all_that_happened(
    model: Model, launches: list[tuple[Step, Placement]], tmp_path: Path, arm: str
) -> None:
    path = tmp_path / "trace.jsonl"
    slo = Slo(ttft_ms=1e6, tpot_ms=1e-6)
    with make(model, arm, slo=slo, trace_decisions=path) as engine:
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, GREEDY, slo=Slo(ttft_ms=5) if i == 4 else None)
        engine.abort("1")
        for _ in range(5):
            engine.step()
        engine.abort("2")
        run_to_end(engine)
        num_steps, seconds = engine.stats().num_steps, dict(engine.stats().arm_seconds)
        with pytest.raises(RequestError):
            engine.add_request("refused", [])
    trace = read_trace(path)
    assert trace.notes == ()
    assert (trace.header.arm, trace.header.slo) == (arm, str(slo))
    assert (trace.header.device, trace.header.num_sms, trace.header.num_layers) == ("cpu", None, 2)
    assert {request.request_id: request.reason for request in trace.requests} == {
        "0": "length",
        "1": "abort",
        "2": "abort",
        "3": "length",
        "4": "length",
        "5": "length",
    }
    requests = {request.request_id: request for request in trace.requests}
    assert len(trace.requests) == 6
    assert (requests["1"].output_tokens, requests["1"].first_scheduled_s) == (0, None)
    assert [requests[str(i)].prompt_tokens for i in range(6)] == list(LENGTHS)
    assert requests["3"].output_tokens == len(requests["3"].token_us) == 12
    assert (requests["3"].ttft_limit_ms, requests["3"].tpot_limit_ms) == (1e6, 1e-6)
    assert (requests["4"].ttft_limit_ms, requests["4"].tpot_limit_ms) == (5, 1e-6)
    assert [(launch.lane, launch.decode_rows, launch.prefill_rows) for launch in trace.launches] == [
        (
            placement.lane,
            0 if step.decode is None else len(step.decode.slots),
            0 if step.prefill is None else len(step.prefill.token_ids),
        )
        for step, placement in launches
    ]
    assert all(launch.retired_s is not None for launch in trace.launches)
    assert sum(launch.layers for launch in trace.launches) == 2 * num_steps
    measured: dict[str, float] = {}
    for launch in trace.launches:
        measured[launch.arm] = measured.get(launch.arm, 0.0) + (launch.device_ms or 0.0) / 1e3
    assert measured == pytest.approx(seconds)


def test_a_trace_goes_on_under_another_policy_and_after_an_interrupt(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    with make(model, trace_decisions=path) as engine:
        engine.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
        engine.set_policy("mixed", EASY)
        engine.generate([PROMPTS[1]], GREEDY, use_tqdm=False)
        with monkeypatch.context() as patch:
            fail_launches(patch, 3, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                engine.generate([PROMPTS[2]], GREEDY, use_tqdm=False)
        engine.generate([PROMPTS[3]], GREEDY, use_tqdm=False)
    trace = read_trace(path)
    assert [request.prompt_tokens for request in trace.requests if request.reason == "length"] == [4, 1, 90]
    assert {decision.arm for decision in trace.decisions} == {"sliced", "solo"}


def test_a_trace_never_takes_the_place_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("precious")
    with pytest.raises(ConfigError, match=r"trace\.jsonl exists"):
        make(trace_decisions=path)
    assert path.read_text() == "precious"
    with pytest.raises(ConfigError, match="cannot be made"):
        make(trace_decisions=tmp_path / "no-such-folder" / "trace.jsonl")


def test_an_engine_that_cannot_be_made_gives_its_memory_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shut_down = []
    shutdown = CpuExecutor.shutdown

    def note(self: CpuExecutor) -> None:
        shut_down.append(self)
        shutdown(self)

    monkeypatch.setattr(CpuExecutor, "shutdown", note)
    path = tmp_path / "trace.jsonl"
    path.touch()
    with pytest.raises(ConfigError, match="exists"):
        make(trace_decisions=path)
    assert len(shut_down) == 1


def test_a_trace_of_a_failed_engine_is_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    engine = make(trace_decisions=path)
    engine.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
    fail_launches(monkeypatch, 2, RuntimeError("on fire"))
    with pytest.raises(EngineDeadError):
        engine.generate([PROMPTS[1]], GREEDY, use_tqdm=False)
    engine.shutdown()
    assert read_trace(path).requests[0].reason == "length"


# ---- interrupts and failures on the prefill lane ----


def fail_launches(
    monkeypatch: pytest.MonkeyPatch, num_good: int, error: BaseException, lane: str | None = None
) -> None:
    """Let the executor refuse the launch, on a lane or on any, that follows so many good ones."""
    launch = CpuExecutor.launch
    calls = iter(range(num_good))

    def failing(self: CpuExecutor, step: Step, placement: Placement) -> int:
        if lane in (None, placement.lane) and next(calls, None) is None:
            raise error
        return launch(self, step, placement)

    monkeypatch.setattr(CpuExecutor, "launch", failing)


@at_any_depth
@short_slices
@pytest.mark.parametrize("num_good", [0, 1, 3])
def test_an_interrupt_in_the_middle_of_a_prefill_leaves_a_usable_engine(
    model: Model, monkeypatch: pytest.MonkeyPatch, expected: list[tuple[int, ...]], num_good: int
) -> None:
    with make(model, max_num_seqs=2) as engine:
        with monkeypatch.context() as patch:
            fail_launches(patch, num_good, KeyboardInterrupt(), "prefill")
            with pytest.raises(KeyboardInterrupt):
                engine.generate(PROMPTS, GREEDY, use_tqdm=False)
        executor = engine._executor
        assert isinstance(executor, CpuExecutor)
        assert executor._results == {}
        del executor
        assert run_to_end(engine) == {}
        assert engine.stats().kv_blocks_used == 0
        outputs = engine.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [tokens_of(output)[0] for output in outputs] == expected
        assert engine.stats().kv_blocks_used == 0


@pytest.fixture
def dead_engine(
    monkeypatch: pytest.MonkeyPatch, one_layer_at_a_time: None
) -> Iterator[tuple[Engine, Exception]]:
    """An engine whose prefill lane failed between two slices, and why."""
    del one_layer_at_a_time
    error = RuntimeError("lane is on fire")
    engine = make()
    engine.add_request("a", PROMPTS[0], GREEDY)
    while not any(output.outputs[0].token_ids for output in engine.step()):
        pass
    engine.add_request("b", PROMPTS[3], GREEDY)
    with monkeypatch.context() as patch:
        fail_launches(patch, 1, error, "prefill")
        with pytest.raises(EngineDeadError, match="on fire") as caught:
            run_to_end(engine)
    assert caught.value.__cause__ is error
    yield engine, error
    engine.shutdown()


def test_a_lane_that_fails_ends_the_engine_with_the_cause(dead_engine: tuple[Engine, Exception]) -> None:
    engine, error = dead_engine
    for call in (
        lambda: engine.generate(PROMPT, use_tqdm=False),
        lambda: engine.add_request("c", PROMPT),
        lambda: engine.set_policy("mixed"),
        engine.step,
    ):
        with pytest.raises(EngineDeadError, match="on fire") as caught:
            call()
        assert caught.value.__cause__ is error


def test_an_engine_whose_lane_failed_gives_its_memory_back(dead_engine: tuple[Engine, Exception]) -> None:
    engine, _ = dead_engine
    executor = engine._executor
    assert isinstance(executor, CpuExecutor)
    decoder = executor._decoder
    references = [weakref.ref(t) for t in (decoder.weights.embed, decoder.cache._data, decoder.cos_sin)]
    references.append(weakref.ref(executor._forwards["prefill"].hidden.residual))
    del executor, decoder
    engine.shutdown()
    gc.collect()
    assert [reference() for reference in references if reference() is not None] == []


@short_slices
async def test_streams_learn_that_the_prefill_lane_failed(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("lane is on fire")
    fail_launches(monkeypatch, 3, error, "prefill")
    engine = AsyncEngine(make(model, max_num_seqs=2))
    async with asyncio.timeout(20):
        results = await asyncio.gather(
            *(collect(engine, prompt) for prompt in PROMPTS), return_exceptions=True
        )
        results += await asyncio.gather(collect(engine, PROMPT), return_exceptions=True)
    failures = [result for result in results if isinstance(result, EngineDeadError)]
    assert len(failures) >= len(PROMPTS) - 1
    assert all("on fire" in str(failure) and failure.__cause__ is error for failure in failures)
    assert isinstance(results[-1], EngineDeadError)
    engine.shutdown()
