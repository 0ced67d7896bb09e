"""The reference sampler: its random numbers, its cuts, and the frequencies that come out."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling_rows import settings_row

from bullet_graph.kernels.sampler import SamplingState, philox_uniform, sample, token_logprobs

WORD = 0xFFFFFFFF


def philox_4x32_10(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox-4x32-10 in plain integers, as the paper writes it (Salmon et al. 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def uniform(seed: int, position: int, token_id: int) -> float:
    word = philox_4x32_10((token_id, position, 0, 0), (seed & WORD, seed >> 32))[0]
    return ((word >> 9) + 0.5) / 2**23


def make_state(num_slots: int = 1, seed: int = 5, **changes: object) -> SamplingState:
    """Slots with the same settings; the seed of slot i is ``seed + i``."""
    # They have room for 50 tokens; where logits have fewer, the rest is not read.
    state = SamplingState(num_slots, 50, torch.device("cpu"))
    for slot in range(num_slots):
        state.settings[slot] = settings_row(seed=seed + slot, **({"temperature": 1.0} | changes))
    return state


def draw(scores: list[float], positions: list[int], state: SamplingState, slot: int = 0) -> list[int]:
    """One token a position, all from the same logits."""
    logits = torch.tensor(scores).repeat(len(positions), 1)
    return sample(logits, torch.full((len(positions),), slot), torch.tensor(positions), state).tolist()


def kept_tokens(
    scores: list[float], temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[set[int], float]:
    """Tokens that the cuts leave, one definition after the other, and how close a call it was.

    Ties are those of float32: scores that differ by less than it resolves are equal after the division.
    """
    scaled = (np.float32(scores) / np.float32(temperature)).tolist()
    kept = set(range(len(scores)))
    margin = math.inf
    if top_k > 0:
        threshold = sorted(scaled, reverse=True)[min(top_k, len(scaled)) - 1]
        kept = {i for i in kept if scaled[i] >= threshold}
    if top_p < 1:
        total = sum(math.exp(scaled[i]) for i in kept)
        mass, threshold = 0.0, -math.inf
        for i in sorted(kept, key=lambda i: -scaled[i]):
            mass += math.exp(scaled[i]) / total
            margin = min(margin, abs(mass - top_p))
            if mass >= top_p:
                threshold = scaled[i]
                break
        kept = {i for i in kept if scaled[i] >= threshold}
    if min_p > 0:
        # As logarithms: a share just below the largest one's is 1 in floating point.
        below, limit = {i: max(scaled) - scaled[i] for i in kept}, -math.log(min_p)
        margin = min([margin, *(abs(gap - limit) for gap in below.values() if gap > 0)])
        kept = {i for i, gap in below.items() if gap <= limit}
    return kept, margin


# ---- random numbers ----


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD,) * 4, (WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_tests_own_philox_gives_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    # Random123's known answers: zeros, ones, and digits of pi.
    assert philox_4x32_10(counter, key) == expected
    if counter[1:] == (0, 0, 0) and key == (0, 0):
        assert philox_uniform(0, 0, 1).tolist() == [((expected[0] >> 9) + 0.5) / 2**23]


@settings(max_examples=100)
@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**31 - 1), count=st.integers(1, 50))
def test_uniform_numbers_are_philox_of_seed_position_and_token(seed: int, position: int, count: int) -> None:
    numbers = philox_uniform(seed, position, count)
    assert numbers.dtype == np.float32
    assert numbers.tolist() == [uniform(seed, position, token_id) for token_id in range(count)]


# ---- choice ----

GRID = st.integers(-6, 6).map(lambda n: n / 2)


@settings(max_examples=200)
@given(
    scores=st.lists(st.one_of(GRID, st.floats(-5, 5, width=32)), min_size=1, max_size=10),
    temperature=st.one_of(st.sampled_from([0.5, 1.0, 2.0]), st.floats(0.25, 4)),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 5, 10, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.05, 0.3, 0.62, 0.9, 0.99]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.2, 0.7, 1.0]),
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**20),
)
def test_the_token_is_the_gumbel_max_of_what_the_cuts_leave(
    scores: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> None:
    kept, margin = kept_tokens(scores, temperature, top_k, top_p, min_p)
    assume(margin > 1e-4)
    noisy = {i: scores[i] / temperature - math.log(-math.log(uniform(seed, position, i))) for i in kept}
    best = max(noisy, key=noisy.__getitem__)
    assume(all(noisy[best] - value > 1e-3 for i, value in noisy.items() if i != best))
    state = make_state(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    assert draw(scores, [position], state) == [best]


@pytest.mark.parametrize(
    "cuts", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.95, "min_p": 0.1}]
)
def test_all_that_the_cuts_leave_is_drawn_and_nothing_else(cuts: dict[str, float]) -> None:
    scores = [0.0, 1.0, -1.0, 2.0, 0.5, 0.5, -0.5, 1.5]
    kept, _ = kept_tokens(scores, 1.0, **cuts)  # type: ignore[arg-type]
    assert set(draw(scores, list(range(1000)), make_state(seed=2024, **cuts))) == kept


def test_a_row_does_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    rows, vocab_size = 12, 50
    logits = torch.randn(rows, vocab_size, generator=generator)
    positions = torch.arange(100, 100 + rows)
    state = make_state(rows, seed=7, top_p=0.9)
    slots = torch.randperm(rows, generator=generator)
    together = sample(logits, slots, positions, state)
    order = torch.randperm(rows, generator=generator)
    assert torch.equal(sample(logits[order], slots[order], positions[order], state), together[order])
    for row in range(rows):
        one = slice(row, row + 1)
        assert torch.equal(sample(logits[one], slots[one], positions[one], state), together[one])


def test_tokens_are_left_for_the_next_step() -> None:
    state = make_state(4)
    state.last_token[:] = torch.tensor([7, 8, 9, 10])
    tokens = sample(torch.randn(2, 30), torch.tensor([3, 1]), torch.tensor([0, 0]), state)
    assert state.last_token.tolist() == [7, int(tokens[1]), 9, int(tokens[0])]
    assert tokens.dtype == state.last_token.dtype == torch.int32


def test_greedy_ignores_seed_and_cuts_and_takes_the_first_of_equals() -> None:
    for seed in range(20):
        assert draw([0.0, 3.0, 1.0, 3.0], [seed], make_state(temperature=0.0, seed=seed, top_k=2, top_p=0.1)) == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_tokens_do_not_occur_before_their_position(temperature: float) -> None:
    scores = [50.0, 40.0, 0.0, 0.0]
    state = make_state(temperature=temperature, masked_token_ids=(0, 1), masked_until=10)
    assert set(draw(scores, list(range(10)), state)) <= {2, 3}
    assert draw(scores, [10, 11], state) == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampling_leaves_the_logits_as_they_were(dtype: torch.dtype) -> None:
    # Log-probabilities are read from them afterwards.
    logits = torch.randn(2, 20).to(dtype)
    before = logits.clone()
    state = make_state(2, masked_token_ids=(3,), masked_until=10, top_k=5, temperature=0.5)
    sample(logits, torch.tensor([0, 1]), torch.tensor([1, 2]), state)
    assert torch.equal(logits, before)


# ---- log-probabilities ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_logprobs_are_those_of_the_whole_softmax(
    count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bullet_graph.sampling_params.SCORED_ROWS", 2)
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(2)).to(dtype)
    tokens = torch.tensor([9, 0, 4], dtype=torch.int32)
    chosen, top_ids, top = token_logprobs(logits, tokens, count)
    exact = torch.log_softmax(logits.double(), -1)
    for row, token in enumerate(tokens.tolist()):
        assert float(chosen[row]) == pytest.approx(float(exact[row, token]), abs=1e-6)
        best = sorted(range(10), key=lambda i: -float(exact[row, i]))[:count]
        assert top_ids[row].tolist() == best
        np.testing.assert_allclose(top[row].numpy(), exact[row, best].numpy(), atol=1e-6)
    assert top.shape == top_ids.shape == (3, count)
