"""FP8 on the GPU: kernels against emulations in float32, captured steps, and a pretrained model's perplexity."""

import pytest
import torch
from decoders import VARIANTS, new_decoder
from engines import prompt_scores
from smollm2 import TEXT, smollm2_folder
from transformers import AutoTokenizer

from bullet_graph import Engine, SamplingParams
from bullet_graph.kernels.fp8 import dequantize_weight, linear_fp8, quantize_weight
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.kernels.launch import quick
from bullet_graph.kernels.ops import Linear, RowInputs, TorchOps
from bullet_graph.kernels.triton_fp8 import can_gate, matmul_fp8
from bullet_graph.kernels.triton_ops import TritonOps
from bullet_graph.models.layers import eager_functions

SHAPES = ((6144, 4096), (4096, 14336), (28672, 1024), (256, 384), (272, 576), (208, 144))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=torch.device("cuda")).bfloat16()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 4096), (300, 14336), (17, 28672), (5, 576)])
@torch.inference_mode()
def test_quantized_activations(rows: int, width: int, group: int | None) -> None:
    x, residual, gate_up, weight = random(rows, width), random(rows, width), random(rows, 2 * width), random(width)
    plain, ours, columns = TorchOps(), TritonOps(), group or width
    pairs = [
        (ours.quantize(x, columns), plain.quantize(x, columns)),
        *(
            (ours.act_and_mul_quantized(gate_up, g, columns), plain.act_and_mul_quantized(gate_up, g, columns))
            for g in (False, True)
        ),
        (
            ours.add_rms_norm_quantized(x, residual, weight, 1e-5, columns)[0],
            plain.add_rms_norm_quantized(x, residual, weight, 1e-5, columns)[0],
        ),
    ]
    for found, expected in pairs:
        torch.testing.assert_close(found.scales, expected.scales, rtol=1e-2, atol=1e-9)
        # Neighbours, where a number lies on their border: 1 to 3 %, of 64 numbers up to 5 %.
        assert relative_error(found.values, expected.values) < 0.06


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 300, 2048])
@torch.inference_mode()
def test_products(rows: int, shape: tuple[int, int], bias: bool, blocks: bool) -> None:
    weight, scale = quantize_weight(random(*shape), blocks=blocks)
    linear = Linear(weight, random(shape[0]) if bias else None, scale, 128 if blocks else shape[1])
    x = TorchOps().quantize(random(rows, shape[1]), linear.group or 0)
    expected = linear_fp8(x._replace(dtype=torch.float32), weight, scale, linear.bias)
    # bfloat16's rounding, and sums with fewer digits.
    assert relative_error(TritonOps().linear(x, linear), expected) < 5e-3
    out = torch.full_like(expected, torch.nan).bfloat16()
    assert TritonOps().linear(x, linear, out) is out
    assert relative_error(out, expected) < 5e-3
    found = matmul_fp8(x, linear)
    assert relative_error(found, expected) < 5e-3
    assert torch.equal(found, matmul_fp8(x, linear))


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("shape", SHAPES[2:], ids=str)
@pytest.mark.parametrize("rows", [2, 17, 64])
@torch.inference_mode()
def test_swiglu_in_the_product(rows: int, shape: tuple[int, int], blocks: bool) -> None:
    weight, scale = quantize_weight(random(*shape), blocks=blocks)
    linear = Linear(weight, random(shape[0]), scale, 128 if blocks else shape[1])
    x = TorchOps().quantize(random(rows, shape[1]), linear.group or 0)
    assert can_gate(x, linear)
    expected = TorchOps().glu(x._replace(dtype=torch.float32), linear, gelu=blocks)
    found = TritonOps().glu(x, linear, gelu=blocks)
    assert isinstance(found, torch.Tensor)
    assert relative_error(found, expected) < 5e-3


@pytest.mark.parametrize(
    ("rows", "form"), [(1, "channels"), (1, "blocks"), *((rows, "16 bits") for rows in (1, 2, 5, 8))]
)
@pytest.mark.parametrize("shape", [each for each in SHAPES if each[1] % 128 == 0], ids=str)
@torch.inference_mode()
def test_few_rows(shape: tuple[int, int], rows: int, form: str) -> None:
    weight, scale = quantize_weight(random(*shape), blocks=form == "blocks")
    bias, x, ops = random(shape[0]), random(rows, shape[1]), TritonOps()
    linear = Linear(weight, bias, scale, 128 if form == "blocks" else shape[1])
    wide = dequantize_weight(weight, scale)
    if form == "16 bits":
        linear = Linear(wide.bfloat16(), bias)
        wide = linear.weight.float()
    assert ops.group_for(linear, x) is None
    exact = Linear(wide, bias.float())
    assert relative_error(ops.linear(x, linear), TorchOps().linear(x.float(), exact)) < 5e-3
    for gelu in (False, True):
        assert relative_error(ops.glu(x, linear, gelu), TorchOps().glu(x.float(), exact, gelu)) < 5e-3


@pytest.mark.parametrize("rows", [1, 2, 17, 64])
@pytest.mark.parametrize("variant", ["plain", "fp8", "fp8-blocks", "fp8 experts", "fp8-blocks experts"])
@torch.inference_mode()
def test_launches_that_overlap_compute_the_same(variant: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = new_decoder(VARIANTS[variant], num_blocks=8, max_len=16, dtype=torch.bfloat16, device="cuda")
    layer, cache = decoder.weights.layers[1], decoder.cache.layer(1)
    places = torch.arange(rows, device="cuda", dtype=torch.int32)
    inputs = RowInputs(places % 16, places, decoder.cos_sin[0])

    def run() -> tuple[torch.Tensor, ...]:
        functions, (x, residual) = eager_functions(ops), start
        for _ in range(30):
            qkv, residual = functions.attention_input(x, residual, *layer.input_weights, 1e-5)
            q = ops.rope_and_cache(qkv, inputs, cache, layer.attention.head_norms)
            x, residual = functions.attention_output(q.flatten(1), residual, *layer.output_weights, 1e-5)
            residual = residual / residual.norm(dim=1, keepdim=True)
        return x, residual, *(part.float() for part in cache)

    start, ops = (random(rows, 128), random(rows, 128)), TritonOps()
    with monkeypatch.context() as patch:
        patch.setattr(Gpu, "overlaps_launches", False)
        quick.cache_clear()
        expected_parts = run()
    quick.cache_clear()
    run()  # a capture can load no kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # launched one by one, each would be done before the next comes
        found_parts = run()
    for _ in range(20):
        for half in cache:
            half.zero_()
        graph.replay()
    for found, expected in zip(found_parts, expected_parts, strict=True):
        assert torch.equal(found, expected)
        assert expected.isfinite().all()


@pytest.mark.parametrize(
    "formats", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}]
)
def test_a_pretrained_model_s_perplexity_is_that_of_the_cpu(
    request: pytest.FixtureRequest, formats: dict[str, str]
) -> None:
    folder = smollm2_folder(request.config)
    ids = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"][:500]
    found = {}
    for device in ("cuda", "cpu"):
        with Engine(
            str(folder), device=device, max_model_len=1024, max_num_seqs=4, kv_cache_bytes=2**27, **formats
        ) as engine:
            found[device] = -float(prompt_scores(engine, ids).mean())
    # The noise of rounding to FP8 differs, its size does not.
    assert found["cuda"] == pytest.approx(found["cpu"], rel=0.02)


@pytest.mark.parametrize("policy", ["serial", "mixed:64", "auto", "split:48"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_engines_generate(policy: str, cuda_graphs: bool) -> None:
    settings = {"policy": policy, "cuda_graphs": cuda_graphs, "perf_table": "roofline", "kv_cache_dtype": "fp8"}
    prompts = [[(7 * i + 3 * j) % 1000 for j in range(length)] for i, length in enumerate((1, 17, 100, 600, 33))]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with Engine("qwen3-0.6b-fp8", max_num_seqs=8, max_model_len=1024, kv_cache_bytes=2**28, **settings) as engine:
        outputs = [output.outputs[0].token_ids for output in engine.generate(prompts, params, use_tqdm=False)]
        assert all(len(tokens) == 24 for tokens in outputs)
        # Scored in one forward each, every token is the best or nearly: noise decides among equals. FP8's is 0.14 of
        # the logits, which costs up to 0.55; a wrong token costs 4.
        texts = [prompt + list(tokens) for prompt, tokens in zip(prompts, outputs, strict=True)]
        for scored in engine.generate(texts, SamplingParams(max_tokens=0, prompt_logprobs=1), use_tqdm=False):
            for entry in scored.prompt_logprobs[-24:]:
                assert entry is not None
                assert entry.logprob > entry.top[0][1] - 1.0
        assert engine.stats().kv_blocks_used == 0
