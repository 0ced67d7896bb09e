"""Penalties and biases of whole requests: against ``transformers``, over preemptions, with steps in flight."""

import dataclasses
import itertools

import pytest
import torch
from engines import Model, at_any_depth, block_bytes, make, make_engine, short_slices, tokens_of
from transformers import RepetitionPenaltyLogitsProcessor

from bullet_graph import SamplingParams
from bullet_graph.errors import SamplingParamsError

PROMPT = [5, 17, 300, 8, 17]


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
    tokens = [penalized(model, PROMPT, params) for params in ADJUSTED]
    assert len({*tokens, model.greedy(PROMPT, 40)}) == len(ADJUSTED) + 1
    return tokens


@at_any_depth
@short_slices
@pytest.mark.parametrize("policy", ["serial", "mixed:3", "auto"])
def test_greedy_tokens_equal_the_oracle_s(model: Model, expected_adjusted: list[tuple[int, ...]], policy: str) -> None:
    plain = greedy()
    # Seven requests in four slots: a slot's next sequence starts from its own marks, or from none.
    with make(model, policy, max_num_seqs=4) as engine:
        outputs = engine.generate([PROMPT] * 7, [plain, *ADJUSTED, plain], use_tqdm=False)
    plain_tokens = model.greedy(PROMPT, 40)
    assert [tokens_of(o)[0] for o in outputs] == [plain_tokens, *expected_adjusted, plain_tokens]


@at_any_depth
def test_a_preempted_request_goes_on_with_its_counts(model: Model, expected_adjusted: list[tuple[int, ...]]) -> None:
    # Four blocks besides that of padding; each sequence grows into a third.
    with make_engine(model.folder, max_model_len=64, kv_cache_bytes=5 * block_bytes(model)) as engine:
        outputs = engine.generate([PROMPT] * len(ADJUSTED), ADJUSTED, use_tqdm=False)
        assert engine.stats().num_preemptions > 0
    assert [tokens_of(output)[0] for output in outputs] == expected_adjusted


def test_each_sample_counts_its_own_tokens(model: Model) -> None:
    params = SamplingParams(seed=3, n=3, max_tokens=30, ignore_eos=True, presence_penalty=2, logit_bias={9: 9.0})
    banned = SamplingParams(seed=3, n=3, max_tokens=30, ignore_eos=True, logit_bias={9: -100.0})
    with make_engine(model.folder) as engine:
        together, without = engine.generate([PROMPT, PROMPT], [params, banned], use_tqdm=False)
        singles = [
            engine.generate(
                PROMPT,
                SamplingParams(seed=3 + i, max_tokens=30, ignore_eos=True, presence_penalty=2, logit_bias={9: 9.0}),
                use_tqdm=False,
            )[0]
            for i in range(3)
        ]
    assert tokens_of(together) == [tokens_of(single)[0] for single in singles]
    assert all(9 in tokens for tokens in tokens_of(together))
    assert not any(9 in tokens for tokens in tokens_of(without))


def test_bad_words_do_not_appear_but_their_beginnings_do(model: Model) -> None:
    plain = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with make_engine(model.folder) as engine:
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
def test_bad_words_that_have_no_room_are_refused(model: Model, words: list[str], message: str) -> None:
    with make_engine(model.folder) as engine, pytest.raises(SamplingParamsError, match=message):
        engine.generate([1], SamplingParams(bad_words=words), use_tqdm=False)


@pytest.mark.parametrize("masked", [False, True])
def test_logprobs_are_those_of_the_unadjusted_logits(model: Model, masked: bool) -> None:
    best = model.greedy(PROMPT, 1)[0]
    adjusted = {"min_tokens": 1, "stop_token_ids": [best]} if masked else {"logit_bias": {best: -100.0}}
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1, **adjusted)
    with make_engine(model.folder) as engine:
        (output,) = engine.generate(PROMPT, params, use_tqdm=False)
    (completion,) = output.outputs
    assert completion.logprobs is not None
    assert completion.token_ids != (best,)
    assert completion.logprobs[0].top[0][0] == best
