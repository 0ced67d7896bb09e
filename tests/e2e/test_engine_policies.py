"""Policies: the same tokens in each, aborts between slices, latency targets, and changes of policy."""

from dataclasses import replace

import pytest
from engines import (
    EASY,
    GREEDY,
    IMPOSSIBLE,
    PROMPT,
    PROMPTS,
    Launches,
    Model,
    make,
    run_to_end,
    step_into_a_prefill,
    tokens_of,
)

from bullet_graph import ConfigError, Engine, RequestError, RequestOutput, Slo
from bullet_graph.runtime.executor import Executor

# ---- the same tokens in every policy ----


@pytest.mark.parametrize(
    ("depth", "policy", "slo"),
    [(depth, "auto", slo) for depth in (1, 3) for slo in (Slo(), EASY, IMPOSSIBLE)]
    + [(1, "serial", Slo()), (3, "serial", IMPOSSIBLE), (1, "mixed", EASY), (3, "mixed", Slo())]
    + [(1, "mixed:16", IMPOSSIBLE), (3, "mixed:16", EASY)],
    indirect=["depth"],
    ids=str,
)
@pytest.mark.usefixtures("depth", "short_slices")
def test_prompts_that_come_during_decode(model: Model, expected: list[tuple[int, ...]], policy: str, slo: Slo) -> None:
    with make(model, policy, slo=slo) as engine:
        started_s = engine.now()
        outputs: dict[str, RequestOutput] = {}
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, GREEDY)
            for _ in range(3):
                outputs |= {output.request_id: output for output in engine.step()}
        outputs |= {name: states[-1] for name, states in run_to_end(engine).items()}
        assert [tokens_of(outputs[str(i)])[0] for i in range(len(PROMPTS))] == expected
        assert engine.stats().kv_blocks_used == 0
        if policy != "auto":
            seconds = engine.stats().policy_seconds
            assert seconds.keys() == {engine.config.policy.name, "solo"}
            assert all(value > 0 for value in seconds.values())
            assert seconds[engine.config.policy.name] < engine.now() - started_s


@pytest.mark.usefixtures("short_slices")
def test_slices_cover_a_prompt_while_others_decode(model: Model, launches: Launches) -> None:
    with make(model) as engine:
        engine.add_request("a", PROMPTS[0], GREEDY)
        for _ in range(4):
            engine.step()
        del launches[:]
        engine.add_request("b", PROMPTS[3], GREEDY)
        run_to_end(engine)
    slices = [i for i, (_, placement) in enumerate(launches) if placement.lane == "prefill"]
    assert [(launches[i][1].first_layer, launches[i][1].last_layer) for i in slices] == [(0, 1), (1, None)]
    assert any(step.decode is not None for step, _ in launches[slices[0] : slices[1]])


# ---- aborts ----


@pytest.mark.usefixtures("short_slices")
def test_an_abort_leaves_the_others_of_its_chunk_alone(
    model: Model, launches: Launches, expected: list[tuple[int, ...]]
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
    with make(policy="auto", slo=engines) as engine:
        engine.add_request("default", PROMPT, GREEDY)
        engine.add_request("tpot", PROMPT, GREEDY, slo=Slo(tpot_ms=1e-6))
        engine.add_request("both", PROMPT, GREEDY, slo=Slo(ttft_ms_per_token=1e-9, tpot_ms=1e-6))
        outputs = {name: states[-1] for name, states in run_to_end(engine).items()}
    assert outputs["default"].slo == engines
    assert outputs["tpot"].slo == Slo(ttft_ms=1e6, tpot_ms=1e-6)
    assert outputs["both"].slo == Slo(ttft_ms_per_token=1e-9, tpot_ms=1e-6)
    missed = {name: output.missed_targets for name, output in outputs.items()}
    assert missed == {"default": (), "tpot": ("tpot",), "both": ("ttft", "tpot")}


def test_a_change_of_policy_keeps_what_was_learned_of_the_device() -> None:
    with make(policy="auto", slo=EASY) as engine:
        engine.generate(PROMPTS, GREEDY, use_tqdm=False)
        learned = engine.stats().corrections
        assert learned["solo", "step", 64] != 1
        engine.set_policy("mixed", EASY)
        assert engine.stats().corrections == learned
        assert engine.stats().num_steps == 0


# ---- another policy ----


def test_a_policy_takes_the_place_of_another(model: Model, launches: Launches, expected: list[tuple[int, ...]]) -> None:
    with make(model, "serial", slo=EASY) as engine:
        for policy, slo in (("auto", IMPOSSIBLE), ("auto", Slo()), ("mixed:16", EASY), ("serial:7", Slo())):
            engine.set_policy(policy, slo)
            del launches[:]
            (output,) = engine.generate([PROMPTS[3]], GREEDY, use_tqdm=False)
            assert tokens_of(output) == [expected[3]]
            assert (str(engine.config.policy), output.slo) == (policy, slo)
            prefills = [(step, placement) for step, placement in launches if step.prefill is not None]
            assert {placement.lane for _, placement in prefills} == {"decode"}
            rows = {"mixed:16": 16, "serial:7": 7}.get(policy, 90)
            assert max(len(step.prefill.token_ids) for step, _ in prefills if step.prefill) == rows


def test_the_order_of_prompts_changes_with_the_policy(model: Model, expected: list[tuple[int, ...]]) -> None:
    def first_to_start(engine: Engine) -> str:
        for name, max_tokens in (("short", 2), ("long", 4)):
            engine.add_request(name, PROMPTS[3], replace(GREEDY, max_tokens=max_tokens))
        return next(iter(run_to_end(engine)))

    with make(model, "serial:16") as engine:
        assert first_to_start(engine) == "short"
        engine.set_policy("serial:7", prompt_order="longest-output")
        assert first_to_start(engine) == "long"
        # What is not named stays.
        engine.set_policy("mixed:16")
        assert engine.config.prompt_order == "longest-output"
        with pytest.raises(ConfigError, match="prompt_order must be one of arrival, longest-output"):
            engine.set_policy("mixed", prompt_order="shortest")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="mixed:17 has chunks of 17 tokens, but the engine was made for 16"):
            engine.set_policy("mixed:17")
        (output,) = engine.generate([PROMPTS[3]], GREEDY, use_tqdm=False)
        assert tokens_of(output) == [expected[3]]


@pytest.mark.usefixtures("short_slices")
def test_no_policy_changes_under_requests(model: Model, launches: Launches, expected: list[tuple[int, ...]]) -> None:
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
    ("policy", "message"),
    [("split", "needs a decode lane"), ("split:48", "needs a decode lane of 48 SMs"), ("fast", "unknown policy")],
)
def test_a_policy_that_cannot_be_leaves_the_old_one(
    model: Model, expected: list[tuple[int, ...]], policy: str, message: str
) -> None:
    with make(model, "mixed", slo=EASY) as engine:
        with pytest.raises(ConfigError, match=message):
            engine.set_policy(policy)
        assert (str(engine.config.policy), engine.config.slo) == ("mixed", EASY)
        (output,) = engine.generate([PROMPTS[2]], GREEDY, use_tqdm=False)
        assert tokens_of(output) == [expected[2]]
        assert output.slo == EASY
        assert set(engine.stats().policy_seconds) == {"solo"}


def test_the_planner_pads_a_sequence_alone_as_the_executor_says(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Executor, "lone_rows", 2)
    with make(model, "auto", slo=EASY) as engine:
        engine.set_policy("mixed")
        assert engine._core.planner._lone_rows == 2
