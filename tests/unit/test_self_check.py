"""The self-check: logits of decode steps against the uncompiled model's, and the forwards that a build runs."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from decoders import new_decoder
from engines import Launches, before_launch

from bullet_graph.kernels.ops import TorchOps
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.layers import LayerFunctions, eager_functions
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.weights import checkpoint_views
from bullet_graph.perf.roofline import Fp8Weights
from bullet_graph.runtime.capture_build import exercise
from bullet_graph.runtime.cpu import CpuExecutor
from bullet_graph.runtime.rows import Rows
from bullet_graph.runtime.self_check import FP8_TOLERANCE, ROUTED_TOLERANCE, SelfCheck, SelfCheckPoint, reference_logits
from bullet_graph.runtime.step import Int32Array

CONFIG = PRESETS["tiny"]
EAGER = eager_functions(TorchOps())


def tiny_decoder(dtype: torch.dtype = torch.float32, num_blocks: int = 40) -> Decoder:
    return new_decoder(CONFIG, num_blocks=num_blocks, max_len=4096, dtype=dtype)


def scaled(factor: float) -> LayerFunctions:
    def output(*arguments: Any) -> Any:
        x, residual = EAGER.attention_output(*arguments)
        return x * factor, residual

    return LayerFunctions(EAGER.ops, EAGER.attention_input, output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_model_itself_holds(dtype: torch.dtype) -> None:
    decoder = tiny_decoder(dtype)
    points = SelfCheck(decoder, partial(reference_logits, decoder, EAGER), (1, 2, 33))(sample=False)
    assert all(point.holds for point in points)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.001), (torch.bfloat16, 1.3)])
def test_another_model_does_not(dtype: torch.dtype, factor: float) -> None:
    decoder = tiny_decoder(dtype)
    (point,) = SelfCheck(decoder, partial(reference_logits, decoder, scaled(factor)), (8,))(sample=False)
    assert not point.holds
    assert f"batch size 8: relative error {point.relative_error:.2g}, tolerance" in str(point)


@pytest.mark.parametrize("formats", [{"fp8": Fp8Weights()}, {"fp8_kv": True}])
def test_fp8_has_a_tolerance_of_its_own(formats: dict[str, Any]) -> None:
    decoder = new_decoder(replace(CONFIG, **formats), num_blocks=40, dtype=torch.bfloat16)
    (point,) = SelfCheck(decoder, partial(reference_logits, decoder, EAGER), (8,))(sample=False)
    assert point.holds
    assert point.tolerance == FP8_TOLERANCE
    (point,) = SelfCheck(decoder, lambda *_: torch.randn(8, CONFIG.vocab_size), (8,))(sample=False)
    assert not point.holds


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_may_send_rows_to_another_expert(dtype: torch.dtype) -> None:
    new = partial(new_decoder, PRESETS["tiny-moe"], num_blocks=140, max_len=4096)
    decoder, exact = new(dtype=dtype), new(dtype=torch.float32)
    views = (checkpoint_views(PRESETS["tiny-moe"], one.weights) for one in (exact, decoder))
    for (_, target), (_, source) in zip(*views, strict=True):
        target.copy_(source)
    sizes = (1, 4, 8, 16, 32, 56, 64, 128)
    points = SelfCheck(decoder, partial(reference_logits, exact, EAGER), sizes)(sample=False)
    assert all(point.holds for point in points)
    assert max(point.relative_error for point in points) < ROUTED_TOLERANCE / 4

    def last_row_zeroed(token_ids: Int32Array, rows: Rows) -> torch.Tensor:
        logits = reference_logits(exact, EAGER, token_ids, rows)
        logits[-1] = 0
        return logits

    def scaled_by_a_third(token_ids: Int32Array, rows: Rows) -> torch.Tensor:
        return 1.33 * reference_logits(exact, EAGER, token_ids, rows)

    for wrong in (last_row_zeroed, scaled_by_a_third):
        assert not any(point.holds for point in SelfCheck(decoder, wrong, sizes)(sample=False))


def test_every_compared_row_counts() -> None:
    decoder = tiny_decoder()

    def last_row_wrong(token_ids: Int32Array, rows: Rows) -> torch.Tensor:
        logits = reference_logits(decoder, EAGER, token_ids, rows)
        logits[-1] *= 1.1
        return logits

    (point,) = SelfCheck(decoder, last_row_wrong, (33,))(sample=False)
    assert point.relative_error == pytest.approx(0.1, rel=1e-3)


def test_later_steps_read_what_earlier_ones_cached() -> None:
    decoder = tiny_decoder()

    def forgetful(token_ids: Int32Array, rows: Rows) -> torch.Tensor:
        for index in range(CONFIG.num_layers):
            for cache in decoder.cache.layer(index):
                cache.zero_()
        return reference_logits(decoder, EAGER, token_ids, rows)

    (point,) = SelfCheck(decoder, forgetful, (4,))(sample=False)
    assert not point.holds


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_hold(value: float) -> None:
    (point,) = SelfCheck(tiny_decoder(), lambda *_: torch.full((4, CONFIG.vocab_size), value), (4,))(sample=False)
    assert point == SelfCheckPoint(4, float("inf"), 1e-4)


@pytest.mark.parametrize(
    ("sizes", "sample", "compared"),
    [
        ((1, 2, 4, 8, 16, 17), True, [1, 4, 16]),
        ((1, 2, 4, 16, 17), False, [1, 2, 4, 16]),
        *((sizes, True, list(sizes)) for sizes in ((1, 2), (7,), ())),
    ],
)
def test_sizes(sizes: tuple[int, ...], sample: bool, compared: list[int]) -> None:
    decoder = tiny_decoder(num_blocks=17)
    points = SelfCheck(decoder, partial(reference_logits, decoder, EAGER), sizes)(sample=sample)
    assert [point.batch_size for point in points] == compared
    assert all(point.holds for point in points)


@pytest.mark.parametrize(
    ("num_blocks", "max_rows", "max_num_seqs", "prompts", "mixed"),
    [(40, 513, 8, 6, 16), (400, 4096, 200, 9, 40), (3, 512, 1, 3, 0)],
)
def test_forwards_of_each_kind_are_run(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int, max_rows: int, max_num_seqs: int, prompts: int, mixed: int
) -> None:
    launched: Launches = []
    before_launch(monkeypatch, lambda *launch: launched.append(launch))
    executor = CpuExecutor(tiny_decoder(num_blocks=num_blocks), max_num_seqs=max_num_seqs)
    exercise(executor, max_rows=max_rows, max_num_seqs=max_num_seqs, max_model_len=4096, num_kv_blocks=num_blocks)
    alone = {(len(s.prefill.token_ids), p.lane) for s, p in launched if s.prefill and not s.decode}
    assert len(alone) == 2 * prompts, "each length on each lane"
    assert sum(step.prefill is not None and step.decode is not None for step, _ in launched) == mixed
    for step, placement in launched:
        assert step.decode is None or placement.lane == "decode"
        rows = 0
        for batch in (step.prefill, step.decode):
            if batch is not None:
                assert 0 < batch.kv_indices.min() <= batch.kv_indices.max() < num_blocks
                assert batch.slots.max() < max_num_seqs
                rows += len(getattr(batch, "token_ids", batch.slots))
        assert 0 < rows <= max_rows
