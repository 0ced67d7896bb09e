"""Synthetic workloads against the figures of the traces that they stand for."""

import functools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.fit_workloads import fit
from bullet_graph.errors import WorkloadError
from bullet_graph.workloads import WorkloadRequest, load_workload
from bullet_graph.workloads.load import DEFAULT_SYNTHETIC_REQUESTS
from bullet_graph.workloads.synthetic import SYNTHETIC_NAMES, LengthTables, synthetic_workload

# Of the full Azure traces of 2023 (19,366 and 8,819 requests): mean, p50, p90 and the largest length, the
# rank correlation between the two lengths, and the mean of their product (tokens²).
CONV_PROMPT, CONV_OUTPUT = (1154.7, 1020, 2734.5, 14_050), (211.1, 129, 424, 1000)
CODE_PROMPT, CODE_OUTPUT = (2047.8, 1469, 5187.6, 7437), (27.88, 13, 55, 1899)


@functools.cache
def lengths_of(name: str, num_requests: int = 5000, seed: int = 0) -> npt.NDArray[np.int64]:
    requests = synthetic_workload(name, num_requests, seed).requests
    return np.array([(request.prompt_tokens, request.output_tokens) for request in requests])


def ranks(values: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Ranks in which equal values share the mean of their places."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


@pytest.mark.parametrize(("num_requests", "tolerance"), [(5000, 0.06), (50_000, 0.03)])
@pytest.mark.parametrize(
    ("name", "column", "figures"),
    [("conv", 0, CONV_PROMPT), ("conv", 1, CONV_OUTPUT), ("code", 0, CODE_PROMPT), ("code", 1, CODE_OUTPUT)],
)
def test_lengths_follow_the_trace(
    name: str, column: int, figures: tuple[float, ...], num_requests: int, tolerance: float
) -> None:
    mean, p50, p90, largest = figures
    lengths = lengths_of(name, num_requests)[:, column]
    assert lengths.mean() == pytest.approx(mean, rel=tolerance)
    assert np.median(lengths) == pytest.approx(p50, rel=tolerance)
    assert np.percentile(lengths, 90) == pytest.approx(p90, rel=tolerance)
    assert 1 <= lengths.min() <= lengths.max() <= largest


@pytest.mark.parametrize("name", ["conv", "code"])
def test_prompt_and_output_depend_on_each_other_as_in_the_trace(name: str) -> None:
    lengths = lengths_of(name, num_requests=20_000)
    correlation = np.corrcoef(ranks(lengths[:, 0]), ranks(lengths[:, 1]))[0, 1]
    assert correlation == pytest.approx({"conv": 0.0728, "code": -0.0215}[name], abs=0.02)
    assert lengths.prod(axis=1).mean() == pytest.approx({"conv": 223_497, "code": 57_235}[name], rel=0.05)


def test_conv_outputs_by_prompt_length() -> None:
    # The trace's medians: 161 for the shortest tenth of prompts, 406 at 1,020–1,130 tokens, 58 above 2,734.
    prompts, outputs = lengths_of("conv", num_requests=20_000).T
    assert np.median(outputs[prompts <= 207]) == pytest.approx(161, rel=0.05)
    assert np.median(outputs[(prompts > 1020) & (prompts <= 1130)]) == pytest.approx(406, rel=0.05)
    assert np.median(outputs[prompts > 2734]) == pytest.approx(58, rel=0.05)


@pytest.mark.parametrize(
    ("name", "of_prompts", "of_outputs"),
    [
        ("longdoc", (5800, 12_700, 32_000), (150, 397, 2000)),
        ("sharegpt", (1730, 5696, 7000), (415, 834, 1000)),
        ("arxiv", (7059, 12_985, 15_000), (208, 371, 1000)),
    ],
)
def test_lognormal_lengths(name: str, of_prompts: tuple[int, ...], of_outputs: tuple[int, ...]) -> None:
    lengths = lengths_of(name, seed=1).T
    for each, (median, p90, most) in zip(lengths, (of_prompts, of_outputs), strict=True):
        assert np.percentile(each, (50, 90)) == pytest.approx((median, p90), rel=0.05)
        assert 1 <= each.min() <= each.max() <= most
    assert abs(np.corrcoef(*map(ranks, lengths))[0, 1]) < 0.05


def test_chat() -> None:
    requests = synthetic_workload("chat", 20_000, 0).requests
    first = [request for request in requests if request.follows is None]
    assert len(requests) / len(first) == pytest.approx(3.5, rel=0.03)
    thoughts = np.array([request.follows.think_s for request in requests if request.follows is not None])
    answers = np.array([request.output_tokens for request in requests])
    messages = np.array([r.prompt_tokens - (r.follows.num_tokens if r.follows else r.prefix_tokens) for r in requests])
    for values, median, mean, most in ((thoughts, 7, 10, 120), (answers, 150, 250, 2000), (messages, 40, 80, 4000)):
        assert np.median(values) == pytest.approx(median, rel=0.05)
        assert values.mean() == pytest.approx(mean, rel=0.1)
        assert 0 < values.min() < values.max() <= most
    # Zipf's law: the k-th system prompt is as popular as the first one divided by k.
    shares = np.bincount([name for request in first for name in request.prefix_ids]) / len(first)
    assert len(shares) == 20
    assert shares[:3] * (1, 2, 3) == pytest.approx([shares[0]] * 3, rel=0.15)
    assert len({(request.prefix_ids, request.prefix_tokens) for request in first}) == 20
    turns = np.diff([index for index, request in enumerate(requests) if request.follows is None])
    # Geometric: of the conversations that have k turns, the same share ends there.
    assert (turns == 1).mean() == pytest.approx(1 / 3.5, rel=0.08)
    assert (turns == 2).sum() / (turns > 1).sum() == pytest.approx(1 / 3.5, rel=0.08)
    assert turns.max() == 20


@pytest.mark.parametrize("name", SYNTHETIC_NAMES)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**63 - 1), fewer=st.integers(1, 50), more=st.integers(0, 50))
def test_a_request_depends_on_seed_and_index_alone(name: str, seed: int, fewer: int, more: int) -> None:
    short = synthetic_workload(name, fewer, seed)
    long = synthetic_workload(name, fewer + more, seed)
    assert len(short.requests) == fewer
    assert long.requests[:fewer] == short.requests


@pytest.mark.parametrize("name", SYNTHETIC_NAMES)
def test_seeds_and_fields(name: str) -> None:
    workload = load_workload(f"synthetic:{name}", num_requests=20, seed=3)
    assert workload == synthetic_workload(name, 20, seed=3)
    assert workload.requests != synthetic_workload(name, 20, seed=4).requests
    assert workload.name == f"synthetic:{name}"
    assert (workload.requests[0].arrival_s, workload.requests[0].prompt_token_ids) == (None, None)
    assert workload.shares_prefixes == (name == "chat")
    assert len(load_workload(workload.name, num_requests=None).requests) == DEFAULT_SYNTHETIC_REQUESTS


def test_errors() -> None:
    for name, count, seed in (("conv", 0, 0), ("conv", 10**12, 0), ("longdoc", 1, -1)):
        with pytest.raises(WorkloadError, match=f"got {count} requests and seed {seed}"):
            synthetic_workload(name, count, seed)


class TestLengthTables:
    def test_ends_of_the_unit_square_are_the_extremes(self) -> None:
        tables = LengthTables((0.0, 0.5, 1.0), (10, 100, 1000), ((1, 2, 4), (8, 16, 32)))
        points = np.array([[0.0, 0.0], [0.25, 0.25], [0.5, 0.5], [np.nextafter(1, 0), np.nextafter(1, 0)]])
        # At a quarter: the geometric means of 10 and 100 (32) and of 1 and 2 (1.4, so 1 token).
        assert tables.lengths(points).tolist() == [[10, 1], [32, 1], [100, 16], [1000, 32]]

    def test_fit_separates_the_shares(self) -> None:
        requests = [WorkloadRequest(prompt, 1000 - prompt, None) for prompt in range(1, 101)]
        tables = fit(requests[::-1], (0.0, 0.5, 1.0), num_shares=2)
        assert tables.prompt_tokens == (1, 50, 100)
        assert tables.output_tokens == ((950, 974, 999), (900, 924, 949))

    def test_fit_of_an_excerpt_reproduces_it(self) -> None:
        requests = load_workload("azure:code", num_requests=None).requests
        tables = fit(requests, (*np.linspace(0, 1, 41).tolist(),), num_shares=5)
        recorded = np.array([(request.prompt_tokens, request.output_tokens) for request in requests])
        sampled = tables.lengths(np.random.default_rng(0).random((20_000, 2)))
        assert np.percentile(sampled, (10, 50, 90), axis=0) == pytest.approx(
            np.percentile(recorded, (10, 50, 90), axis=0), rel=0.05, abs=1
        )
