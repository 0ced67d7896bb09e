"""The memory ledger: how an engine divides its device's memory, settled before anything is allocated."""

from dataclasses import dataclass, replace

from bullet_graph.config import KV_BLOCK_TOKENS, EngineConfig
from bullet_graph.errors import InsufficientMemoryError
from bullet_graph.graphs.capture_plan import CapturePlan
from bullet_graph.models.config import ModelConfig
from bullet_graph.partition.masks import LANES
from bullet_graph.perf.roofline import DecoderShape, kv_cache_bytes_per_token
from bullet_graph.sampling_params import SCORED_ROWS

GIB = 1024**3
MIB = 1024**2

_LIBRARY_BYTES = GIB
"""Estimate for a GPU: loaded kernels, cuBLAS workspaces and the allocator's slack."""
_LANE_ROWS = 2048
"""Rows of the planner's largest chunk on the prefill lane."""
_TILE_ROWS = 128
"""Query rows of a tile of FlashInfer's fa2, counted once for each query head of a key head; the most it takes."""
_SPLIT_TILES = 512
"""Tiles that its planner cuts work into where it splits keys: two for each SM, of up to 256."""


def format_bytes(num_bytes: int) -> str:
    """A size as text: in GiB, or in MiB below one GiB."""
    return f"{num_bytes / MIB:,.2f} MiB" if abs(num_bytes) < GIB else f"{num_bytes / GIB:,.2f} GiB"


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of the device before the engine takes any, in bytes."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Every part of the engine's device memory; ``num_kv_blocks`` includes the padding block.

    ``budget_bytes`` is the share by ``gpu_memory_utilization``, less the memory in use before. Workspaces are scratch
    of attention and matrix products, and loaded kernels. ``graphs_bytes`` is estimated, with piecewise graphs' buffers.
    """

    device: DeviceMemory
    budget_bytes: int
    weights_bytes: int
    activations_bytes: int
    workspaces_bytes: int
    graphs_bytes: int
    kv_cache_bytes: int
    num_kv_blocks: int

    @property
    def kv_cache_tokens(self) -> int:
        return (self.num_kv_blocks - 1) * KV_BLOCK_TOKENS

    def rows(self) -> list[tuple[str, int]]:
        """(label, bytes) of each part, of the memory left free and of that in use before; they add up to the device."""
        parts = [
            ("weights", self.weights_bytes),
            (f"KV cache ({self.kv_cache_tokens:,} tokens)", self.kv_cache_bytes),
            ("activations", self.activations_bytes),
            ("workspaces", self.workspaces_bytes),
            ("CUDA graphs", self.graphs_bytes),
        ]
        spent = sum(size for _, size in parts)
        free, total = self.device.free_bytes, self.device.total_bytes
        return [*parts, ("left free", free - spent), ("in use before", total - free)]

    def __str__(self) -> str:
        rows = [*self.rows(), ("device", self.device.total_bytes)]
        return "\n".join(f"{label:<34}{format_bytes(size):>14}" for label, size in rows)


def with_kv_blocks(ledger: MemoryLedger, num_kv_blocks: int) -> MemoryLedger:
    """The same ledger with a KV cache of fewer blocks, as another rank can hold."""
    block_bytes = ledger.kv_cache_bytes // ledger.num_kv_blocks
    return replace(ledger, num_kv_blocks=num_kv_blocks, kv_cache_bytes=num_kv_blocks * block_bytes)


def held_tokens(config: EngineConfig, window: int | None, max_model_len: int) -> int:
    """The most tokens of a sequence that are in the KV cache at once.

    Those before the widest ``window``, if every layer has one, are given back. Two chunks and a begun block count.
    """
    return max_model_len if window is None else min(max_model_len, window + 2 * config.chunk_tokens + KV_BLOCK_TOKENS)


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    *,
    dtype_bytes: int,
    max_model_len: int,
    device: DeviceMemory,
    workspaces_bytes: int,
    graphs_bytes: int,
    kv_cache_limit_bytes: int | None = None,
) -> MemoryLedger:
    """Divide the device's memory; the KV cache takes the remainder, up to ``max_num_seqs`` sequences of full length.

    ``kv_cache_limit_bytes`` is its upper limit where ``kv_cache_bytes`` is not set; one sequence always fits.

    Raises InsufficientMemoryError, which names the shortage and the settings to change, where one sequence of
    ``max_model_len`` tokens, or ``kv_cache_bytes``, does not fit.
    """
    budget = int(device.total_bytes * config.gpu_memory_utilization) - (device.total_bytes - device.free_bytes)
    weights = model.weight_bytes(dtype_bytes)
    tables = 4 * len(model.distinct_ropes) * model.head_dim * max_model_len
    activations = _activation_bytes(config, model, dtype_bytes) + tables
    fixed = weights + activations + workspaces_bytes + graphs_bytes
    block = KV_BLOCK_TOKENS * kv_cache_bytes_per_token(model, dtype_bytes=dtype_bytes)
    blocks_per_seq = -(-held_tokens(config, model.widest_window, max_model_len) // KV_BLOCK_TOKENS)
    # One block is the padding block. More than every sequence at full length can fill would only keep old prefixes.
    least, most = (1 + blocks_per_seq) * block, (1 + config.max_num_seqs * blocks_per_seq) * block
    if kv_cache_limit_bytes is not None:
        most = max(least, min(most, kv_cache_limit_bytes))
    asked, available = config.kv_cache_bytes, budget - fixed
    one_sequence = f"one sequence of max_model_len={max_model_len} tokens"
    if asked is not None and asked < least:
        raise InsufficientMemoryError(
            f"the KV cache for {one_sequence} needs {format_bytes(least)}, but kv_cache_bytes={asked} allows "
            f"{format_bytes(asked)}: short by {format_bytes(least - asked)}. Raise kv_cache_bytes or lower "
            "max_model_len."
        )
    need, what, lower = (
        (least, one_sequence, "max_model_len")
        if asked is None
        else (asked, f"kv_cache_bytes={asked}", "kv_cache_bytes")
    )
    if need > available:
        raise InsufficientMemoryError(
            f"the KV cache for {what} needs {format_bytes(need)}, but a budget of {format_bytes(budget)} leaves "
            f"{format_bytes(available)} after weights {format_bytes(weights)}, activations "
            f"{format_bytes(activations)}, workspaces {format_bytes(workspaces_bytes)} and graphs "
            f"{format_bytes(graphs_bytes)}: short by {format_bytes(need - available)}. Lower {lower}, "
            "max_num_batched_tokens or max_num_seqs, raise gpu_memory_utilization "
            f"(now {config.gpu_memory_utilization}), or free memory on the device."
        )
    num_blocks = (min(most, available) if asked is None else asked) // block
    return MemoryLedger(
        device, budget, weights, activations, workspaces_bytes, graphs_bytes, num_blocks * block, num_blocks
    )


def piecewise_scratch_bytes(config: ModelConfig, max_rows: int, *, dtype_bytes: int) -> int:
    """Device memory of piecewise graphs in bytes, without the graphs themselves.

    The buffers of a :class:`~bullet_graph.graphs.piecewise.PiecewiseForward` hold activations, and int32 positions
    and cache slots. All pieces share a pool for results: at most three of [rows, hidden_size] at a time, and an MLP's.
    """
    buffers = 2 * config.hidden_size + (config.q_size + 2 * config.kv_size) + 2 * config.q_size
    return max_rows * ((buffers + 3 * config.hidden_size + config.mlp_result_size) * dtype_bytes + 2 * 4)


def graphs_bytes(plan: CapturePlan, config: ModelConfig, *, dtype_bytes: int) -> int:
    """Estimated device memory of the captured graphs, with the buffers of piecewise graphs."""
    scratch = piecewise_scratch_bytes(config, max(plan.piecewise_rows, default=0), dtype_bytes=dtype_bytes)
    return plan.graph_bytes(config.num_layers) + scratch


def workspace_bytes(config: ModelConfig) -> int:
    """Scratch memory of an executor on a GPU."""
    return len(LANES) * prefill_workspace_bytes(config) + _LIBRARY_BYTES


def prefill_workspace_bytes(shape: DecoderShape) -> int:
    """Float scratch of a lane's prefill attention, in bytes.

    Where tiles are fewer than what fills the device, FlashInfer's fa2 splits keys until they do, and keeps partial
    outputs and their log-sum-exp in float32 for each (head, tile, row); fa3 keeps none.
    """
    return shape.num_heads * (_SPLIT_TILES // shape.num_kv_heads + 1) * _TILE_ROWS * (shape.head_dim + 1) * 4 + 1024**2


def _activation_bytes(config: EngineConfig, model: ModelConfig, dtype_bytes: int) -> int:
    """Peak of a layer's intermediate results for the widest forward on each lane, and of the logits."""
    lane_rows = min(config.chunk_tokens, _LANE_ROWS) if config.policy.uses_prefill_lane else 0
    rows = config.chunk_tokens + config.max_num_seqs + lane_rows
    per_row = 4 * model.hidden_size + 2 * (model.q_size + 2 * model.kv_size) + model.mlp_result_size
    # Logits of decode steps and of other forwards in the weights' dtype, some twice in float32 for log-probabilities,
    # and a mark for every token. With several ranks also as they are gathered, and as they are joined.
    copies = 2 if model.num_ranks == 1 else 6
    sampled = max(config.max_num_seqs, SCORED_ROWS)
    logits = sampled * copies * dtype_bytes + SCORED_ROWS * 2 * 4 + config.max_num_seqs * 4
    return rows * per_row * dtype_bytes + logits * model.vocab_size
