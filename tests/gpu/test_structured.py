"""Structured outputs on the GPU: captured decode steps with masks, among free rows, in every policy."""

import re

import pytest

from bullet_graph import Engine, SamplingParams, StructuredOutputs

pytestmark = pytest.mark.gpu

PATTERN = "[a-z]{3}-[0-9]{20,30}(x|yz)"
FREE = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("policy", ["serial", "mixed:64", "auto"])
def test_outputs_follow_their_grammar_among_free_rows(policy: str) -> None:
    follows = StructuredOutputs(regex=PATTERN)
    coded = [
        SamplingParams(seed=i, temperature=i % 2, n=3, max_tokens=80, structured_outputs=follows) for i in range(8)
    ]
    prompts = [[(7 * i + j) % 500 for j in range(20 + 90 * i)] for i in range(8)]
    with Engine(
        "tiny", device="cuda", policy=policy, perf_table="roofline", max_model_len=1024, max_num_seqs=24
    ) as engine:
        outputs = engine.generate(prompts * 2, [*coded, *[FREE] * 8], use_tqdm=False)
        assert engine.stats().kv_blocks_used == 0
    for output in outputs[:8]:
        assert all(re.fullmatch(PATTERN, sample.text) for sample in output.outputs), output
        assert {sample.finish_reason for sample in output.outputs} == {"stop"}
    assert all(len(output.outputs[0].token_ids) == 40 for output in outputs[8:])
