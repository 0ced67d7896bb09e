"""Weights from safetensors files: their headers are checked, then a thread of its own copies tensor by tensor."""

import math
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bullet_graph.errors import CheckpointError
from bullet_graph.kernels.memory import PinnedRing
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.json_files import read_json_object
from bullet_graph.models.sharding import Part, part_of
from bullet_graph.models.weights import ModelWeights, checkpoint_views, held, weight_shapes

_STAGING_BYTES = 16 * 1024**2
"""Size of a pinned buffer, large enough for a copy's full speed."""

_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf")
"""The first three are pickled, which means that they are programs."""

_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of an element, by safetensors' names of the types that are read."""


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """One tensor's entry in a file's header."""

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
        shapes = weight_shapes(self.config)
        return sum(math.prod(shapes[name]) * _ELEMENT_BYTES[self.tensors[name].element_type] for name in shapes)

    def fill(self, weights: ModelWeights) -> Iterator[int]:
        """Copy the tensors into ``weights``, converting their types, and yield the bytes of each piece.

        Copies to a GPU go through pinned buffers on the current stream, and may be under way after the last piece.
        Raises CheckpointError for a file that was whole when it was opened and cannot be read any more.
        """
        views = dict(checkpoint_views(self.config, weights))
        ring = None if weights.embed.device.type == "cpu" else PinnedRing(_STAGING_BYTES)
        # File by file, so that a disk reads each of them once from front to back.
        for name in sorted(views, key=lambda name: self.tensors[name].path):
            stored = self.tensors[name]
            element_bytes = _ELEMENT_BYTES[stored.element_type]
            source = held(self.config, name, stored.read(name, part_of(self.config, name, stored.shape)))
            # The last rank's vocabulary may be shorter.
            for num_elements in _copy(source, views[name][: len(source)], ring):
                yield num_elements * element_bytes
            if self.config.norm_plus_one and name.endswith("norm.weight"):
                views[name].add_(1.0)


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
    expected = weight_shapes(checkpoint.config.whole or checkpoint.config)
    missing = [name for name in expected if name not in checkpoint.tensors]
    why = " (config.json does not tie the embeddings)" if missing == ["lm_head.weight"] else ""
    unexpected = [
        name
        for name in checkpoint.tensors
        if name not in expected and not name.endswith("rotary_emb.inv_freq") and name != "lm_head.weight"
    ]
    for names, problem in (
        (missing, f"required by config.json{why} but missing"),
        (unexpected, "present but not called for by config.json: they do not match"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise CheckpointError(f"{checkpoint.source}: tensors {', '.join(names[:3])}{more} are {problem}")
    for name, shape in expected.items():
        tensor = checkpoint.tensors[name]
        what, types = f"{tensor.path}: tensor {name} must", ", ".join(_ELEMENT_BYTES)
        if tensor.shape != shape:
            raise CheckpointError(f"{what} have shape {list(shape)} by config.json; found {list(tensor.shape)}")
        if tensor.element_type not in _ELEMENT_BYTES:
            raise CheckpointError(f"{what} be one of {types}; found {tensor.element_type}")


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
        self, weights: ModelWeights, fill: Iterator[int], advance: Callable[[float], object] = lambda _: None
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
