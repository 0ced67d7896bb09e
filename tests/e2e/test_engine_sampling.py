"""Sampling on the CPU: log-probabilities against ``transformers``, seeds, samples, extreme settings."""

import numpy as np
import pytest
import torch
from engines import Model, at_any_depth, make, make_engine, short_slices, tokens_of

from bullet_graph import Engine, SamplingParams

PROMPT = [5, 17, 300, 8]


# ---- log-probabilities ----


@at_any_depth
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=10, logprobs=5, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=40, seed=4, max_tokens=10, logprobs=20, ignore_eos=True),
        SamplingParams(temperature=1.5, seed=5, max_tokens=10, logprobs=0, ignore_eos=True),
    ],
)
def test_logprobs_are_the_model_s_own(model: Model, params: SamplingParams) -> None:
    others = [SamplingParams(max_tokens=6), SamplingParams(max_tokens=4, logprobs=1)]
    with make_engine(model.folder, policy="mixed:6") as engine:
        output, silent, _ = engine.generate([PROMPT, [3, 4], [5]], [params, *others], use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert silent.outputs[0].logprobs is None
    exact = torch.log_softmax(model.logits([*PROMPT, *completion.token_ids]), -1)[len(PROMPT) - 1 : -1]
    assert params.logprobs is not None
    for row, token, entry in zip(exact, completion.token_ids, completion.logprobs, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert len(entry.top) == params.logprobs
        assert len({token_id for token_id, _ in entry.top}) == params.logprobs
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        np.testing.assert_allclose(values, row.topk(params.logprobs).values.tolist(), atol=1e-4)
        np.testing.assert_allclose(values, [float(row[token_id]) for token_id, _ in entry.top], atol=1e-4)


# ---- seeds and samples ----

SEEDED = [
    SamplingParams(temperature=1.0, seed=11, max_tokens=15, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=12, max_tokens=15, ignore_eos=True),
    SamplingParams(temperature=1.4, top_k=30, min_p=0.01, seed=13, max_tokens=15, ignore_eos=True),
]


@pytest.fixture(scope="module")
def seeded(model: Model) -> list[tuple[int, ...]]:
    """What each of SEEDED gives for PROMPT when it has the engine to itself."""
    with make_engine(model.folder) as engine:
        return [tokens_of(engine.generate(PROMPT, p, use_tqdm=False)[0])[0] for p in SEEDED]


@at_any_depth
@short_slices
@pytest.mark.parametrize("policy", ["serial", "mixed", "mixed:3", "serial:2", "auto"])
def test_a_seed_fixes_the_tokens_whatever_else_runs(model: Model, seeded: list[tuple[int, ...]], policy: str) -> None:
    assert len(set(seeded)) == len(seeded)
    company = [SamplingParams(max_tokens=n) for n in (3, 25, 9, 14, 30)]
    prompts = [[n, n + 1, n + 2] * (1 + n % 5) for n in range(len(company))]
    with make(model, policy, max_num_seqs=5) as engine:
        outputs = engine.generate(
            [prompts[0], PROMPT, *prompts[1:3], PROMPT, *prompts[3:], PROMPT],
            [company[0], SEEDED[0], *company[1:3], SEEDED[1], *company[3:], SEEDED[2]],
            use_tqdm=False,
        )
    assert [tokens_of(outputs[i])[0] for i in (1, 4, 7)] == seeded


def test_without_a_seed_outputs_differ_but_follow_from_the_engine_s(model: Model) -> None:
    params = SamplingParams(max_tokens=15, ignore_eos=True)
    runs = []
    for seed in (1, 1, 2):
        with make_engine(model.folder, seed=seed) as engine:
            outputs = engine.generate([PROMPT] * 3, params, use_tqdm=False)
            assert len({tokens_of(output)[0] for output in outputs}) == 3
            runs.append([tokens_of(output) for output in outputs])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@at_any_depth
@pytest.mark.parametrize("seed", [20, 2**63 - 2])
def test_n_samples_take_the_seeds_that_follow(model: Model, seed: int) -> None:
    params = SamplingParams(seed=seed, n=4, max_tokens=10, ignore_eos=True, logprobs=1)
    singles = [SamplingParams(seed=(seed + i) % 2**63, max_tokens=10, ignore_eos=True) for i in range(4)]
    with make_engine(model.folder, max_num_seqs=3) as engine:
        together, *alone = engine.generate([PROMPT] * 5, [params, *singles], use_tqdm=False)
    assert [completion.index for completion in together.outputs] == [0, 1, 2, 3]
    assert len(set(tokens_of(together))) == 4
    assert len(together.metrics.token_times_s) == 10, "those of the first sample"
    assert tokens_of(together) == [tokens_of(output)[0] for output in alone]
    assert all(len(completion.logprobs or ()) == 10 for completion in together.outputs)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=2**63 - 1, n=2, max_tokens=5),
        SamplingParams(temperature=1e-40, top_p=0.5),
        SamplingParams(temperature=1e6, min_p=0.5),
        SamplingParams(top_p=1e-60),
        SamplingParams(top_k=2**40),
        SamplingParams(max_tokens=2**40, min_tokens=2**40, stop_token_ids=[5]),
    ],
)
def test_extreme_params_do_not_break_the_engine(engine: Engine, params: SamplingParams) -> None:
    (output,) = engine.generate(PROMPT, params, use_tqdm=False)
    assert all(tokens_of(output))
    assert len(output.outputs) == params.n


def test_next_to_no_temperature_is_greedy(model: Model, engine: Engine) -> None:
    params = SamplingParams(temperature=1e-6, max_tokens=10, ignore_eos=True)
    (output,) = engine.generate(PROMPT, params, use_tqdm=False)
    assert tokens_of(output) == [model.greedy(PROMPT, 10)]
