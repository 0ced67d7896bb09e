"""Weights from safetensors files, or random ones of the same shapes."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bullet_graph.errors import CheckpointError
from bullet_graph.models.config import ModelConfig, read_json_object
from bullet_graph.models.progress import progress_bar
from bullet_graph.models.weights import LayerWeights, ModelWeights

_DUMMY_BIAS_STD = 0.02

# Bytes an element takes in the file, of the types that are read.
_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face's name and shape of each tensor a checkpoint of this model holds; no tied ``lm_head``."""
    weights = _empty_weights(config, torch.float32, torch.device("meta"))
    return {name: tuple(tensor.shape) for name, tensor in _checkpoint_views(config, weights)}


def num_parameters(config: ModelConfig) -> int:
    """Parameters of the model, tied embeddings counted once."""
    return sum(math.prod(shape) for shape in weight_shapes(config).values())


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of all weights in ``dtype``, tied embeddings counted once."""
    return num_parameters(config) * dtype.itemsize


def load_weights(
    folder: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, progress: bool
) -> ModelWeights:
    """Load ``model.safetensors``, or the shards that ``model.safetensors.index.json`` names.

    The files are memory-mapped and copied tensor by tensor into the fused tensors on ``device``, converted
    to ``dtype`` on the way, so that memory peaks near one copy of the weights. Every name, shape and type is
    checked from the files' headers before anything is allocated. A tensor the config does not call for is an
    error too, because the two then describe different models; left aside are precomputed rotary frequencies
    and the ``lm_head`` of a model with tied embeddings.

    Args:
        folder: the model folder.
        config: what its config.json says.
        dtype: of the weights returned.
        device: where to put them.
        progress: show a progress bar, in bytes read.

    Raises:
        CheckpointError: a file is missing or broken, or a tensor is missing, unexpected, or has the wrong
            shape or type.
    """
    with ExitStack() as stack:
        checkpoint = _open_checkpoint(folder, stack)
        _check_tensors(checkpoint, config)
        weights = _empty_weights(config, dtype, device)
        views = dict(_checkpoint_views(config, weights))
        total_bytes = sum(checkpoint.tensors[name].num_bytes for name in views)
        # File by file, so that a disk reads each of them once from front to back.
        names = sorted(views, key=lambda name: checkpoint.tensors[name].path)
        with progress_bar(
            progress, total=total_bytes, desc="Loading weights", unit="B", unit_scale=True
        ) as advance:
            for name in names:
                tensor = checkpoint.tensors[name]
                views[name].copy_(tensor.file.get_tensor(name))
                advance(tensor.num_bytes)
    return weights


def dummy_weights(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, seed: int
) -> ModelWeights:
    """Random weights, drawn on ``device``; the same seed, dtype and kind of device give the same weights.

    Matrices are normal with variance 1 / in_features, which keeps a layer's outputs about as large as its
    normalized inputs whatever the depth; norms are 1 and biases small.
    """
    weights = _empty_weights(config, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, view in _checkpoint_views(config, weights):
        if name.endswith(".bias"):
            view.normal_(0.0, _DUMMY_BIAS_STD, generator=generator)
        elif view.dim() == 1:
            view.fill_(1.0)
        else:
            view.normal_(0.0, view.shape[1] ** -0.5, generator=generator)
    return weights


def _empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    qkv_size = config.q_size + 2 * config.kv_size
    embed = empty(config.vocab_size, config.hidden_size)
    layers = tuple(
        LayerWeights(
            input_norm=empty(config.hidden_size),
            qkv=empty(qkv_size, config.hidden_size),
            qkv_bias=empty(qkv_size) if config.qkv_bias else None,
            q_norm=empty(config.head_dim) if config.qk_norm else None,
            k_norm=empty(config.head_dim) if config.qk_norm else None,
            o=empty(config.hidden_size, config.q_size),
            post_norm=empty(config.hidden_size),
            gate_up=empty(2 * config.intermediate_size, config.hidden_size),
            down=empty(config.hidden_size, config.intermediate_size),
        )
        for _ in range(config.num_layers)
    )
    return ModelWeights(
        embed=embed,
        layers=layers,
        final_norm=empty(config.hidden_size),
        lm_head=embed if config.tie_word_embeddings else empty(config.vocab_size, config.hidden_size),
    )


def _checkpoint_views(config: ModelConfig, weights: ModelWeights) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of a checkpoint, by Hugging Face's name, as a view of where it lies in ``weights``."""
    qkv_sizes = [config.q_size, config.kv_size, config.kv_size]
    yield "model.embed_tokens.weight", weights.embed
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        yield f"{prefix}.input_layernorm.weight", layer.input_norm
        for name, view in zip("qkv", torch.split(layer.qkv, qkv_sizes), strict=True):
            yield f"{prefix}.self_attn.{name}_proj.weight", view
        if layer.qkv_bias is not None:
            for name, view in zip("qkv", torch.split(layer.qkv_bias, qkv_sizes), strict=True):
                yield f"{prefix}.self_attn.{name}_proj.bias", view
        if layer.q_norm is not None and layer.k_norm is not None:
            yield f"{prefix}.self_attn.q_norm.weight", layer.q_norm
            yield f"{prefix}.self_attn.k_norm.weight", layer.k_norm
        yield f"{prefix}.self_attn.o_proj.weight", layer.o
        yield f"{prefix}.post_attention_layernorm.weight", layer.post_norm
        for name, view in zip(("gate", "up"), layer.gate_up.chunk(2), strict=True):
            yield f"{prefix}.mlp.{name}_proj.weight", view
        yield f"{prefix}.mlp.down_proj.weight", layer.down
    yield "model.norm.weight", weights.final_norm
    if weights.lm_head is not weights.embed:
        yield "lm_head.weight", weights.lm_head


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """One tensor's entry in a file's header; ``element_type`` is safetensors' name, such as ``BF16``."""

    path: Path
    file: Any
    shape: tuple[int, ...]
    element_type: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ELEMENT_BYTES[self.element_type]


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """Opened files; ``source`` is the one that lists the tensors, for messages."""

    source: Path
    tensors: Mapping[str, _StoredTensor]


def _open_checkpoint(folder: Path, stack: ExitStack) -> _Checkpoint:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        file = _open_file(single, stack)
        names: list[str] = file.keys()
        return _Checkpoint(single, {name: _stored_tensor(single, file, name) for name in names})
    if not index.exists():
        raise CheckpointError(
            f"{folder} must hold {single.name} or {index.name}; found neither: "
            "download the safetensors files, or use load_format dummy for random weights"
        )
    locations = _read_index(index)
    missing = sorted(path.name for path in set(locations.values()) if not path.exists())
    if missing:
        raise CheckpointError(f"{index} names {', '.join(missing)}, not in that folder; download again")
    files = {path: _open_file(path, stack) for path in sorted(set(locations.values()))}
    stored = {path: set(file.keys()) for path, file in files.items()}
    for name, path in locations.items():
        if name not in stored[path]:
            raise CheckpointError(f"{path}: tensor {name} is missing, though {index.name} places it there")
    return _Checkpoint(
        index, {name: _stored_tensor(path, files[path], name) for name, path in locations.items()}
    )


def _read_index(index: Path) -> dict[str, Path]:
    weight_map = read_json_object(index, CheckpointError).nested("weight_map", CheckpointError)
    for name, file_name in weight_map.values.items():
        # A shard is a file beside the index: a path to elsewhere would read what the user did not name.
        if not isinstance(file_name, str) or not file_name or Path(file_name).name != file_name:
            weight_map.fail(name, "the name of a file in the same folder", CheckpointError)
    return {name: index.parent / file_name for name, file_name in weight_map.values.items()}


def _open_file(path: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a complete safetensors file ({error}); download it again"
        ) from error


def _stored_tensor(path: Path, file: Any, name: str) -> _StoredTensor:
    header = file.get_slice(name)
    return _StoredTensor(path, file, tuple(header.get_shape()), header.get_dtype())


def _check_tensors(checkpoint: _Checkpoint, config: ModelConfig) -> None:
    expected = weight_shapes(config)
    missing = [name for name in expected if name not in checkpoint.tensors]
    if missing:
        why = " (config.json does not tie the embeddings)" if missing == ["lm_head.weight"] else ""
        _fail(checkpoint.source, missing, f"required by config.json{why} but missing")
    unexpected = [
        name
        for name in checkpoint.tensors
        if name not in expected and not name.endswith("rotary_emb.inv_freq") and name != "lm_head.weight"
    ]
    if unexpected:
        _fail(checkpoint.source, unexpected, "present but not called for by config.json: they do not match")
    for name, shape in expected.items():
        tensor = checkpoint.tensors[name]
        if tensor.shape != shape:
            raise CheckpointError(
                f"{tensor.path}: tensor {name} must have shape {list(shape)} by config.json; "
                f"found {list(tensor.shape)}"
            )
        if tensor.element_type not in _ELEMENT_BYTES:
            raise CheckpointError(
                f"{tensor.path}: tensor {name} must be one of {', '.join(_ELEMENT_BYTES)}; "
                f"found {tensor.element_type}"
            )


def _fail(source: Path, names: list[str], problem: str) -> NoReturn:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    raise CheckpointError(f"{source}: tensors {', '.join(names[:3])}{more} are {problem}")
