"""The compiled parts of a layer: what Inductor is given, since it takes half a minute on a CPU itself."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from decoders import VARIANTS, new_decoder
from ranks_in_threads import Table, ThreadCommunicator
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="Triton is published for Linux only")

from bullet_graph.graphs import compiled
from bullet_graph.kernels.ops import TorchOps
from bullet_graph.kernels.triton_ops import TritonOps
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.layers import LayerFunctions, eager_functions
from bullet_graph.models.presets import PRESETS

CPU, CONFIG, MAX_ROWS = torch.device("cpu"), PRESETS["tiny"], 6


@pytest.fixture(params=["plain"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return new_decoder(VARIANTS[request.param], num_blocks=1, max_len=16)


NAMES = ("plain", "gemma3", "granite", "olmo2", "shared expert", "skewed router", "fp8", "fp8-blocks", "fp8 experts")


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, object]]]:
    """With which each half is compiled, here without Inductor."""
    seen: list[dict[str, object]] = []
    compile_part = torch.compile

    def recorded(part: Callable[..., Any], **given: Any) -> Callable[..., Any]:
        seen.append(given)
        return compile_part(part, backend="eager", **given)  # export traces as Inductor does

    monkeypatch.setattr(torch, "compile", recorded)
    torch._dynamo.reset()
    yield seen
    torch._dynamo.reset()


def parts(functions: LayerFunctions, decoder: Decoder, rows: int) -> tuple[torch.Tensor, ...]:
    layer, generator = decoder.weights.layers[0], torch.Generator().manual_seed(rows)
    x, residual, attended = (
        torch.randn(rows, width, generator=generator)
        for width in (CONFIG.hidden_size, CONFIG.hidden_size, CONFIG.q_size)
    )
    eps = CONFIG.rms_norm_eps
    return (
        *functions.attention_input(x, residual, *layer.input_weights, eps),
        *functions.attention_output(attended, residual, *layer.output_weights, eps),
    )


def assert_eager_parts(functions: LayerFunctions, decoder: Decoder, rows: int) -> None:
    """Make sure that the parts compute what the uncompiled ones do."""
    expected = parts(eager_functions(TorchOps()), decoder, rows)
    for found, wanted in zip(parts(functions, decoder, rows), expected, strict=True):
        if decoder.config.fp8 is None:
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        else:  # what lies on the border of two numbers may be rounded to either
            assert (found - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize(
    ("decoder", "fused"),
    [(name, compiled.CompiledOps()) for name in NAMES]
    + [(name, compiled.TritonNormOps()) for name in ("plain", "gemma3", "fp8")],
    indirect=["decoder"],
)
def test_once_for_all_rows(decoder: Decoder, settings: list[dict[str, object]], fused: TorchOps) -> None:
    functions = compiled.compiled_functions(decoder, TorchOps(), fused, MAX_ROWS)
    assert settings == [{"dynamic": False, "fullgraph": True}] * 2
    # What would be compiled anew is an error here.
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (2, 5, MAX_ROWS):
            assert_eager_parts(functions, decoder, rows)


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize(
    ("decoder", "fused", "max_rows"),
    [(name, compiled.TritonNormOps(), (2, 3, MAX_ROWS)[i % 3]) for i, name in enumerate(NAMES)]
    + [
        ("plain", compiled.CompiledOps(), MAX_ROWS),
        ("granite", compiled.CompiledOps(), 2),
        ("fp8", compiled.CompiledOps(), 3),
    ],
    indirect=["decoder"],
)
def test_exported_for_all_rows(decoder: Decoder, fused: TorchOps, max_rows: int) -> None:
    def compiler(part: compiled.LayerPart) -> compiled.CompiledPart:
        program = compiled.exported(part)
        assert not program.state_dict, "weights are inputs: all layers have the same parts"
        assert not program.constants
        given = [value for value in tree_leaves(part.arguments) if not isinstance(value, torch.Tensor)]
        assert all(value is None or isinstance(value, int | float) for value in given)
        run = program.module()
        return lambda *arguments: run(*(value for value in tree_leaves(arguments) if isinstance(value, torch.Tensor)))

    with torch.inference_mode():
        functions = compiled.compiled_functions(decoder, TorchOps(), fused, max_rows, compiler)
        for rows in {2, max_rows - 1, max_rows} - {1}:
            assert_eager_parts(functions, decoder, rows)


@pytest.mark.parametrize("decoder", NAMES, indirect=True)
def test_collectives_stand_between_the_parts(decoder: Decoder, settings: list[dict[str, object]]) -> None:
    between, traced = TorchOps(ThreadCommunicator(Table(1), 0)), decoder.config == VARIANTS["granite"]
    compiler = compiled.compile_now if traced else lambda part: part.function
    functions = compiled.compiled_functions(decoder, between, compiled.CompiledOps(), MAX_ROWS, compiler)
    assert len(settings) == 2 * traced
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_eager_parts(functions, decoder, 5)


@pytest.mark.usefixtures("settings")
def test_the_norm_s_kernel_is_called_inside_compiled_parts(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Tensor] = []
    add_rms_norm = TritonOps.add_rms_norm

    def recorded(ops: TritonOps, x: torch.Tensor, *rest: Any) -> Any:
        calls.append(x)
        return add_rms_norm(ops, x, *rest)

    monkeypatch.setattr(TritonOps, "add_rms_norm", recorded)
    functions = compiled.compiled_functions(decoder, TritonOps(), compiled.TritonNormOps(), MAX_ROWS)
    assert isinstance(functions.ops, TritonOps)
    calls.clear()
    parts(functions, decoder, 4)
    assert [type(x) for x in calls] == [torch.Tensor] * 2
