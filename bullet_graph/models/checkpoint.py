"""Weights from safetensors files: their headers are checked, then a thread of its own copies tensor by tensor."""

import math
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bullet_graph.errors import CheckpointError, UnsupportedModelError
from bullet_graph.kernels.memory import PinnedRing
from bullet_graph.models import weights as layout
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.json_files import read_json_object
from bullet_graph.models.sharding import Part, part_of
from bullet_graph.perf.roofline import FP8_BLOCK

_STAGING_BYTES = 16 * 1024**2
"""Size of a pinned buffer, large enough for a copy's full speed."""

_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf")
"""The first three are pickled, which means that they are programs."""

_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}
"""Bytes of an element, by safetensors' names of the types that are read; the last is of projections alone."""

_PLAIN_TYPES, _FP8 = ("F32", "F16", "BF16"), "F8_E4M3"
_WEIGHT_SCALES = (".weight_scale_inv", ".weight_scale")
"""Names of weights' scales: both multiply."""
_KV_SCALES = {
    "k": ("k_scale", "k_proj.k_scale", "k_proj.output_scale"),
    "v": ("v_scale", "v_proj.v_scale", "v_proj.output_scale"),
}
"""Names of the scales of a layer's keys and values, in its ``self_attn``."""
_UNUSED_SCALES = (".input_scale", ".activation_scale", ".q_scale")
"""Activations are quantized when they are computed."""


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    path: Path
    file: Any
    shape: tuple[int, ...]
    element_type: str

    def read(self, name: str, part: Part | None) -> Tensor:
        """The tensor, memory-mapped, whose pages are read when they are copied; or a part of it."""
        with _file_errors(f"{self.path}: tensor {name} cannot be read"):
            if part is not None:
                return part.of(self.file.get_slice(name))
            tensor: Tensor = self.file.get_tensor(name)
            return tensor


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Opened files with the tensors that the config requires, by Hugging Face's names; ``source`` lists them."""

    source: Path
    tensors: Mapping[str, _StoredTensor]
    config: ModelConfig

    @property
    def num_bytes(self) -> int:
        """Stored bytes of all tensors, or parts of them, that are loaded."""
        shapes = layout.weight_shapes(self.config)
        return sum(math.prod(shapes[name]) * _ELEMENT_BYTES[self.tensors[name].element_type] for name in shapes)

    def fill(self, weights: layout.ModelWeights) -> Iterator[int]:
        """Copy the tensors into ``weights``, converting their types, and yield the bytes of each piece.

        Copies to a GPU go through pinned buffers on the current stream, and may be under way after the last piece.
        Raises CheckpointError for a file that cannot be read any more, and for tied embeddings beside another head.
        """
        self._check_tied(weights.embed.dtype)
        views = dict(layout.checkpoint_views(self.config, weights))
        ring = None if weights.embed.device.type == "cpu" else PinnedRing(_STAGING_BYTES)
        # File by file, so that a disk reads each of them once from front to back.
        for name in sorted(layout.weight_shapes(self.config), key=lambda name: self.tensors[name].path):
            stored = self.tensors[name]
            element_bytes = _ELEMENT_BYTES[stored.element_type]
            source = layout.held(self.config, name, stored.read(name, part_of(self.config, name, stored.shape)))
            scales = views.get(layout.scale_name(name))
            if scales is not None and stored.element_type != _FP8:
                copied = _copy_quantized(source, views[name], scales, ring)
            else:
                # The last rank's vocabulary may be shorter.
                copied = _copy(source, views[name][: len(source)], ring)
            for num_elements in copied:
                yield num_elements * element_bytes
            if scales is not None and stored.element_type == _FP8:
                scales.copy_(layout.held(self.config, layout.scale_name(name), self._scales(name)))
            if self.config.norm_plus_one and name.endswith("norm.weight"):
                views[name].add_(1.0)
        if self.config.fp8_kv:
            for index, layer in enumerate(weights.layers):
                layout.scale_cached(self.config, layer, self._cached_scale(index, "k"), self._cached_scale(index, "v"))

    def _check_tied(self, dtype: torch.dtype) -> None:
        """Refuse to leave out an ``lm_head`` of its own, which transformers 5 uses whatever the config says."""
        if not self.config.tie_word_embeddings or (head := self.tensors.get("lm_head.weight")) is None:
            return
        embed = self.tensors["model.embed_tokens.weight"].read("model.embed_tokens.weight", None).to(dtype)
        if not torch.equal(embed, head.read("lm_head.weight", None).to(dtype)):
            raise CheckpointError(
                f"{head.path}: tensor lm_head.weight must equal model.embed_tokens.weight, as config.json ties them; "
                "it does not: to use it, set tie_word_embeddings there to false"
            )

    def _scales(self, name: str) -> Tensor:
        """The scales of a weight's part: one of a whole tensor is every channel's."""
        stored_name = stored_scale(self.tensors, name)
        assert stored_name is not None
        scales = self.tensors[stored_name].read(stored_name, None).float()
        if self.config.fp8 is None or not self.config.fp8.blocks:
            scales = scales.reshape(-1, 1).expand(self.tensors[name].shape[0], 1)
        part = part_of(self.config, layout.scale_name(name), tuple(scales.shape))
        return scales if part is None else part.of(scales)

    def _cached_scale(self, layer: int, kind: str) -> float:
        """The scale of a layer's keys or values, rounded up to a power of two; 1.0 where the checkpoint has none."""
        for name in (f"model.layers.{layer}.self_attn.{each}" for each in _KV_SCALES[kind]):
            if name in self.tensors:
                scale = float(self.tensors[name].read(name, None))
                if not 0 < scale < math.inf:
                    raise CheckpointError(f"{self.tensors[name].path}: tensor {name} must be above 0; found {scale}")
                return 2.0 ** math.ceil(math.log2(scale))
        return 1.0


@contextmanager
def open_checkpoint(folder: Path, config: ModelConfig) -> Iterator[Checkpoint]:
    """Open a folder's safetensors files, and check names, shapes and types in their headers; allocates nothing.

    Raises CheckpointError for a tensor that is missing, wrong, or not required by the config. Precomputed rotary
    frequencies and the ``lm_head`` of tied embeddings may be there.
    """
    with ExitStack() as stack:
        checkpoint = Checkpoint(*_open_files(folder, stack), config)
        _check_tensors(checkpoint)
        yield checkpoint


def _copy(source: Tensor, target: Tensor, ring: PinnedRing | None) -> Iterator[int]:
    """Copy a host tensor, through the ring if the target is on a GPU; yield the elements of each piece."""
    if ring is None:
        target.copy_(source)
        yield target.numel()
        return
    # Views of fused tensors are rows of them, so both are contiguous.
    rest, room = source.view(-1), target.view(-1)
    for start in range(0, room.numel(), piece := _STAGING_BYTES // target.element_size()):
        part = rest[start : start + piece]
        with ring.buffer() as staging:
            staged = staging.view(target.dtype)[: part.numel()].copy_(part)
            room[start : start + piece].copy_(staged, non_blocking=True)
        yield part.numel()


def _copy_quantized(source: Tensor, values: Tensor, scales: Tensor, ring: PinnedRing | None) -> Iterator[int]:
    """Quantize a host tensor [out, in] on the target's device, some rows at a time; yield elements of each piece."""
    if ring is None:
        layout.put_quantized(source, values, scales)
        yield source.numel()
        return
    rows = max(1, _STAGING_BYTES // (source.shape[1] * source.element_size()))
    for start in range(0, len(source), rows):
        part = source[start : start + rows]
        with ring.buffer() as staging:
            staged = staging.view(source.dtype)[: part.numel()].copy_(part.reshape(-1))
            arrived = staged.to(values.device, non_blocking=True)
        layout.put_quantized(arrived.view(part.shape), values[start : start + rows], scales[start : start + rows])
        yield part.numel()


def stored_scale(tensors: Mapping[str, Any], name: str) -> str | None:
    """The checkpoint's name of a weight's scales; None where it has none."""
    names = (name.removesuffix(".weight") + suffix for suffix in _WEIGHT_SCALES)
    return next((each for each in names if each in tensors), None)


def _open_files(folder: Path, stack: ExitStack) -> tuple[Path, Mapping[str, _StoredTensor]]:
    """The file that lists the tensors, and the tensors by name."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        file = _open_file(single, stack)
        return single, {name: _stored_tensor(single, file, name) for name in file.keys()}  # noqa: SIM118
    if not index.exists():
        others = sorted({f"*{path.suffix}" for kind in _OTHER_WEIGHTS for path in folder.glob(kind)})
        found = f"neither, but {' and '.join(others)} files, which are not read" if others else "neither"
        raise CheckpointError(
            f"{folder} must hold {single.name} or {index.name}; found {found}: "
            "download the safetensors files, write them with transformers (save_pretrained), or use load_format dummy"
        )
    weight_map = read_json_object(index, CheckpointError).nested("weight_map")
    for name, file_name in weight_map.values.items():
        # A shard is a file beside the index: a path to elsewhere would read what the user did not name.
        if not isinstance(file_name, str) or not file_name or Path(file_name).name != file_name:
            weight_map.fail(name, "the name of a file in the same folder")
    locations = {name: folder / file_name for name, file_name in weight_map.values.items()}
    paths = sorted(set(locations.values()))
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise CheckpointError(f"{index} names {', '.join(missing)}, not in that folder; download again")
    files = {path: _open_file(path, stack) for path in paths}
    return index, {name: _stored_tensor(path, files[path], name) for name, path in locations.items()}


def _open_file(path: Path, stack: ExitStack) -> Any:
    # A pipe would block for ever. A link is followed: a hub's cache holds links.
    if not path.is_file():
        raise CheckpointError(f"{path} must be a regular file; found a folder, a pipe or a device")
    with _file_errors(f"{path} is not a complete safetensors file"):
        return stack.enter_context(safe_open(path, framework="pt", device="cpu"))


def _stored_tensor(path: Path, file: Any, name: str) -> _StoredTensor:
    with _file_errors(f"{path}: tensor {name} is missing, though the index places it there"):
        header = file.get_slice(name)
    return _StoredTensor(path, file, tuple(header.get_shape()), header.get_dtype())


@contextmanager
def _file_errors(problem: str) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{problem} ({error}); download it again") from error


def _check_tensors(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    _check_blocks(config)
    # What is stored is the whole model, of which a rank reads its part.
    config = config.whole or config
    expected = layout.weight_shapes(config)
    is_stored = config.fp8 is not None and config.fp8.is_stored
    quantized = layout.scale_shapes(config) if is_stored else {}
    scales = {name: stored_scale(checkpoint.tensors, name) for name in quantized}
    missing = [name for name in expected if name not in checkpoint.tensors]
    missing += [name.removesuffix(".weight") + _WEIGHT_SCALES[-1] for name, found in scales.items() if found is None]
    why = " (config.json does not tie the embeddings)" if missing == ["lm_head.weight"] else ""
    known = {*expected, *scales.values(), "lm_head.weight"}
    unused = _UNUSED_SCALES + tuple(f"self_attn.{name}" for names in _KV_SCALES.values() for name in names)
    unexpected = [
        name
        for name in checkpoint.tensors
        if name not in known and not name.endswith("rotary_emb.inv_freq") and not (is_stored and name.endswith(unused))
    ]
    for names, problem in (
        (missing, f"required by config.json{why} but missing"),
        (unexpected, "present but not called for by config.json: they do not match"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(f"{checkpoint.source}: tensors {', '.join(names[:3])}{more} are {problem}")
    for name, shape in expected.items():
        _check_tensor(checkpoint, name, [shape], [_FP8] if name in quantized else _PLAIN_TYPES)
    for name, shape in quantized.items():
        shapes = [(), (1,), shape[:1], shape] if (config.fp8 is not None and not config.fp8.blocks) else [shape]
        _check_tensor(checkpoint, scales[name] or "", shapes, _PLAIN_TYPES)
    for name, stored in checkpoint.tensors.items() if config.fp8_kv else ():
        if is_stored and name.endswith(unused[len(_UNUSED_SCALES) :]) and math.prod(stored.shape) != 1:
            raise CheckpointError(
                f"{stored.path}: tensor {name} must be one number: keys and values have one FP8 scale a layer; found "
                f"{list(stored.shape)}: leave out kv_cache_dtype"
            )


def _check_tensor(checkpoint: Checkpoint, name: str, shapes: Sequence[tuple[int, ...]], types: Sequence[str]) -> None:
    tensor = checkpoint.tensors[name]
    what = f"{tensor.path}: tensor {name} must"
    if tensor.shape not in shapes:
        required = " or ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(f"{what} have shape {required} by config.json; found {list(tensor.shape)}")
    if tensor.element_type not in types:
        raise CheckpointError(f"{what} be one of {', '.join(types)}; found {tensor.element_type}")


def _check_blocks(config: ModelConfig) -> None:
    """Refuse blocks of weights that cross two modules, or whose rows would be held in another order."""
    if config.fp8 is None or not config.fp8.blocks:
        return
    of_mlp = [size for size in (config.expert_intermediate_size, config.dense_mlp_size) if size]
    sizes = () if config.fused_projections and config.whole is None else (config.q_size, config.kv_size, *of_mlp)
    if any(size % FP8_BLOCK for size in sizes) or config.rotary_dim is not None:
        raise UnsupportedModelError(
            f"FP8 weights in blocks of {FP8_BLOCK} need q, k, v, gate and up of multiples of {FP8_BLOCK} channels, and "
            f"whole heads of 64, 128 or 256; a rank of {config.num_ranks} has q_size {config.q_size}, kv_size "
            f"{config.kv_size}, intermediate_size {' and '.join(map(str, of_mlp))}, head_dim "
            f"{config.stored_head_dim or config.head_dim}: take the 16-bit checkpoint"
        )


class WeightLoading:
    """Fills weights in a thread, on a CUDA stream of its own, beside captures; leaving the context ends the thread.

    A capture needs the addresses of weights, not their values, which are incomplete until :meth:`join` returns. The
    thread waits for its own stream and events, never for the device or the default stream: another thread may be
    capturing a CUDA graph in the mode ``thread_local``.

    ``started_s`` and ``ended_s`` are by ``time.perf_counter``; the second is None without success.

    ``fill`` and ``advance`` run in the thread. The first fills ``weights``, allocated on the current stream, and yields
    the bytes of each piece; the second is called with them.
    """

    def __init__(
        self, weights: layout.ModelWeights, fill: Iterator[int], advance: Callable[[float], object] = lambda _: None
    ) -> None:
        self._device = weights.embed.device
        self._fill = fill
        self._advance = advance
        self._stopped = threading.Event()
        self._made = None
        if self._device.type == "cuda":
            self._made = torch.cuda.Event()
            self._made.record()
        self.started_s = time.perf_counter()
        self.ended_s: float | None = None
        self._pool = ThreadPoolExecutor(1, "bullet-graph-weights")
        self._done = self._pool.submit(self._run)

    def join(self) -> None:
        """Wait until all weights are there, for every stream; raises what filling them raised."""
        error = self._done.exception()
        if error is not None:
            # Its frames would keep the weights alive with the error.
            traceback.clear_frames(error.__traceback__)
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        self._pool.shutdown()

    def _run(self) -> None:
        try:
            # Inference mode is a thread's own; weights made in it can be changed only in it.
            with torch.inference_mode(), self._own_stream():
                for num_bytes in self._fill:
                    self._advance(num_bytes)
                    if self._stopped.is_set():
                        return
            self.ended_s = time.perf_counter()
        finally:
            del self._fill  # and the files that it holds open

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        if self._made is None:
            yield
            return
        stream = torch.cuda.Stream(self._device)
        stream.wait_event(self._made)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            try:
                yield
            finally:
                stream.synchronize()
