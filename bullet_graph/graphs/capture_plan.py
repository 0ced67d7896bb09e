"""What an engine captures at its start: batch sizes for each partition, and rows of short forwards. No torch."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from bullet_graph.config import DtypeName
from bullet_graph.errors import ConfigError
from bullet_graph.graphs.key import batch_size_buckets, row_buckets
from bullet_graph.partition.masks import SMS_PER_TPC, SmPartition, partition_of
from bullet_graph.perf.traffic import DecoderShape

DECODE_GRAPH_BYTES = 8 * 1024**2
"""A captured decode step of 32 layers: 2.5 to 7 MiB measured (bench/results/h200/partitions.json)."""

DECODE_GRAPH_S = 0.022
"""Capturing it: 0.021 to 0.022 s measured (the same file)."""

PIECE_BYTES = 512 * 1024
"""A captured piece of a short forward: 1,024 of them and 39 decode steps took 845 MB (llama-3.1-8b on an H200)."""

PIECE_S = 0.005
"""Capturing it: these took 5.8 s together (bench/LOG.md)."""

PLAN_DTYPES = tuple(name for name in get_args(DtypeName) if name != "auto")


@dataclass(frozen=True, slots=True)
class DecodeSizes:
    """Batch sizes that are captured for one size of the decode lane.

    Attributes:
        decode_sms: SMs of the decode lane, the prefill lane has the others; None for the whole GPU.
        batch_sizes: rows of the captured steps, rising; a step is padded up to the next of them.
    """

    decode_sms: int | None
    batch_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePlan:
    """What an engine captures at its start, no more and no less.

    Chunks of prefill decide nothing here but through the rows of short forwards: longer ones, and those of the prefill
    lane, are launched kernel by kernel.

    Attributes:
        model: a preset's name, or the name of a model folder.
        dtype: of weights and KV cache.
        num_sms: SMs of the GPU that the partitions divide.
        max_num_seqs: most sequences running at once; the whole GPU has a graph of so many rows.
        decode: the whole GPU, then partitions by rising size of the decode lane.
        piecewise_rows: rows, prompt and decode ones together, of the forwards with prompt tokens that run in
            captured pieces on the whole GPU, rising. Longer forwards are launched kernel by kernel.

    Raises:
        ConfigError: at construction, naming the entry, what was found and what to do.
    """

    model: str
    dtype: str
    num_sms: int
    max_num_seqs: int
    decode: tuple[DecodeSizes, ...]
    piecewise_rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require(
            isinstance(self.model, str) and self.model != "" and self.model.isprintable(),
            "model",
            self.model,
            "the name of a preset or of a model folder",
        )
        _require(self.dtype in PLAN_DTYPES, "dtype", self.dtype, f"one of {', '.join(PLAN_DTYPES)}")
        _require_count("num_sms", self.num_sms, "an integer of at least 2: the GPU's SMs", least=2)
        _require_count("max_num_seqs", self.max_num_seqs, "an integer of at least 1")
        self._check_partitions()
        for index, entry in enumerate(self.decode):
            key = f"decode[{index}].batch_sizes"
            _require_rising(key, entry.batch_sizes)
            _require(bool(entry.batch_sizes), key, [], "at least one size; or leave out the partition")
            _require(
                entry.batch_sizes[-1] <= self.max_num_seqs,
                key,
                entry.batch_sizes[-1],
                f"sizes up to max_num_seqs={self.max_num_seqs}: lower it, or raise max_num_seqs",
            )
        _require(
            self.decode[0].batch_sizes[-1] == self.max_num_seqs,
            "decode[0].batch_sizes",
            self.decode[0].batch_sizes[-1],
            f"max_num_seqs={self.max_num_seqs} as the largest size: the whole GPU serves every batch; add it",
        )
        _require_rising("piecewise_rows", self.piecewise_rows)

    def _check_partitions(self) -> None:
        sizes = [entry.decode_sms for entry in self.decode]
        _require(
            sizes[:1] == [None] and None not in sizes[1:],
            "decode",
            [size or "the whole GPU" for size in sizes],
            "the whole GPU (an entry without decode_sms) first, and once",
        )
        before = 0
        for index, entry in enumerate(self.decode[1:], 1):
            key, sms = f"decode[{index}].decode_sms", entry.decode_sms
            _require_count(key, sms, "a number of SMs of at least 2", least=SMS_PER_TPC)
            assert sms is not None
            _require(
                sms % SMS_PER_TPC == 0, key, sms, f"a multiple of {SMS_PER_TPC} SMs (a TPC): take {sms + 1}"
            )
            most = self.num_sms - SMS_PER_TPC
            _require(sms <= most, key, sms, f"at most {most} of the GPU's {self.num_sms} SMs: lower it")
            _require(sms > before, key, sms, "more SMs than the entry before: sort them, each once")
            before = sms

    @property
    def decode_sms(self) -> tuple[int, ...]:
        """Sizes of the decode lane besides the whole GPU, rising."""
        return tuple(entry.decode_sms for entry in self.decode if entry.decode_sms is not None)

    @property
    def batch_sizes(self) -> Mapping[SmPartition, tuple[int, ...]]:
        """Batch sizes to capture by partition, the whole GPU first."""
        return {partition: entry.batch_sizes for partition, entry in self._by_partition()}

    @property
    def max_batch_sizes(self) -> Mapping[SmPartition, int]:
        """Most rows of a captured step by partition; no larger batch may be placed there."""
        return {partition: entry.batch_sizes[-1] for partition, entry in self._by_partition()}

    def padded(self, batch_size: int, decode_sms: int | None = None) -> int:
        """Rows of the graph that serves a batch; as they are, where none does."""
        for entry in self.decode:
            if entry.decode_sms == decode_sms and batch_size <= entry.batch_sizes[-1]:
                return entry.batch_sizes[bisect_left(entry.batch_sizes, batch_size)]
        return batch_size

    @property
    def num_decode_graphs(self) -> int:
        """Decode steps to capture."""
        return sum(len(entry.batch_sizes) for entry in self.decode)

    def graph_bytes(self, num_layers: int) -> int:
        """Estimate of the captured graphs' memory, of a model with so many layers.

        What pieces of short forwards compute in comes on top (``graphs.piecewise.piecewise_scratch_bytes``).
        """
        pieces = len(self.piecewise_rows) * num_layers
        return self.num_decode_graphs * DECODE_GRAPH_BYTES + pieces * PIECE_BYTES

    def capture_s(self, num_layers: int) -> float:
        """Estimate of the seconds that capturing takes; compiling, once for all sizes, is not in it."""
        pieces = len(self.piecewise_rows) * num_layers
        return self.num_decode_graphs * DECODE_GRAPH_S + pieces * PIECE_S

    def _by_partition(self) -> Iterator[tuple[SmPartition, DecodeSizes]]:
        for entry in self.decode:
            yield partition_of(entry.decode_sms, num_sms=self.num_sms), entry


def default_plan(
    *,
    model: str,
    dtype: str,
    num_sms: int,
    max_num_seqs: int,
    max_rows: int,
    shape: DecoderShape,
    decode_sms: Sequence[int],
) -> CapturePlan:
    """What an engine captures that no plan was named for: all buckets, for the whole GPU and each partition.

    Args:
        max_rows: most rows of a forward.
        shape: of the model.
        decode_sms: sizes of the decode lane besides the whole GPU, rising.

    Raises:
        ConfigError: as :class:`CapturePlan` says.
    """
    sizes = batch_size_buckets(max_num_seqs)
    return CapturePlan(
        model=model,
        dtype=dtype,
        num_sms=num_sms,
        max_num_seqs=max_num_seqs,
        decode=tuple(DecodeSizes(sms, sizes) for sms in (None, *decode_sms)),
        piecewise_rows=row_buckets(max_rows, shape),
    )


def _require(good: bool, key: str, found: object, required: str) -> None:
    if not good:
        raise ConfigError(f"{key} must be {required}; found {found!r:.120}")


def _require_count(key: str, value: Any, required: str, *, least: int = 1) -> None:
    _require(isinstance(value, int) and not isinstance(value, bool) and value >= least, key, value, required)


def _require_rising(key: str, sizes: Sequence[Any]) -> None:
    before = 0
    for index, size in enumerate(sizes):
        _require_count(f"{key}[{index}]", size, "an integer of at least 1")
        _require(
            size > before,
            f"{key}[{index}]",
            size,
            f"more than the size before, {before}: sort them, each once",
        )
        before = size
