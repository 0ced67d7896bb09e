"""Biases, penalties, bans and bitmasks of logits, against their definitions and between the two samplers."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from examples import few
from hypothesis import example, given
from hypothesis import strategies as st
from sampling_rows import settings_row

from bullet_graph.kernels.sampler import SamplingState, sample
from bullet_graph.runtime.rows import adjustments_row
from bullet_graph.runtime.step import Adjustments
from bullet_graph.sampling_params import SamplingParams

pytest.importorskip("triton", reason="Triton is published for Linux only")

from bullet_graph.kernels.triton_ops import sample as triton_sample

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 40

token_ids = st.integers(0, VOCAB - 1)
adjustments = st.builds(
    Adjustments,
    params=st.builds(
        SamplingParams,
        logit_bias=st.dictionaries(token_ids, st.floats(-100, 100, width=16), max_size=6),
        repetition_penalty=st.sampled_from([1.0, 0.5, 1.25, 8.0]),
        frequency_penalty=st.sampled_from([0.0, 0.25, -1.5, 2.0]),
        presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    ),
    bad_words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=9).map(tuple),
    prompt_token_ids=st.lists(token_ids, min_size=1, max_size=9).map(lambda ids: np.array(ids, np.int32)),
    output_token_ids=st.lists(token_ids, max_size=9).map(lambda ids: np.array(ids, np.int32)),
)


def adjusted(scores: np.ndarray, by: Adjustments, output: list[int], allowed: set[int]) -> np.ndarray:
    """The definitions, token by token."""
    counts, params, result = Counter(output), by.params, scores.astype(np.float64)
    for token_id in range(VOCAB):
        score = result[token_id] + dict(params.biases).get(token_id, 0.0)
        if token_id in counts or token_id in by.prompt_token_ids:
            score = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
        score -= params.frequency_penalty * counts[token_id] + params.presence_penalty * (token_id in counts)
        ends = (word for word in by.bad_words if word[-1] == token_id)
        is_banned = any(word[:-1] == tuple(output[len(output) - len(word) + 1 :]) for word in ends)
        result[token_id] = -np.inf if is_banned or token_id not in allowed else score
    return result


def state_of(by: Adjustments, allowed: set[int] | None, **changes: object) -> SamplingState:
    """One slot of two."""
    state = SamplingState(2, VOCAB, DEVICE)
    state.settings[1] = settings_row(adjustments=by, uses_bitmask=allowed is not None, **changes).to(DEVICE)
    state.write_adjustments(1, adjustments_row(by, VOCAB))
    bits = np.zeros(64, dtype=np.uint8)
    bits[list(allowed or ())] = 1
    state.bitmasks[1] = torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32)).to(DEVICE)
    return state


RESUMED = Adjustments(
    SamplingParams(logit_bias={2: 100, 7: 90}),
    bad_words=((1, 2), (1, 7, 2)),
    prompt_token_ids=np.array([9], np.int32),
    output_token_ids=np.array([0, 1], np.int32),
)
"""A sequence that goes on after a preemption: bad words begin in what it has put out."""

OFTEN = Adjustments(
    SamplingParams(logit_bias={4: 100, 5: 90}, presence_penalty=2.0),
    bad_words=(),
    prompt_token_ids=np.array([9], np.int32),
    output_token_ids=np.full(9, 4, np.int32),
)
"""The penalty is the same for one time and for nine."""
NEGATIVE = replace(OFTEN, params=SamplingParams(repetition_penalty=8.0))  # with an odd seed, no score is positive


@few(20)
@example(by=RESUMED, allowed=None, seed=0, sampler=sample)
@example(by=RESUMED, allowed=None, seed=0, sampler=triton_sample)
@example(by=OFTEN, allowed=None, seed=0, sampler=sample)
@example(by=OFTEN, allowed=None, seed=0, sampler=triton_sample)
@example(by=NEGATIVE, allowed=None, seed=1, sampler=sample)
@example(by=NEGATIVE, allowed=None, seed=1, sampler=triton_sample)
@given(
    by=adjustments,
    allowed=st.none() | st.sets(token_ids, min_size=20),
    seed=st.integers(0, 2**20),
    sampler=st.sampled_from([sample, triton_sample]),
)
def test_greedy_tokens_are_those_of_the_definitions(
    by: Adjustments, allowed: set[int] | None, seed: int, sampler: object
) -> None:
    # Launched one after the other, with nothing from the host between them: counts grow on the device.
    state, output = state_of(by, allowed), by.output_token_ids.tolist()
    slots = torch.ones(1, dtype=torch.int32, device=DEVICE)
    rng = np.random.default_rng(seed)
    end = len(by.prompt_token_ids) + len(output)
    for position in range(end, end + 5):
        # Quarters are exact in float32; of near ties after a division, either is right.
        scores = rng.permutation(np.arange(-20, 20)) / 4.0 - 30 * (seed % 2)
        scores[:4] += 10  # the tokens of bad words
        expected = adjusted(scores, by, output, set(range(VOCAB)) if allowed is None else allowed)
        logits = torch.tensor(scores, dtype=torch.float32, device=DEVICE)[None]
        before = logits.clone()
        (token,) = sampler(logits, slots, torch.full_like(slots, position), state).tolist()  # type: ignore[operator]
        assert expected[token] == pytest.approx(expected.max(), abs=1e-4)
        assert torch.equal(logits, before), "log-probabilities are read from them afterwards"
        output.append(token)


@pytest.mark.parametrize(
    "cuts", [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_p": 0.9, "min_p": 0.1}, {"top_k": 4, "top_p": 0.6}]
)
def test_both_samplers_draw_the_same_tokens_from_adjusted_logits(cuts: dict[str, float]) -> None:
    by = Adjustments(
        SamplingParams(
            logit_bias={3: 5.0, 7: -4.0}, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.2
        ),
        bad_words=((0,), (3,), (1, 3), (5, 6), (6, 5)),
        prompt_token_ids=np.array([1, 2, 9], np.int32),
        output_token_ids=np.array([4, 4, 5], np.int32),
    )
    states = [state_of(by, set(range(30)), temperature=1.2, seed=99, **cuts) for _ in range(2)]
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(8)).to(DEVICE) * 3
    slots = torch.tensor([1, 0], dtype=torch.int32, device=DEVICE)  # the other row's logits stay as they are
    drawn = set()
    for position in range(4):
        tokens = [
            sampler(logits, slots, slots + position, state).tolist()
            for sampler, state in zip((sample, triton_sample), states, strict=True)
        ]
        assert tokens[0] == tokens[1]
        assert tokens[0][1] == int(logits[1].argmax())
        drawn.add(tokens[0][0])
    assert torch.equal(states[0].adjustments, states[1].adjustments)
    assert not drawn & {0, 3, *range(30, VOCAB)}
