import json
import re
import shutil
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, Family, write_checkpoint
from decoders import dummy_weights
from safetensors.torch import load_file, save_file

from bullet_graph.errors import CheckpointError
from bullet_graph.models import weights as loader
from bullet_graph.models.checkpoint import open_checkpoint, weights_bar
from bullet_graph.models.families import load_model_config
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.weights import ModelWeights, empty_weights, weight_shapes

CPU = torch.device("cpu")
SHARD = "model-00001-of"


def load(folder: Path, dtype: torch.dtype = torch.float32, progress: bool = False) -> ModelWeights:
    config = load_model_config(folder)
    with (
        open_checkpoint(folder, config) as checkpoint,
        weights_bar(progress, checkpoint.num_bytes) as advance,
    ):
        weights = empty_weights(config, dtype, CPU)
        for num_bytes in checkpoint.fill(weights):
            advance(num_bytes)
    return weights


def tensors_of(value: object, name: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of nested weights, by its path."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    parts = dict(enumerate(value)) if isinstance(value, tuple) else {}
    if is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    return {k: v for key, part in parts.items() for k, v in tensors_of(part, f"{name}.{key}").items()}


def assert_equal(one: ModelWeights, other: ModelWeights) -> None:
    one_tensors, other_tensors = tensors_of(one), tensors_of(other)
    assert one_tensors.keys() == other_tensors.keys()
    assert all(torch.equal(one_tensors[name], other_tensors[name]) for name in one_tensors)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders written once and copied, for a test to break as it likes."""
    root = tmp_path_factory.mktemp("checkpoints")

    def folder(copy_to: Path, *, tie: bool = False, shards: int = 1) -> Path:
        source = root / f"tie={tie},shards={shards}"
        if not source.exists():
            write_checkpoint(source, "llama", tie=tie, shards=shards, tokenizer=False)
        return Path(shutil.copytree(source, copy_to / "model"))

    return folder


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", [1, 3])
def test_fused_tensors_equal_those_of_transformers(tmp_path: Path, family: Family, shards: int) -> None:
    state = write_checkpoint(tmp_path, family, shards=shards, tokenizer=False).state_dict()
    assert (tmp_path / "model.safetensors").exists() == (shards == 1)
    weights = load(tmp_path)

    def fused(index: int, names: list[str], kind: str = "weight") -> torch.Tensor:
        return torch.cat([state[f"model.layers.{index}.{name}.{kind}"] for name in names])

    qkv = [f"self_attn.{name}_proj" for name in "qkv"]
    assert len(weights.layers) == 2
    assert torch.equal(weights.embed, state["model.embed_tokens.weight"])
    assert torch.equal(weights.final_norm, state["model.norm.weight"])
    assert torch.equal(weights.lm_head, state["lm_head.weight"])
    assert not torch.equal(weights.lm_head, weights.embed)
    for index, layer in enumerate(weights.layers):
        assert torch.equal(layer.input_norm, fused(index, ["input_layernorm"]))
        assert torch.equal(layer.attention.qkv.weight, fused(index, qkv))
        assert torch.equal(layer.attention.o.weight, fused(index, ["self_attn.o_proj"]))
        assert torch.equal(layer.post_norm, fused(index, ["post_attention_layernorm"]))
        assert torch.equal(layer.mlp.gate_up.weight, fused(index, ["mlp.gate_proj", "mlp.up_proj"]))
        assert torch.equal(layer.mlp.down.weight, fused(index, ["mlp.down_proj"]))
        assert (layer.attention.qkv.bias is not None) == (family == "qwen2")
        assert (layer.attention.head_norms is not None) == (family == "qwen3")
        if layer.attention.qkv.bias is not None:
            assert torch.equal(layer.attention.qkv.bias, fused(index, qkv, "bias"))
        if layer.attention.head_norms is not None:
            assert torch.equal(layer.attention.head_norms.q, fused(index, ["self_attn.q_norm"]))
            assert torch.equal(layer.attention.head_norms.k, fused(index, ["self_attn.k_norm"]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie", [False, True])
def test_shapes_are_those_of_transformers(tmp_path: Path, family: Family, tie: bool) -> None:
    model = write_checkpoint(tmp_path, family, tie=tie, tokenizer=False)
    config = load_model_config(tmp_path)
    assert weight_shapes(config) == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, expected: int) -> None:
    assert PRESETS[name].num_parameters == expected


def test_sharded_equals_unsharded(tmp_path: Path, checkpoints: Callable[..., Path]) -> None:
    sharded = checkpoints(tmp_path / "sharded", shards=4)
    assert len(list(sharded.glob("*.safetensors"))) >= 4
    assert_equal(load(sharded), load(checkpoints(tmp_path / "single")))


def test_tied_embeddings_are_one_tensor(tmp_path: Path, checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints(tmp_path, tie=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    weights = load(folder)
    assert weights.lm_head is weights.embed


def test_stored_lm_head_of_tied_embeddings_and_inv_freq_are_left_aside(
    tmp_path: Path, checkpoints: Callable[..., Path]
) -> None:
    folder = checkpoints(tmp_path, tie=True)
    before = load(folder)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = torch.zeros(320, 64)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    edit(folder / "model.safetensors", add)
    after = load(folder)
    assert after.lm_head is after.embed
    assert_equal(before, after)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_conversion(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    model = write_checkpoint(tmp_path, "qwen2", num_layers=1, dtype=stored, tokenizer=False)
    weights = load(tmp_path, wanted)
    assert {tensor.dtype for tensor in tensors_of(weights).values()} == {wanted}
    down = model.state_dict()["model.layers.0.mlp.down_proj.weight"]
    assert down.dtype == stored
    assert torch.equal(weights.layers[0].mlp.down.weight, down.to(wanted))


@pytest.mark.parametrize("progress", [False, True])
def test_progress_bar_only_when_asked(
    tmp_path: Path,
    checkpoints: Callable[..., Path],
    progress: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = checkpoints(tmp_path)
    capsys.readouterr()  # writing the checkpoint has a bar of its own
    load(folder, progress=progress)
    shown = capsys.readouterr().err
    assert ("Loading weights: 100%" in shown) == progress
    assert progress or not shown


def test_weights_outlive_the_files(tmp_path: Path, checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints(tmp_path)
    weights = load(folder)
    before = {name: tensor.clone() for name, tensor in tensors_of(weights).items()}
    path = folder / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(weights).items())


Edit = Callable[[dict[str, torch.Tensor]], object]
NORM, BIAS = "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"

BROKEN_FILES: dict[str, tuple[Edit, str]] = (
    {
        "tensor missing": (
            lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
            r"model\.safetensors: tensors model\.layers\.1\.mlp\.up_proj\.weight are required .*missing",
        ),
        "all tensors missing": (
            lambda tensors: tensors.clear(),
            r"model\.embed_tokens\.weight, .* and 18 more",
        ),
        "no lm_head, untied": (
            lambda tensors: tensors.pop("lm_head.weight"),
            r"lm_head\.weight .*does not tie the embeddings",
        ),
        "unexpected tensor": (
            lambda tensors: tensors.update({BIAS: torch.zeros(64)}),
            rf"{BIAS} are present but not called for by config\.json",
        ),
    }
    | {
        f"shape {shape}": (
            lambda tensors, shape=shape: tensors.update({NORM: torch.zeros(shape)}),  # type: ignore[misc]
            re.escape(f"tensor {NORM} must have shape [64] by config.json; found {list(shape)}"),
        )
        for shape in ((63,), (64, 1))
    }
    | {
        f"type {dtype}": (
            lambda tensors, dtype=dtype: tensors.update({NORM: torch.zeros(64).to(dtype)}),  # type: ignore[misc]
            rf"tensor {NORM} must be one of F32, F16, BF16; found",
        )
        for dtype in (torch.int32, torch.uint8, torch.float8_e4m3fn, torch.float64)
    }
)


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_broken_file(tmp_path: Path, checkpoints: Callable[..., Path], name: str) -> None:
    change, problem = BROKEN_FILES[name]
    folder = checkpoints(tmp_path)
    edit(folder / "model.safetensors", change)
    with pytest.raises(CheckpointError, match=problem):
        load(folder)


def test_missing_weights(tmp_path: Path, checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors or .*index\.json; found neither"):
        load(folder)


def test_index_names_a_missing_shard(tmp_path: Path, checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints(tmp_path, shards=3)
    shard = next(folder.glob(f"{SHARD}*"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"index\.json names {shard.name}, not in that folder"):
        load(folder)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kept", [0.9, 0.001, 0.0])
def test_truncated_file(tmp_path: Path, checkpoints: Callable[..., Path], shards: int, kept: float) -> None:
    folder = checkpoints(tmp_path, shards=shards)
    path = min(folder.glob("*.safetensors"))
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(CheckpointError, match=f"{path.name} is not a complete safetensors file"):
        load(folder)


def test_index_places_a_tensor_where_it_is_not(tmp_path: Path, checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints(tmp_path, shards=3)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    places = content["weight_map"]
    places[NORM] = next(file for file in places.values() if file != places[NORM])
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"tensor {NORM} is missing, though .*index\.json places it"):
        load(folder)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "weight_map must be an object; found no such key"),
        ('{"weight_map": []}', "weight_map must be an object"),
        ('{"weight_map": {"a": 1}}', r"weight_map\.a must be the name of a file"),
        ('{"weight_map": {"a": ""}}', r"weight_map\.a must be the name of a file"),
        ('{"weight_map": {"a": "../model.safetensors"}}', r"weight_map\.a must be the name of a file"),
        ('{"weight_map": {}}', "required by config.json but missing"),
    ],
)
def test_broken_index(tmp_path: Path, checkpoints: Callable[..., Path], content: str, problem: str) -> None:
    folder = checkpoints(tmp_path, shards=3)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=problem):
        load(folder)


def test_checkpoint_with_more_layers_than_its_config(
    tmp_path: Path, checkpoints: Callable[..., Path]
) -> None:
    folder = checkpoints(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\..* and 6 more are present but not called"):
        load(folder)


def test_nothing_is_allocated_before_the_headers_are_checked(
    tmp_path: Path, checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints(tmp_path)
    edit(folder / "model.safetensors", lambda tensors: tensors.update({"x": torch.zeros(1)}))
    devices = []
    allocate = torch.empty

    def recorded(*args: object, device: torch.device, **options: object) -> torch.Tensor:
        devices.append(device)
        return allocate(*args, device=device, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(loader.torch, "empty", recorded)
    with pytest.raises(CheckpointError):
        load(folder)
    assert {device.type for device in devices} == {"meta"}


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
