"""Log-probabilities of prompts on the CPU, against ``transformers``."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from engines import PROMPTS, Model, at_any_depth, block_bytes, make, make_engine, run_to_end, short_slices, tokens_of

from bullet_graph import RequestOutput, SamplingParams
from bullet_graph.engine.output import OutputKind

SCORE = SamplingParams(max_tokens=0, prompt_logprobs=2)


def assert_scored(model: Model, prompt: Sequence[int], output: RequestOutput, count: int) -> None:
    assert output.prompt_logprobs is not None
    first, *entries = output.prompt_logprobs
    assert first is None
    assert [entry.token_id for entry in entries if entry] == list(prompt[1:])
    for row, entry in zip(torch.log_softmax(model.logits(prompt), -1), entries, strict=False):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        values = [value for _, value in entry.top]
        np.testing.assert_allclose(values, row.topk(count).values.tolist(), atol=1e-4)
        np.testing.assert_allclose(values, [float(row[token_id]) for token_id, _ in entry.top], atol=1e-4)


@at_any_depth
@short_slices
@pytest.mark.parametrize("policy", ["serial", "mixed:7", "auto"])
def test_every_token_of_a_prompt_is_scored(model: Model, expected: list[tuple[int, ...]], policy: str) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    scored = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=3, logprobs=1)
    params = [scored, scored, SCORE, greedy, scored, SCORE]
    with make(model, policy, max_num_seqs=4) as engine:
        outputs = engine.generate(PROMPTS, params, use_tqdm=False)
    for prompt, output, asked, tokens in zip(PROMPTS, outputs, params, expected, strict=True):
        if asked.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            assert_scored(model, prompt, output, asked.prompt_logprobs)
        assert tokens_of(output) == [tokens if asked.max_tokens else ()]
        assert output.outputs[0].finish_reason == "length"


@at_any_depth
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


def test_a_prompt_of_one_token_has_nothing_to_score(model: Model) -> None:
    with make_engine(model.folder) as engine:
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
