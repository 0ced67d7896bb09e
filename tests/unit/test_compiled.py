"""The compiled halves of a layer: Dynamo's part, since Inductor takes half a minute on a CPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is published for Linux only")

from bullet_graph.graphs import triton_norm
from bullet_graph.graphs.compiled import compiled_functions
from bullet_graph.graphs.triton_norm import TritonNormOps
from bullet_graph.models.decoder import Decoder, LayerFunctions, eager_functions
from bullet_graph.models.kv_cache import KVCache
from bullet_graph.models.loader import dummy_weights
from bullet_graph.models.ops import LayerOps, TorchOps
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.rope import cos_sin_table

CPU, CONFIG, MAX_ROWS = torch.device("cpu"), PRESETS["tiny"], 16


@pytest.fixture
def decoder() -> Decoder:
    weights = dummy_weights(CONFIG, dtype=torch.float32, device=CPU, seed=3)
    cache = KVCache(CONFIG, num_blocks=1, block_tokens=16, dtype=torch.float32, device=CPU)
    return Decoder(CONFIG, weights, cache, cos_sin_table(CONFIG, 16, CPU))


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, object]]]:
    """What Inductor would have been asked for."""
    seen: list[dict[str, object]] = []
    compile_half = torch.compile

    def recorded(
        half: Callable[..., Any], *, options: dict[str, object], **settings: Any
    ) -> Callable[..., Any]:
        seen.append(options)
        return compile_half(half, backend="aot_eager", **settings)

    monkeypatch.setattr(torch, "compile", recorded)
    torch._dynamo.reset()
    yield seen
    torch._dynamo.reset()


def halves(functions: LayerFunctions, decoder: Decoder, rows: int) -> tuple[torch.Tensor, ...]:
    layer, generator = decoder.weights.layers[0], torch.Generator().manual_seed(rows)
    x, residual, attended = (
        torch.randn(rows, width, generator=generator)
        for width in (CONFIG.hidden_size, CONFIG.hidden_size, CONFIG.q_size)
    )
    eps = CONFIG.rms_norm_eps
    return (
        *functions.attention_input(x, residual, layer.input_norm, layer.qkv, layer.qkv_bias, eps),
        *functions.attention_output(
            attended, residual, layer.o, layer.post_norm, layer.gate_up, layer.down, eps
        ),
    )


@pytest.mark.parametrize("fused", [None, TritonNormOps(pdl=False)])
def test_once_for_all_rows(
    decoder: Decoder, options: list[dict[str, object]], fused: LayerOps | None
) -> None:
    functions = compiled_functions(decoder, TorchOps(), MAX_ROWS, fused=fused)
    assert options == [{"triton.enable_pdl": False}] * 2
    assert set(options[0]) <= set(torch._inductor.list_options())
    # What would be compiled anew is an error here.
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (2, 5, MAX_ROWS):
            for out, expected in zip(
                halves(functions, decoder, rows),
                halves(eager_functions(TorchOps()), decoder, rows),
                strict=True,
            ):
                torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_norms_are_one_operator(decoder: Decoder, options: list[dict[str, object]]) -> None:  # noqa: ARG001
    calls: list[torch.Tensor] = []
    add_rms_norm = triton_norm.TritonOps.add_rms_norm

    def recorded(self: Any, x: torch.Tensor, *rest: Any) -> Any:
        calls.append(x)
        return add_rms_norm(self, x, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_norm.TritonOps, "add_rms_norm", recorded)
        functions = compiled_functions(decoder, TorchOps(), MAX_ROWS, fused=TritonNormOps(pdl=False))
        calls.clear()
        halves(functions, decoder, 4)
    assert [type(x) for x in calls] == [torch.Tensor] * 2


def test_inductor_s_launches_are_an_option(decoder: Decoder, options: list[dict[str, object]]) -> None:
    compiled_functions(decoder, TorchOps(), MAX_ROWS, pdl=True)
    assert options == [{"triton.enable_pdl": True}] * 2
