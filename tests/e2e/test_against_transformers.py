"""The engine against ``transformers`` on the same weights: greedy tokens equal, log-probabilities close."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, write_checkpoint
from engines import Model, block_bytes

from bullet_graph import Engine, EngineStats, SamplingParams, Slo
from bullet_graph.slo import NO_TARGETS

PROMPT_LENGTHS = (1, 2, 5, 16, 17, 31, 40, 70, 3, 64, 9, 23, 33, 12, 48, 80)
OUTPUT_TOKENS = 24
WINDOWED = ("llama", "mistral")
"""Without and with a window; how prompts are divided makes no other difference to a family."""


@dataclass(frozen=True)
class Oracle(Model):
    prompts: list[list[int]]
    known: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def check(self, prompt: Sequence[int], tokens: tuple[int, ...]) -> list[float]:
        """Make sure that each token is the greedy one after those before it; returns their log-probabilities."""
        whole = (*prompt, *tokens)
        if whole not in self.known:
            self.known[whole] = self.logits(whole)[len(prompt) - 1 : -1].log_softmax(-1)
        best = self.known[whole].max(-1)
        assert tokens == tuple(best.indices.tolist())
        assert len(tokens) == OUTPUT_TOKENS
        return list(best.values.tolist())


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp(request.param)
    model = Model(folder, write_checkpoint(folder, request.param, seed=1, tokenizer=False).eval())
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, model.network.config.vocab_size, size=n).tolist() for n in PROMPT_LENGTHS]
    return Oracle(folder, model.network, prompts)


def check(oracle: Oracle, **settings: object) -> EngineStats:
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=2)
    with Engine(str(oracle.folder), device="cpu", **settings) as engine:
        outputs, stats = engine.generate(oracle.prompts, params, use_tqdm=False), engine.stats()
    for prompt, output in zip(oracle.prompts, outputs, strict=True):
        completion = output.outputs[0]
        expected = oracle.check(prompt, completion.token_ids)
        assert completion.finish_reason == "length"
        np.testing.assert_allclose([entry.logprob for entry in completion.logprobs], expected, atol=1e-4)
        assert tuple(entry.top[0][0] for entry in completion.logprobs) == completion.token_ids
    return stats


@pytest.mark.parametrize(
    ("oracle", "policy"),
    [(family, policy) for family in FAMILIES for policy in ("serial", "mixed:7")]
    + [(family, policy) for family in WINDOWED for policy in ("serial:7", "mixed:1", "mixed:64", "mixed")],
    indirect=["oracle"],
)
def test_greedy_tokens_and_logprobs_equal(oracle: Oracle, policy: str) -> None:
    check(oracle, policy=policy, max_num_seqs=16)


@pytest.mark.usefixtures("short_slices")
@pytest.mark.parametrize("oracle", WINDOWED, indirect=True)
@pytest.mark.parametrize(
    ("chunk", "slo"),
    [
        (7, Slo(ttft_ms=1e6, tpot_ms=50)),
        (64, NO_TARGETS),
        (64, Slo(ttft_ms=1e-3, tpot_ms=1e-3)),
        (8192, Slo(ttft_ms=1e6, tpot_ms=50)),
    ],
    ids=str,
)
def test_greedy_tokens_and_logprobs_equal_under_a_planner(oracle: Oracle, chunk: int, slo: Slo) -> None:
    check(oracle, policy="auto", max_num_batched_tokens=chunk, max_num_seqs=6, slo=slo, perf_table="roofline")


@pytest.mark.parametrize(
    ("oracle", "policy"),
    [("llama", "serial"), ("llama", "mixed:7"), ("mistral", "mixed:7"), ("mistral", "auto"), ("qwen3", "auto")],
    indirect=["oracle"],
)
def test_forced_preemption_changes_nothing(oracle: Oracle, policy: str) -> None:
    # Ten blocks besides the padding block: one sequence of 112 tokens fits, sixteen do not.
    limits = {"max_num_seqs": 16, "max_model_len": 112, "kv_cache_bytes": 11 * block_bytes(oracle)}
    stats = check(oracle, policy=policy, perf_table="roofline", **limits)
    assert stats.num_preemptions > 0
    assert stats.kv_blocks_used == 0


@pytest.mark.parametrize("oracle", ["mistral"], indirect=True)
@pytest.mark.parametrize(
    ("policy", "num_blocks", "num_prompts"), [("serial", 5, 1), ("mixed", 5, 2), ("mixed", 8, 3), ("auto", 8, 3)]
)
def test_a_window_needs_no_cache_for_sequences(oracle: Oracle, policy: str, num_blocks: int, num_prompts: int) -> None:
    # A window of 21 tokens, two chunks of 16, and a block that is begun: five blocks instead of 13 to 25.
    prompts = [prompt * repeats for prompt, repeats in zip(oracle.prompts[-1:-4:-1], (4, 4, 15), strict=True)]
    prompts = prompts[:num_prompts]
    limits = {"max_model_len": 400, "max_num_batched_tokens": 16, "max_num_seqs": 3}
    limits["kv_cache_bytes"] = (1 + num_blocks) * block_bytes(oracle)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    with Engine(str(oracle.folder), device="cpu", policy=policy, perf_table="roofline", **limits) as engine:
        outputs, stats = engine.generate(prompts, params, use_tqdm=False), engine.stats()
    for prompt, output in zip(prompts, outputs, strict=True):
        oracle.check(prompt, output.outputs[0].token_ids)
    assert stats.kv_blocks_used == 0
    assert stats.kv_blocks_peak <= num_blocks
