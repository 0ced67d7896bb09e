"""Sampling on the CPU, against ``transformers``: log-probabilities, seeds, samples, extreme settings, penalties."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from engines import PROMPTS, Model, block_bytes, make, make_engine, run_to_end, tokens_of
from transformers import RepetitionPenaltyLogitsProcessor

from bullet_graph import Engine, RequestOutput, SamplingParams
from bullet_graph.engine.output import OutputKind, TokenLogprobs
from bullet_graph.errors import SamplingParamsError

PROMPT = [5, 17, 300, 8]


# ---- log-probabilities ----


def assert_is(entry: TokenLogprobs, token: int, exact: torch.Tensor, count: int) -> None:
    """A token's own log-probability and the best ones, against the model's."""
    assert entry.token_id == token
    assert entry.logprob == pytest.approx(float(exact[token]), abs=1e-4)
    assert len(entry.top) == len({token_id for token_id, _ in entry.top}) == count
    values = [value for _, value in entry.top]
    assert values == sorted(values, reverse=True)
    np.testing.assert_allclose(values, exact.topk(count).values.tolist(), atol=1e-4)
    np.testing.assert_allclose(values, [float(exact[token_id]) for token_id, _ in entry.top], atol=1e-4)


@pytest.mark.usefixtures("depth")
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
        assert_is(entry, token, row, params.logprobs)


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


@pytest.mark.usefixtures("depth", "short_slices")
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


@pytest.mark.usefixtures("depth")
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


# ---- log-probabilities of prompts ----

SCORE = SamplingParams(max_tokens=0, prompt_logprobs=2)


def assert_scored(model: Model, prompt: Sequence[int], output: RequestOutput, count: int) -> None:
    assert output.prompt_logprobs is not None
    first, *entries = output.prompt_logprobs
    assert first is None
    exact = torch.log_softmax(model.logits(prompt), -1)[:-1]
    for row, token, entry in zip(exact, prompt[1:], entries, strict=True):
        assert entry is not None
        assert_is(entry, token, row, count)


@pytest.mark.usefixtures("depth", "short_slices")
@pytest.mark.parametrize("policy", ["serial", "mixed:7", "auto"])
def test_every_token_of_a_prompt_is_scored(model: Model, expected: list[tuple[int, ...]], policy: str) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    scored = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=3, logprobs=1)
    params = [SCORE, scored, scored, greedy, scored, SCORE]
    with make(model, policy, max_num_seqs=4) as engine:
        outputs = engine.generate(PROMPTS, params, use_tqdm=False)
    for prompt, output, asked, tokens in zip(PROMPTS, outputs, params, expected, strict=True):
        if asked.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            assert_scored(model, prompt, output, asked.prompt_logprobs)
        assert tokens_of(output) == [tokens if asked.max_tokens else ()]
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.usefixtures("depth")
def test_a_preempted_prompt_is_scored_once(model: Model) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, prompt_logprobs=1)
    prompts = [[n, 7, 30 + n, 9, 11, 250] for n in range(3)]
    with make_engine(model.folder, max_model_len=64, kv_cache_bytes=5 * block_bytes(model)) as engine:
        outputs = engine.generate(prompts, params, use_tqdm=False)
        assert engine.stats().num_preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_scored(model, prompt, output, 1)
        assert tokens_of(output) == [model.greedy(prompt, 40)]


def test_samples_share_the_scores_which_come_at_the_end(model: Model) -> None:
    params = SamplingParams(max_tokens=4, n=3, prompt_logprobs=0, ignore_eos=True)
    with make_engine(model.folder, policy="mixed:2") as engine:
        engine.add_request("a", PROMPTS[4], params, output_kind=OutputKind.DELTA)
        outputs = run_to_end(engine)["a"]
    assert all(output.prompt_logprobs is None for output in outputs[:-1])
    assert_scored(model, PROMPTS[4], outputs[-1], 0)


def test_a_prompt_of_one_token_has_nothing_to_score(engine: Engine) -> None:
    (output,) = engine.generate([5], SCORE, use_tqdm=False)
    assert output.prompt_logprobs == (None,)
    assert output.finished
    assert output.metrics.token_times_s == ()


def test_a_request_aborted_while_it_is_scored_leaves_nothing_behind(model: Model) -> None:
    with make_engine(model.folder, policy="mixed:3") as engine:
        engine.add_request("a", PROMPTS[3], SCORE)
        engine.step()
        engine.abort("a")
        engine.add_request("a", PROMPTS[0], SCORE)
        outputs = run_to_end(engine)["a"]
        assert engine.stats().kv_blocks_used == 0
    assert_scored(model, PROMPTS[0], outputs[-1], 2)


# ---- penalties and biases of whole requests, over preemptions, with steps in flight ----

REPEATING = [5, 17, 300, 8, 17]


def penalized(model: Model, prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    """Greedy tokens by ``transformers``' repetition penalty and the definitions of the others."""
    ids, repetition = list(prompt), RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    for _ in range(params.max_tokens):
        scores = model.logits(ids)[-1].clone()
        for token_id, bias in params.biases:
            scores[token_id] += bias
        scores = repetition(torch.tensor([ids]), scores[None])[0]
        counts = torch.bincount(torch.tensor(ids[len(prompt) :], dtype=torch.long), minlength=len(scores))
        scores -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        ids.append(int(scores.argmax()))
    return tuple(ids[len(prompt) :])


def greedy(**adjustments: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **adjustments)  # type: ignore[arg-type]


ADJUSTED = [
    greedy(repetition_penalty=3.0),
    greedy(repetition_penalty=0.5),
    greedy(frequency_penalty=2.0, presence_penalty=1.0),
    greedy(frequency_penalty=-2.0),
    greedy(logit_bias={7: 6.0, 8: -100.0, 300: 5.5}, repetition_penalty=1.5, frequency_penalty=0.5),
]


@pytest.fixture(scope="module")
def expected_adjusted(model: Model) -> list[tuple[int, ...]]:
    tokens = [penalized(model, REPEATING, params) for params in ADJUSTED]
    assert len({*tokens, model.greedy(REPEATING, 40)}) == len(ADJUSTED) + 1
    return tokens


@pytest.mark.usefixtures("depth", "short_slices")
@pytest.mark.parametrize("policy", ["serial", "mixed:3", "auto"])
def test_greedy_tokens_equal_the_oracle_s(model: Model, expected_adjusted: list[tuple[int, ...]], policy: str) -> None:
    plain = greedy()
    # Seven requests in four slots: a slot's next sequence starts from its own marks, or from none.
    with make(model, policy, max_num_seqs=4) as engine:
        outputs = engine.generate([REPEATING] * 7, [plain, *ADJUSTED, plain], use_tqdm=False)
    plain_tokens = model.greedy(REPEATING, 40)
    assert [tokens_of(o)[0] for o in outputs] == [plain_tokens, *expected_adjusted, plain_tokens]


@pytest.mark.usefixtures("depth")
def test_a_preempted_request_goes_on_with_its_counts(model: Model, expected_adjusted: list[tuple[int, ...]]) -> None:
    # Four blocks besides that of padding; each sequence grows into a third.
    with make_engine(model.folder, max_model_len=64, kv_cache_bytes=5 * block_bytes(model)) as engine:
        outputs = engine.generate([REPEATING] * len(ADJUSTED), ADJUSTED, use_tqdm=False)
        assert engine.stats().num_preemptions > 0
    assert [tokens_of(output)[0] for output in outputs] == expected_adjusted


def test_each_sample_counts_its_own_tokens(engine: Engine) -> None:
    params = SamplingParams(seed=3, n=3, max_tokens=30, ignore_eos=True, presence_penalty=2, logit_bias={9: 9.0})
    banned = SamplingParams(seed=3, n=3, max_tokens=30, ignore_eos=True, logit_bias={9: -100.0})
    together, without = engine.generate([REPEATING, REPEATING], [params, banned], use_tqdm=False)
    singles = [
        engine.generate(
            REPEATING,
            SamplingParams(seed=3 + i, max_tokens=30, ignore_eos=True, presence_penalty=2, logit_bias={9: 9.0}),
            use_tqdm=False,
        )[0]
        for i in range(3)
    ]
    assert tokens_of(together) == [tokens_of(single)[0] for single in singles]
    assert all(9 in tokens for tokens in tokens_of(together))
    assert not any(9 in tokens for tokens in tokens_of(without))


def test_bad_words_do_not_appear_but_their_beginnings_do(model: Model, engine: Engine) -> None:
    plain = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    assert engine.tokenizer is not None
    (text,) = [o.outputs[0].text for o in engine.generate([[5, 17]], plain, use_tqdm=False)]
    ids = tokens_of(engine.generate([5, 17], plain, use_tqdm=False)[0])[0]
    # A pair of tokens that is generated, and that its text is tokenized into.
    words = ["".join(engine.tokenizer.decode([i]) for i in pair) for pair in itertools.pairwise(ids)]
    word = next(
        w
        for w, pair in zip(words, itertools.pairwise(ids), strict=True)
        if w.strip() == w and tuple(engine.tokenizer.encode(w, False)) == pair
    )
    (output,) = engine.generate([5, 17], dataclasses.replace(plain, bad_words=[word]), use_tqdm=False)
    without, first = tokens_of(output)[0], engine.tokenizer.encode(word, False)[0]
    assert word in text
    assert word not in output.outputs[0].text
    assert first in without
    # Up to the word, nothing changes; from there the second best token follows.
    common = next(i for i, (a, b) in enumerate(zip(ids, without, strict=True)) if a != b)
    assert model.logits([5, 17, *without[:common]])[-1].topk(2).indices.tolist() == [ids[common], without[common]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a" * 200], "1 to 17 tokens each"),
        ([f"{a}{b}{c}" for a in "xyz" for b in "QWERTYUIOP" for c in "QWERTYUIOP"], "at most 256 of them"),
    ],
)
def test_bad_words_that_have_no_room_are_refused(engine: Engine, words: list[str], message: str) -> None:
    with pytest.raises(SamplingParamsError, match=message):
        engine.generate([1], SamplingParams(bad_words=words), use_tqdm=False)


@pytest.mark.parametrize("masked", [False, True])
def test_logprobs_are_those_of_the_unadjusted_logits(model: Model, engine: Engine, masked: bool) -> None:
    best = model.greedy(REPEATING, 1)[0]
    adjusted = {"min_tokens": 1, "stop_token_ids": [best]} if masked else {"logit_bias": {best: -100.0}}
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1, **adjusted)
    (output,) = engine.generate(REPEATING, params, use_tqdm=False)
    (completion,) = output.outputs
    assert completion.logprobs is not None
    assert completion.token_ids != (best,)
    assert completion.logprobs[0].top[0][0] == best


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, ""),
        ({"skip_special_tokens": False}, "<|im_start|><|im_start|>"),
        ({"skip_special_tokens": False, "stop_token_ids": [256]}, ""),  # what ends the text is never part of it
    ],
)
def test_special_tokens_in_the_text(fields: dict[str, Any], text: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, logit_bias={256: 100}, **fields)
    with make_engine() as engine:
        (output,) = engine.generate([[1, 2]], params, use_tqdm=False)
    assert output.outputs[0].text == text
