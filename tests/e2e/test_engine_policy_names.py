"""Prompts in every policy, on a lane of their own or not: the same tokens, and aborts between slices."""

import pytest
from engines import GREEDY, Model, at_any_depth, run_to_end, tokens_of
from policies import EASY, IMPOSSIBLE, POLICIES, PROMPTS, Launches, make, short_slices, step_into_a_prefill

from bullet_graph import RequestOutput, SamplingParams, Slo

# ---- the same tokens in every policy ----


@at_any_depth
@short_slices
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slo", [Slo(), EASY, IMPOSSIBLE], ids=["none", "easy", "impossible"])
def test_prompts_that_come_while_others_decode(
    model: Model, expected: list[tuple[int, ...]], policy: str, slo: Slo
) -> None:
    with make(model, policy, slo=slo) as engine:
        outputs: dict[str, RequestOutput] = {}
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, GREEDY)
            for _ in range(3):
                outputs |= {output.request_id: output for output in engine.step()}
        outputs |= {name: states[-1] for name, states in run_to_end(engine).items()}
        assert [tokens_of(outputs[str(i)])[0] for i in range(len(PROMPTS))] == expected
        assert engine.stats().kv_blocks_used == 0


@short_slices
def test_the_same_seed_gives_the_same_tokens_in_every_policy(model: Model) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, n=2, seed=7, max_tokens=12, ignore_eos=True)
    found = set()
    for policy in POLICIES:
        with make(model, policy) as engine:
            outputs = engine.generate(PROMPTS, params, use_tqdm=False)
        found.add(tuple(tuple(tokens_of(output)) for output in outputs))
    assert len(found) == 1
    ((first, *_),) = found
    assert first[0] != first[1]


@short_slices
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


@short_slices
def test_an_abort_between_two_slices_frees_all_blocks(
    model: Model, launches: Launches, expected: list[tuple[int, ...]]
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
