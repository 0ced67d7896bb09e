"""Weights: what checkpoints hold and what breaks them, random ones, and a thread that fills them (here on the CPU)."""

import gc
import json
import os
import re
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from checkpoints import EXPERT_FAMILIES, FAMILIES, MORE_FAMILIES, Family, write_checkpoint
from decoders import dummy_weights, read_weights, tensors_of
from engines import GREEDY, make_engine
from fp8_checkpoints import change_config
from safetensors.torch import load_file, save_file

from bullet_graph import Engine
from bullet_graph.errors import CheckpointError
from bullet_graph.models import weights as loader
from bullet_graph.models.checkpoint import WeightLoading, _StoredTensor
from bullet_graph.models.presets import PRESETS, load_model_config
from bullet_graph.models.weights import (
    ModelWeights,
    checkpoint_views,
    fill_dummy,
    skewed_router_bias,
    weight_shapes,
    zero_weights,
)
from bullet_graph.runtime import build
from bullet_graph.runtime.cpu import CpuExecutor

CPU = torch.device("cpu")
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
Make = Callable[..., Path]


def assert_equal(one: ModelWeights, other: ModelWeights) -> None:
    one_tensors, other_tensors = tensors_of(one), tensors_of(other)
    assert one_tensors.keys() == other_tensors.keys()
    assert all(torch.equal(one_tensors[name], other_tensors[name]) for name in one_tensors)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture
def make(written: Path, tmp_path: Path) -> Make:
    """Copies of checkpoints that are written once, for a test to break as it likes."""

    def folder(name: str = "model", *, tie: bool = False, shards: int = 1) -> Path:
        source = written / f"tie={tie},shards={shards}"
        if not source.exists():
            write_checkpoint(source, "llama", tie=tie, shards=shards, tokenizer=False)
        return Path(shutil.copytree(source, tmp_path / name))

    return folder


# ---- what is read ----


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", [1, 3])
def test_fused_tensors_equal_those_of_transformers(tmp_path: Path, family: Family, shards: int) -> None:
    state = write_checkpoint(tmp_path, family, shards=shards, tokenizer=False).state_dict()
    assert (tmp_path / FILE).exists() == (shards == 1)
    parts = {
        "input_norm": ["input_layernorm"],
        "attention.qkv.weight": [f"self_attn.{name}_proj" for name in "qkv"],
        "attention.o.weight": ["self_attn.o_proj"],
        "mlp_norm": ["post_attention_layernorm"],
        "mlp.gate_up.weight": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.down.weight": ["mlp.down_proj"],
    }
    if family == "qwen2":
        parts["attention.qkv.bias"] = parts["attention.qkv.weight"]
    if family == "qwen3":
        parts |= {f"attention.head_norms.{name}": [f"self_attn.{name}_norm"] for name in "qk"}
    expected = {".embed": ["model.embed_tokens"], ".final_norm": ["model.norm"], ".lm_head": ["lm_head"]}
    for index in range(2):
        for ours, theirs in parts.items():
            expected[f".layers.{index}.{ours}"] = [f"model.layers.{index}.{name}" for name in theirs]
    found = tensors_of(read_weights(tmp_path))
    assert found.keys() == expected.keys()
    for ours, theirs in expected.items():
        kind = "bias" if ours.endswith("bias") else "weight"
        assert torch.equal(found[ours], torch.cat([state[f"{name}.{kind}"] for name in theirs])), ours
    assert not torch.equal(found[".lm_head"], found[".embed"])


@pytest.mark.parametrize("family", FAMILIES + MORE_FAMILIES)
@pytest.mark.parametrize("tie", [False, True])
def test_shapes_are_those_of_transformers(tmp_path: Path, family: Family, tie: bool) -> None:
    model = write_checkpoint(tmp_path, family, tie=tie, tokenizer=False)
    config = load_model_config(tmp_path)
    assert weight_shapes(config) == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
@pytest.mark.parametrize("shards", [1, 3])
def test_stacked_experts_equal_those_of_transformers(tmp_path: Path, family: Family, shards: int) -> None:
    model = write_checkpoint(tmp_path, family, shards=shards, tokenizer=False)
    config, state = load_model_config(tmp_path), model.state_dict()
    stored = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    # As published: one tensor for each matrix of each expert.
    assert weight_shapes(config) == {name: tuple(tensor.shape) for name, tensor in stored.items()}
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    for index, layer in enumerate(read_weights(tmp_path).layers):
        mlp = {name.partition(".mlp.")[2]: tensor for name, tensor in state.items() if f".{index}.mlp." in name}
        expected = [mlp["gate.weight"], mlp["experts.gate_up_proj"], mlp["experts.down_proj"]]
        if "shared_expert_gate.weight" in mlp:
            shared = [mlp[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")]
            expected += [torch.cat(shared[:2]), shared[2], mlp["shared_expert_gate.weight"]]
        assert all(torch.equal(one, other) for one, other in zip(tensors_of(layer.mlp).values(), expected, strict=True))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("mixtral-8x7b", 46_702_792_704),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, expected: int) -> None:
    assert PRESETS[name].num_parameters == expected


def test_tied_embeddings_are_one_tensor_or_refused(make: Make) -> None:
    folder = make(tie=True)
    before = read_weights(folder, dtype=torch.bfloat16)
    assert before.lm_head is before.embed
    assert HEAD not in load_file(folder / FILE)
    edited(folder, add={HEAD: before.embed, ("model.layers.0.self_attn.rotary_emb.inv_freq"): torch.zeros(8)})
    after = read_weights(folder, dtype=torch.bfloat16)
    assert after.lm_head is after.embed
    assert_equal(before, after)
    edited(folder, add={HEAD: torch.zeros(320, 64)})
    with pytest.raises(CheckpointError, match=rf"{HEAD} must equal .* set tie_word_embeddings there to false"):
        read_weights(folder)
    change_config(folder, tie_word_embeddings=False)
    assert not read_weights(folder).lm_head.any()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_conversion(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    model = write_checkpoint(tmp_path, "qwen2", num_layers=1, dtype=stored, tokenizer=False)
    weights = read_weights(tmp_path, dtype=wanted)
    assert {tensor.dtype for tensor in tensors_of(weights).values()} == {wanted}
    down = model.state_dict()["model.layers.0.mlp.down_proj.weight"]
    assert down.dtype == stored
    assert torch.equal(weights.layers[0].mlp.down.weight, down.to(wanted))


def test_norms_that_add_one_are_held_in_float32(tmp_path: Path) -> None:
    stored = write_checkpoint(tmp_path, "gemma3", num_layers=1, dtype=torch.bfloat16, tokenizer=False).state_dict()
    weights = read_weights(tmp_path, dtype=torch.bfloat16)
    assert weights.embed.dtype is torch.bfloat16
    assert torch.equal(weights.final_norm, 1 + stored["model.norm.weight"].float())
    norms = weights.layers[0].attention.head_norms
    assert norms is not None
    assert torch.equal(norms.q, 1 + stored["model.layers.0.self_attn.q_norm.weight"].float())


def test_weights_outlive_the_files(make: Make) -> None:
    folder = make()
    weights = read_weights(folder)
    before = {name: tensor.clone() for name, tensor in tensors_of(weights).items()}
    path = folder / FILE
    path.write_bytes(bytes(path.stat().st_size))
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(weights).items())


# ---- what is refused ----

NORM, HEAD = "model.norm.weight", "lm_head.weight"
BIAS, UP = "model.layers.0.self_attn.q_proj.bias", "model.layers.1.mlp.up_proj.weight"


def edited(folder: Path, *, drop: str = "", add: dict[str, torch.Tensor] | None = None) -> None:
    tensors = load_file(folder / FILE) | (add or {})
    save_file({name: tensor for name, tensor in tensors.items() if name != drop}, folder / FILE)


def truncated(kept: float, folder: Path) -> None:
    path = min(folder.glob("*.safetensors"))
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])


def with_index(content: str, folder: Path) -> None:
    (folder / INDEX).write_text(content)


def misplaced(folder: Path) -> None:
    content = json.loads((folder / INDEX).read_text())
    places = content["weight_map"]
    places[NORM] = next(file for file in places.values() if file != places[NORM])
    with_index(json.dumps(content), folder)


BROKEN: dict[str, tuple[int, Callable[[Path], object], str]] = {
    "tensor missing": (1, partial(edited, drop=UP), rf"model\.safetensors: tensors {UP} are required .*missing"),
    "all missing": (1, lambda folder: save_file({}, folder / FILE), r"embed_tokens\.weight, .* and 18 more"),
    "no lm_head, untied": (1, partial(edited, drop=HEAD), rf"{HEAD} .*does not tie the embeddings"),
    "unexpected tensor": (1, partial(edited, add={BIAS: torch.zeros(64)}), rf"{BIAS} are present but not called for"),
    "more layers": (1, partial(change_config, num_hidden_layers=1), r"model\.layers\.1\..* and 6 more are present"),
    "no file": (1, lambda folder: (folder / FILE).unlink(), r"model\.safetensors or .*index\.json; found neither:"),
    "other files": (1, lambda folder: (folder / FILE).rename(folder / "model.bin"), r"neither, but \*\.bin files"),
    "no shard": (3, lambda folder: min(folder.glob("*.safetensors")).unlink(), "names model-00001-of-.*, not in"),
    "tensor not in its shard": (3, misplaced, rf"model-0000\d-of-.*: tensor {NORM} is missing"),
}
WRONG_NORMS = {
    **{torch.zeros(shape): f"have shape [64] by config.json; found {list(shape)}" for shape in ((63,), (64, 1))},
    **{
        torch.zeros(64).to(dtype): "be one of F32, F16, BF16; found"
        for dtype in (torch.int32, torch.uint8, torch.float8_e4m3fn, torch.float64)
    },
}
BROKEN |= {
    f"norm {list(norm.shape)} {norm.dtype}": (1, partial(edited, add={NORM: norm}), re.escape(f"{NORM} must {problem}"))
    for norm, problem in WRONG_NORMS.items()
}
BROKEN |= {
    f"{kept} of a file of {shards}": (shards, partial(truncated, kept), r"model.*\.safetensors is not a complete")
    for kept in (0.9, 0.001, 0.0)
    for shards in (1, 3)
}
BROKEN |= {
    f"index {content}": (3, partial(with_index, content), problem)
    for content, problem in {
        "{": "is not valid JSON",
        "[]": "must hold a JSON object",
        "{}": "weight_map must be an object; found no such key",
        '{"weight_map": []}': "weight_map must be an object",
        '{"weight_map": {"a": 1}}': r"weight_map\.a must be the name of a file",
        '{"weight_map": {"a": ""}}': r"weight_map\.a must be the name of a file",
        '{"weight_map": {"a": "../model.safetensors"}}': r"weight_map\.a must be the name of a file",
        '{"weight_map": {}}': "required by config.json but missing",
    }.items()
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoint(make: Make, name: str) -> None:
    shards, break_it, problem = BROKEN[name]
    folder = make(shards=shards)
    break_it(folder)
    with pytest.raises(CheckpointError, match=problem):
        read_weights(folder)


def test_nothing_is_allocated_before_the_headers_are_checked(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make()
    edited(folder, add={"x": torch.zeros(1)})
    zeros = Mock(wraps=torch.zeros)
    monkeypatch.setattr(loader.torch, "zeros", zeros)
    with pytest.raises(CheckpointError):
        read_weights(folder)
    assert {call.kwargs["device"].type for call in zeros.call_args_list} == {"meta"}


# ---- random weights ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dummy_weights_follow_from_the_seed(tmp_path: Path, dtype: torch.dtype) -> None:
    write_checkpoint(tmp_path, "qwen2", tokenizer=False)
    config = load_model_config(tmp_path)
    global_state = torch.get_rng_state()
    one = dummy_weights(config, dtype=dtype, device=CPU, seed=7)
    assert torch.equal(torch.get_rng_state(), global_state)
    assert_equal(one, dummy_weights(config, dtype=dtype, device=CPU, seed=7))
    other = tensors_of(dummy_weights(config, dtype=dtype, device=CPU, seed=8))
    for name, tensor in tensors_of(one).items():
        assert tensor.dtype == dtype
        assert tensor.isfinite().all()
        if name.endswith("norm"):
            assert (tensor == 1).all()
        else:
            assert not torch.equal(tensor, other[name])
            assert tensor.count_nonzero() > 0.99 * tensor.numel()


def test_dummy_weights_keep_activations_in_proportion() -> None:
    config = PRESETS["tiny"]
    weights = dummy_weights(config, dtype=torch.float32, device=CPU, seed=0)
    assert len(weights.layers) == config.num_layers
    down = weights.layers[3].mlp.down.weight
    inputs = torch.randn(64, config.intermediate_size, generator=torch.Generator().manual_seed(0))
    assert 0.9 < (inputs @ down.T).std().item() < 1.1


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (60, 4), (8, 2)])
@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.3])
def test_a_skewed_router_s_experts_get_their_shares(num_experts: int, top_k: int, exponent: float) -> None:
    bias = skewed_router_bias(num_experts, top_k, exponent).float()
    logits = torch.randn(8000, num_experts, generator=torch.Generator().manual_seed(1)) + bias
    shares = torch.bincount(logits.topk(top_k).indices.flatten(), minlength=num_experts) / len(logits)
    wanted = torch.arange(1, num_experts + 1) ** -exponent
    # Of the experts that are not taken by nearly all rows.
    free = bias < 2.0
    expected = wanted[free] * (shares[free].sum() / wanted[free].sum())
    torch.testing.assert_close(shares[free], expected, rtol=0.15, atol=0.01)


def test_dummy_routers_follow_the_skew_in_every_layer() -> None:
    config = replace(PRESETS["tiny-moe"], router_bias=True)
    weights = zero_weights(config, dtype=torch.float32, device=CPU)
    for _ in fill_dummy(config, weights, seed=3, zipf_exponent=1.0):
        pass
    biases = torch.stack([layer.mlp.experts.router.bias for layer in weights.layers])
    expected = skewed_router_bias(config.num_experts, config.experts_per_token, 1.0).float()
    assert torch.equal(biases.sort(descending=True).values, expected.expand(4, -1))
    assert len(set(biases.argmax(1).tolist())) > 1, "each layer has its own order"


# ---- filled by a thread while an executor is built ----

TINY = PRESETS["tiny"]


def zeros() -> ModelWeights:
    return zero_weights(TINY, dtype=torch.float32, device=CPU)


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("bullet-graph-weights")]


@pytest.mark.parametrize("inference", [False, True])
def test_random_weights_are_the_same_as_ever(inference: bool) -> None:
    """A profile makes them in inference mode, outside of which torch refuses to change such tensors: a thread's own."""
    with torch.inference_mode(inference):
        weights = zeros()
        with WeightLoading(weights, fill_dummy(TINY, weights, seed=7)) as filling:
            filling.join()
    expected = dummy_weights(TINY, dtype=torch.float32, device=CPU, seed=7)
    assert torch.equal(weights.embed, expected.embed)
    assert torch.equal(weights.layers[-1].mlp.down.weight, expected.layers[-1].mlp.down.weight)
    assert torch.equal(weights.lm_head, expected.lm_head)
    # Of the release before weights were filled by a thread.
    assert weights.embed[0, :4].tolist() == pytest.approx([-0.0724903345, 0.0349691845, 0.0794530362, -0.1227187216])
    assert weights.layers[3].mlp.down.weight[-1, -3:].tolist() == pytest.approx(
        [0.1358493865, -0.0227835104, 0.0179645158]
    )
    assert weights.lm_head[100, 5:8].tolist() == pytest.approx([0.0121970512, 0.0227725059, -0.0366109386])


def test_unfilled_weights_are_numbers() -> None:
    assert not any(tensor.any() for _, tensor in checkpoint_views(TINY, zeros()))


def test_progress_is_told() -> None:
    weights, told = zeros(), []
    with WeightLoading(weights, iter([3, 4]), told.append) as filling:
        filling.join()
    assert told == [3, 4]
    assert filling.ended_s is not None
    assert filling.ended_s >= filling.started_s


def test_an_error_keeps_its_type_and_message_and_no_weights() -> None:
    weights = zeros()
    gone = weakref.ref(weights.embed)

    def failing(weights: ModelWeights) -> Iterator[int]:
        yield weights.embed.nbytes
        raise CheckpointError("the file ends early")

    with (
        pytest.raises(CheckpointError, match=r"^the file ends early$") as caught,
        WeightLoading(weights, failing(weights)) as filling,
    ):
        filling.join()
    del weights, filling
    assert caught.value.__traceback__ is not None
    gc.collect()
    assert gone() is None, "the error keeps the weights"
    assert not loader_threads()


def test_leaving_the_block_ends_the_thread() -> None:
    """As where a capture fails, or the user interrupts."""
    begun, told = threading.Event(), []

    def endless() -> Iterator[int]:
        while True:
            begun.set()
            yield 1

    def interrupted() -> None:
        begun.wait()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), WeightLoading(zeros(), endless(), told.append):
        interrupted()
    assert not loader_threads()
    assert told


# ---- an engine ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(folder, "llama", shards=2)
    return folder


def test_the_executor_is_built_while_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    executor_made = threading.Event()
    fill, init = build.fill_dummy, CpuExecutor.__init__

    def slow(*arguments: object, **settings: object) -> Iterator[int]:
        pieces = list(fill(*arguments, **settings))  # type: ignore[arg-type]
        assert executor_made.wait(30), "the executor waits for the weights"
        yield from pieces

    def made(executor: CpuExecutor, *arguments: object, **settings: object) -> None:
        init(executor, *arguments, **settings)  # type: ignore[arg-type]
        executor_made.set()

    monkeypatch.setattr(build, "fill_dummy", slow)
    monkeypatch.setattr(CpuExecutor, "__init__", made)
    with make_engine() as engine:
        report = engine.start_report
        tokens = engine.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    phases = {phase.name: phase for phase in report.phases}
    assert phases["allocation"].end_s <= phases["weights"].start_s < phases["weights"].end_s
    assert report.ready_s is not None
    assert phases["weights"].end_s <= report.ready_s
    monkeypatch.undo()
    with make_engine() as engine:
        assert engine.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == tokens
    assert not loader_threads()


@pytest.mark.parametrize("progress", [False, True])
def test_progress_bar_only_when_asked(folder: Path, progress: bool, capsys: pytest.CaptureFixture[str]) -> None:
    make_engine(folder, use_tqdm=progress).shutdown()
    shown = capsys.readouterr().err
    assert ("Loading weights: 100%" in shown) == progress
    assert progress or not shown


def test_a_file_that_breaks_while_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torn = Mock(get_tensor=Mock(side_effect=OSError(os.strerror(5))))
    read = _StoredTensor.read
    monkeypatch.setattr(_StoredTensor, "read", lambda stored, *rest: read(replace(stored, file=torn), *rest))
    with pytest.raises(CheckpointError, match=r"model-00001-of-.*: tensor .* cannot be read \(.*\); download"):
        make_engine(folder)
    assert not loader_threads()


def test_a_failed_start_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    zero = build.zero_weights

    def noted(*arguments: object, **settings: object) -> ModelWeights:
        weights = zero(*arguments, **settings)  # type: ignore[arg-type]
        made.append(weakref.ref(weights.embed))
        return weights

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("no executor")

    monkeypatch.setattr(build, "zero_weights", noted)
    monkeypatch.setattr("bullet_graph.runtime.build.CpuExecutor", failing)
    with pytest.raises(RuntimeError, match="no executor") as caught:
        Engine("tiny", device="cpu", max_model_len=64, max_num_seqs=2)
    assert not loader_threads()
    gc.collect()
    assert made[0]() is None, "the error, still there, keeps the weights"
    assert caught.value
