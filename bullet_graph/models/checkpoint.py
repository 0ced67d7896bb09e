"""Weights from safetensors files: checked by their headers, then copied tensor by tensor."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bullet_graph.errors import CheckpointError
from bullet_graph.models.config import ModelConfig, read_json_object
from bullet_graph.models.loader import checkpoint_views, empty_weights, weight_shapes
from bullet_graph.models.pinned import PinnedRing
from bullet_graph.models.progress import progress_bar
from bullet_graph.models.weights import ModelWeights

_STAGING_BYTES = 16 * 1024**2
"""Of a pinned buffer: large enough for a copy's full speed."""

# Bytes an element takes in the file, of the types that are read.
_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def load_weights(
    folder: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, progress: bool
) -> ModelWeights:
    """Load ``model.safetensors``, or the shards that ``model.safetensors.index.json`` names.

    Args:
        folder: the model folder.
        config: what its config.json says.
        dtype: of the weights returned.
        device: where to put them.
        progress: show a progress bar, in bytes read.

    Raises:
        CheckpointError: as :func:`open_checkpoint` says.
    """
    with open_checkpoint(folder, config) as checkpoint:
        weights = empty_weights(config, dtype, device)
        with weights_bar(progress, checkpoint.num_bytes) as advance:
            for num_bytes in checkpoint.fill(weights):
                advance(num_bytes)
    return weights


@contextmanager
def weights_bar(progress: bool, num_bytes: int) -> Iterator[Callable[[float], object]]:
    """Yield what advances the bar of weights that are loaded, in bytes."""
    settings = {"total": num_bytes, "desc": "Loading weights", "unit": "B", "unit_scale": True}
    with progress_bar(progress, **settings) as advance:
        yield advance


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

    def read(self, name: str) -> Tensor:
        """The tensor, memory-mapped; its pages are read when they are copied."""
        try:
            tensor: Tensor = self.file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.path}: tensor {name} cannot be read ({error}); download the file again"
            ) from error
        return tensor


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Opened files that hold what the config calls for.

    Attributes:
        source: the one that lists the tensors, for messages.
        tensors: by Hugging Face's names.
        config: of the model.
    """

    source: Path
    tensors: Mapping[str, _StoredTensor]
    config: ModelConfig

    @property
    def num_bytes(self) -> int:
        """Of all tensors that are loaded, as they are stored."""
        return sum(self.tensors[name].num_bytes for name in weight_shapes(self.config))

    def fill(self, weights: ModelWeights) -> Iterator[int]:
        """Copy the tensors into ``weights``, and yield the bytes read after each piece of one.

        Types are converted on the way. To a GPU they go through pinned buffers, on the current stream; when the last is
        yielded, its copy may be under way.

        Raises:
            CheckpointError: a file that was whole when it was opened is not any more.
        """
        views = dict(checkpoint_views(self.config, weights))
        copy = _copier(weights.embed.device)
        # File by file, so that a disk reads each of them once from front to back.
        for name in sorted(views, key=lambda name: self.tensors[name].path):
            stored = self.tensors[name]
            element_bytes = _ELEMENT_BYTES[stored.element_type]
            for num_elements in copy(stored.read(name), views[name]):
                yield num_elements * element_bytes


@contextmanager
def open_checkpoint(folder: Path, config: ModelConfig) -> Iterator[Checkpoint]:
    """Open a folder's files, and check every name, shape and type by their headers; nothing is allocated.

    A tensor the config does not call for is an error too, because the two then describe different models; left aside
    are precomputed rotary frequencies and the ``lm_head`` of a model with tied embeddings.

    Raises:
        CheckpointError: a file is missing or broken, or a tensor is missing, unexpected, or has the wrong
            shape or type.
    """
    with ExitStack() as stack:
        source, tensors = _open_files(folder, stack)
        checkpoint = Checkpoint(source, tensors, config)
        _check_tensors(checkpoint, config)
        yield checkpoint


def _copier(device: torch.device) -> Callable[[Tensor, Tensor], Iterator[int]]:
    """Copies a tensor on the host into one of its shape on ``device``, and yields the elements of each piece."""
    if device.type == "cpu":

        def copy(source: Tensor, target: Tensor) -> Iterator[int]:
            target.copy_(source)
            yield target.numel()

        return copy
    ring = PinnedRing(_STAGING_BYTES)

    def copy_pinned(source: Tensor, target: Tensor) -> Iterator[int]:
        # Pieces of fused tensors are rows of theirs, so both are contiguous.
        rest, room = source.view(-1), target.view(-1)
        for start in range(0, room.numel(), piece := _STAGING_BYTES // target.element_size()):
            part = rest[start : start + piece]
            with ring.buffer() as staging:
                staged = staging.view(target.dtype)[: part.numel()].copy_(part)
                room[start : start + piece].copy_(staged, non_blocking=True)
            yield part.numel()

    return copy_pinned


def _open_files(folder: Path, stack: ExitStack) -> tuple[Path, Mapping[str, _StoredTensor]]:
    """The file that lists the tensors, and the tensors by name."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        file = _open_file(single, stack)
        names: list[str] = file.keys()
        return single, {name: _stored_tensor(single, file, name) for name in names}
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
    return index, {name: _stored_tensor(path, files[path], name) for name, path in locations.items()}


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


def _check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
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
