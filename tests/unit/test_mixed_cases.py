"""The forwards that ``bench/kernels/mixed_step.py`` times, and how it adds their kernels up."""

from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is published for Linux only")

from bench.kernels.mixed_cases import CASES, Case, Prompt, rows_of
from bench.kernels.mixed_step import by_kernel, table
from bench.kernels.step_breakdown import Kernel
from bullet_graph.config import KV_BLOCK_TOKENS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_are_those_of_the_case_and_no_block_is_anybody_else_s(case: Case) -> None:
    rows = rows_of(case, vocab_size=1000)
    assert len(rows.positions) == case.rows
    assert (
        rows.kv_lens.tolist()
        == [p.cached + p.tokens for p in case.prompts] + [case.context] * case.decode_rows
    )
    assert [int(b - a) for a, b in pairwise(rows.kv_indptr)] == [
        -(-n // KV_BLOCK_TOKENS) for n in rows.kv_lens
    ]
    assert sorted(rows.kv_indices.tolist()) == list(range(1, case.num_blocks))
    assert len(np.unique(rows.kv_slots)) == case.rows
    assert rows.kv_slots.min() >= KV_BLOCK_TOKENS, "the padding block is nobody's"
    assert len(rows.sample_rows) == case.decode_rows + sum(prompt.ends for prompt in case.prompts)
    slots = [*rows.decode_slots.tolist(), *rows.sample_slots.tolist()]
    assert max(slots) < case.decode_rows + len(case.prompts)


def test_prompts_that_go_on_come_first() -> None:
    rows = rows_of(Case("any", (Prompt(20, 30), Prompt(10)), 2, 40), vocab_size=1000)
    assert (rows.num_continued, rows.num_prefill) == (1, 2)
    assert rows.positions.tolist() == [*range(30, 50), *range(10), 39, 39]


def test_kernels_by_hand() -> None:
    kernels = [
        # Out of order; two at once count for the earlier one alone until it ends; 5 µs between.
        Kernel("b" * 90, 15.0, 25.0),
        Kernel("a", 0.0, 10.0),
        Kernel("a", 20.0, 31.0),
    ]
    assert by_kernel(kernels, 2) == [
        {"kernel": "a", "launches": 1.0, "us": 8.0},
        {"kernel": "b" * 70, "launches": 0.5, "us": 5.0},
        {"kernel": "(none)", "launches": 0.0, "us": 2.5},
    ]
    assert by_kernel([], 2) == []


def test_the_table_compares_with_the_engine_s_way() -> None:
    ways = [{"name": "pieces", "ms": 20.0, "host_ms": 2.0}, {"name": "other", "ms": 19.0, "host_ms": 6.0}]
    kernel = {"kernel": "gemm", "launches": 4.0, "us": 1500.0}
    case = {"case": {"name": "conv"}, "rows": 64, "ways": ways, "by_kernel": [kernel]}
    text = "\n".join(table({"cases": [case | {"device": {"power_w": {"mean": 690.4}}}]}))
    assert "conv, 64 rows, 690 W" in text
    assert "19.000 ms  -5.00 %  host  6.000 ms" in text
    assert "1500.0 us    4.0 x gemm" in text
    assert "conv, 64 rows\n" in "\n".join(table({"cases": [case | {"device": {"power_w": None}}]}))
