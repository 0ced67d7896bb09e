"""Forwards with FP8 weights, keys and values: kernels against the reference, and what follows from the format."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from decoders import VARIANTS, new_decoder, tensors_of
from fakes.perf_tables import LLAMA_8B, h200_table
from forward_rows import make_rows

from bullet_graph.config import EngineConfig
from bullet_graph.errors import BulletGraphError, PerfTableError
from bullet_graph.hardware import H200
from bullet_graph.kernels.fp8 import FP8
from bullet_graph.kernels.memory import KVCache
from bullet_graph.kernels.ops import HeadNorms, RowInputs, TorchOps
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.layers import eager_functions
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.weights import scale_cached
from bullet_graph.perf.predict import TableModel
from bullet_graph.perf.roofline import (
    Fp8Weights,
    Roofline,
    decode_weight_bytes,
    kv_cache_bytes_per_token,
    touched_experts,
)
from bullet_graph.perf.table import format_name, own_table_file_name, shape_numbers
from bullet_graph.runtime import resolve
from bullet_graph.runtime.resolve import Runtime, check_device
from bullet_graph.runtime.self_check import reference_logits

pytest.importorskip("triton", reason="Triton is published for Linux only")

from bullet_graph.kernels.triton_ops import TritonOps

CONFIG = replace(PRESETS["tiny"], num_layers=2, num_heads=4, num_kv_heads=2, qk_norm=True)


# ---- keys and values ----


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs Triton's interpreter")
@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("norms", [False, True])
def test_rope_writes_fp8_that_saturates_and_hands_on_what_is_cached(norms: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    config, rows = CONFIG, 7
    qkv = torch.randn(rows, config.q_size + 2 * config.kv_size, generator=generator)
    qkv[2] *= 400
    inputs = RowInputs(
        positions=torch.arange(rows, dtype=torch.int32),
        kv_slots=torch.randperm(32, generator=generator)[:rows].int(),
        cos_sin=torch.randn(40, config.head_dim, generator=generator),
    )
    head_norms = HeadNorms(torch.rand(config.head_dim), torch.rand(config.head_dim), 1e-6) if norms else None
    results = []
    for ops in (TorchOps(), TritonOps()):
        cache = KVCache(
            replace(config, fp8_kv=True), num_blocks=8, block_tokens=4, dtype=torch.float32, device=torch.device("cpu")
        ).layer(0)
        own = qkv.clone()
        q = ops.rope_and_cache(own, inputs, cache, head_norms)
        k, v = own[:, config.q_size :].chunk(2, dim=1)
        for cached, handed_on in zip(cache, (k, v), strict=True):
            assert cached.dtype is FP8
            written = cached.flatten(0, 1)[inputs.kv_slots].float().flatten(1)
            assert torch.equal(written, handed_on)
            assert written.abs().max() <= 448
        assert v[2].abs().max() == 448
        results.append((q, k, v))
    for expected, found in zip(*results, strict=True):
        # A step where the rotation's last digit differs.
        torch.testing.assert_close(found, expected, rtol=2**-3, atol=1e-5)
        assert (found != expected).float().mean() < (1 if expected is results[0][0] else 0.01)


@pytest.mark.parametrize("variant", ["plain", "qwen2", "gemma3", "olmo2", "fp8", "fp8-blocks"])
@torch.inference_mode()
def test_scales_of_keys_and_values_change_what_is_cached_alone(variant: str) -> None:
    def run(decoder: Decoder) -> torch.Tensor:
        rows = make_rows([(0, 9, True)], [], num_blocks=4, block_tokens=4, blocks=np.arange(1, 4))
        return reference_logits(decoder, eager_functions(TorchOps()), rows.token_ids, rows)

    plain, scaled = (new_decoder(VARIANTS[variant], num_blocks=4, block_tokens=4) for _ in range(2))
    for layer in scaled.weights.layers:
        scale_cached(scaled.config, layer, 4.0, 0.5)
    # Powers of two: not a digit changes.
    assert torch.equal(run(plain), run(scaled))
    for index in range(plain.config.num_layers):
        for one, other, scale in zip(plain.cache.layer(index), scaled.cache.layer(index), (4.0, 0.5), strict=True):
            assert torch.equal(one, other * scale)
            assert one.any()


# ---- memory, times and tables ----


def llama(**formats: object) -> ModelConfig:
    return replace(PRESETS["llama-3.1-8b"], **formats)


def test_bytes_follow_the_format() -> None:
    plain, fp8, blocks = llama(), llama(fp8=Fp8Weights()), llama(fp8=Fp8Weights(blocks=True))
    in_layers = 32 * (6144 * 4096 + 4096 * 4096 + 28672 * 4096 + 4096 * 14336)
    channels = 32 * (6144 + 4096 + 28672 + 4096)
    num_blocks = 32 * (48 * 32 + 32 * 32 + 224 * 32 + 32 * 112)
    for config, saved in ((fp8, in_layers - 4 * channels), (blocks, in_layers - 4 * num_blocks)):
        assert config.num_parameters == plain.num_parameters
        assert plain.weight_bytes(2) - config.weight_bytes(2) == saved
        step = decode_weight_bytes(plain, batch_size=3, dtype_bytes=2)
        assert step - decode_weight_bytes(config, batch_size=3, dtype_bytes=2) == saved
    assert kv_cache_bytes_per_token(llama(fp8_kv=True), dtype_bytes=2) == 65536
    assert kv_cache_bytes_per_token(plain, dtype_bytes=2) == 131072


@pytest.mark.parametrize(
    "variant", ["plain", "fp8", "fp8-blocks", "fp8 experts", "fp8-blocks experts", "shared expert"]
)
def test_weights_and_cache_take_the_memory_that_the_ledger_counts(variant: str) -> None:
    config = replace(VARIANTS[variant], fp8_kv=variant != "plain")
    decoder = new_decoder(config, num_blocks=3)
    assert sum(tensor.nbytes for tensor in tensors_of(decoder.weights).values()) == config.weight_bytes(4)
    allocated = decoder.cache.layer(0)[0].untyped_storage().nbytes()
    assert allocated == 3 * 16 * kv_cache_bytes_per_token(config, dtype_bytes=4)


def test_the_roofline_of_fp8() -> None:
    plain, fp8, both = (
        Roofline(H200, config) for config in (llama(), llama(fp8=Fp8Weights()), llama(fp8=Fp8Weights(), fp8_kv=True))
    )
    # As measured: 1.85 to 1.93 times the rate of the products, where there are many rows.
    products = [model.prefill(1 << 16, 0).ms for model in (plain, fp8)]
    assert products[0] / products[1] == pytest.approx(1230 / 665, rel=0.01)
    assert 0.5 < fp8.decode(1, 1).ms / plain.decode(1, 1).ms < 0.62
    kv_ms = [model.decode(64, 64 * 8192).ms - model.decode(64, 64).ms for model in (fp8, both)]
    assert kv_ms[0] == pytest.approx(2 * kv_ms[1], rel=1e-3)
    assert both.decode(64, 64 * 8192).ms < fp8.decode(64, 64 * 8192).ms


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "mixtral-8x7b"])
def test_a_step_reads_the_scales_and_bytes_of_touched_experts(name: str) -> None:
    plain, fp8 = PRESETS[name], PRESETS[f"{name}-fp8"]
    assert fp8 == replace(plain, fp8=Fp8Weights())
    hidden, size = plain.hidden_size, plain.expert_intermediate_size
    qkv = plain.q_size + 2 * plain.kv_size
    of_rows = qkv * hidden + hidden * plain.q_size - 4 * (qkv + hidden)
    of_expert = 3 * hidden * size - 4 * (2 * size + hidden)
    for rows in (1, 8, 4096):
        steps = [decode_weight_bytes(model, batch_size=rows, dtype_bytes=2) for model in (plain, fp8)]
        saved = plain.num_layers * (of_rows + touched_experts(plain, rows) * of_expert)
        assert steps[0] - steps[1] == pytest.approx(saved, rel=1e-9)
    assert plain.weight_bytes(2) - fp8.weight_bytes(2) == plain.num_layers * (of_rows + plain.num_experts * of_expert)
    rooflines = [Roofline(H200, model) for model in (plain, fp8)]
    overhead_ms = plain.num_layers * H200.layer_overhead_ms
    decode, prefill = (
        [f(r) - overhead_ms for r in rooflines]
        for f in (lambda r: r.decode(64, 64).ms, lambda r: r.prefill(16384, 1.0).ms)
    )
    assert 0.5 < decode[1] / decode[0] < 0.6
    assert 0.5 < prefill[1] / prefill[0] < 0.62


def test_a_table_is_of_one_format() -> None:
    formats = {
        "bfloat16": {},
        "bfloat16-fp8_channels": {"fp8": Fp8Weights(is_stored=True)},
        "bfloat16-fp8_blocks-fp8_without_down-fp8_kv": {
            "fp8": Fp8Weights(blocks=True, plain=("down",)),
            "fp8_kv": True,
        },
    }
    for name, changes in formats.items():
        numbers = shape_numbers(llama(**changes))
        assert format_name("bfloat16", numbers) == name
        assert own_table_file_name(replace(h200_table().key, shape=numbers)).endswith(f"_{name}.json")
        if changes:
            with pytest.raises(PerfTableError, match="another model or number format"):
                TableModel(h200_table(), llama(**changes))
    assert shape_numbers(llama()) == shape_numbers(LLAMA_8B)


@pytest.mark.parametrize(
    ("capability", "dtype", "formats", "problem"),
    [
        ((8, 0), torch.bfloat16, {"fp8": Fp8Weights()}, r"compute capability 8\.9 or above, found 8\.0"),
        ((8, 6), torch.bfloat16, {"fp8_kv": True}, r"found 8\.6"),
        ((9, 0), torch.float16, {"fp8": Fp8Weights()}, "dtype=bfloat16 on a GPU, found float16"),
        ((9, 0), torch.bfloat16, {"fp8": Fp8Weights(), "intermediate_size": 14344}, "multiples of 16"),
        ((8, 9), torch.bfloat16, {"fp8": Fp8Weights(), "fp8_kv": True}, None),
        ((9, 0), torch.float16, {"fp8_kv": True}, None),
    ],
)
def test_what_a_gpu_cannot_run(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    formats: dict[str, object],
    problem: str | None,
) -> None:
    monkeypatch.setattr(resolve, "_require_cuda_libraries", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    runtime = Runtime(llama(**formats), "llama-3.1-8b", None, torch.device("cuda", 0), dtype, 1024)
    with nullcontext() if problem is None else pytest.raises(BulletGraphError, match=problem):
        check_device(EngineConfig(model="llama-3.1-8b"), runtime)
