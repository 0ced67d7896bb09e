"""Captured decode steps: one CUDA graph per batch size and partition, replayed with new inputs in fixed buffers."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.cuda import Event

from bullet_graph.errors import ConfigError
from bullet_graph.graphs.compiled import PartCompiler, TritonNormOps, compile_now, compiled_functions
from bullet_graph.graphs.key import GraphKey, batch_size_buckets, smallest_holding
from bullet_graph.kernels.communicator import Communicator
from bullet_graph.kernels.decode_attention import DecodeBatch, PlannedDecode, TritonDecodeAttention, window_indptr
from bullet_graph.kernels.few_rows import FEW_ROWS
from bullet_graph.kernels.gpu import Gpu, captured, fitting_blas
from bullet_graph.kernels.memory import Uploader
from bullet_graph.kernels.sampler import SamplingState
from bullet_graph.kernels.shared_blocks import SharedBlocks
from bullet_graph.kernels.triton_ops import TritonOps, sample
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.layers import LayerFunctions, eager_functions
from bullet_graph.partition.masks import WHOLE_GPU, SmPartition, lane_sms

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Host inputs of a decode step of ``n`` rows, all int32.

    The last tokens of ``slots`` are the step's inputs, whose keys and values go to ``kv_slots``. ``kv_lens`` [n] count
    the tokens in each row's blocks, and ``kv_indptr`` [n + 1] is where these start in ``kv_indices``.
    """

    slots: Int32Array
    positions: Int32Array
    kv_lens: Int32Array
    kv_slots: Int32Array
    kv_indptr: Int32Array
    kv_indices: Int32Array


@dataclass(frozen=True, slots=True)
class _DeviceStep:
    slots: Tensor
    positions: Tensor
    sample_positions: Tensor
    kv_slots: Tensor
    attention: PlannedDecode


_LEAST_SHARING_ROWS = 8
_EMPTY: Int32Array = np.zeros(0, dtype=np.int32)
_NO_ROWS = DecodeInputs(_EMPTY, _EMPTY, _EMPTY, _EMPTY, np.zeros(1, dtype=np.int32), _EMPTY)


class DecodeGraphs:
    """Captures decode steps, and replays the smallest graph that holds a step.

    All graphs read their inputs from one device buffer, and include sampling and the feed of the next token: a step
    needs one small copy from the host.

    With ``shares_prefixes``, larger steps on the whole GPU have a second graph, which reads the first blocks that
    neighbouring rows have in common once. It is replayed where that saves enough.

    Padding rows read and write slot ``max_batch_size``. Steps of few rows, and in FP8, are not compiled.
    """

    def __init__(
        self,
        decoder: Decoder,
        state: SamplingState,
        *,
        max_batch_size: int,
        shares_prefixes: bool = False,
        compiler: PartCompiler = compile_now,
        communicator: Communicator | None = None,
    ) -> None:
        self._decoder = decoder
        self._compiler = compiler
        self._ops = TritonOps(communicator=communicator)
        self._eager = eager_functions(self._ops)
        self._compiled: LayerFunctions | None = None
        device = decoder.cos_sin.device
        self._attention = TritonDecodeAttention(
            decoder.config, decoder.cache, max_rows=max_batch_size, gpu=Gpu.of(device)
        )
        self._state = state
        self._padding_slot = max_batch_size
        self.batch_sizes = batch_size_buckets(max_batch_size)
        self._windows = decoder.cache.distinct_windows
        self._shares_prefixes = shares_prefixes and self._attention.can_share
        # Six arrays with an entry per row, and one more for each window. Common blocks take 2.5 entries per row. Then
        # the block ids, with those of padding: rows may share blocks.
        self._uploader = Uploader(
            (9 + len(self._windows)) * (max_batch_size + 8) + max_batch_size * (decoder.most_blocks + 1), device
        )
        self._logits = torch.empty(
            max_batch_size, decoder.config.vocab_size, dtype=decoder.weights.lm_head.dtype, device=device
        )
        # The second part of a key: whether the graph reads common blocks once.
        self._captured: dict[tuple[GraphKey, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._sizes: dict[SmPartition, tuple[int, ...]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def compile(self) -> None:
        """Compile or load a layer's two parts for steps of all sizes."""
        self._functions_for(self.batch_sizes[-1])

    def capture_one(self, key: GraphKey, stream: torch.cuda.Stream) -> None:
        """Capture a size's graphs on the stream, which is bound to its partition; compiles first if need be."""
        self._functions_for(key.batch_size)
        # Padding rows will do: lengths do not change the launches.
        inputs = self._pad(_NO_ROWS, key.batch_size)
        self._capture(key, inputs, None, stream)
        if self._shares_prefixes and key.partition == WHOLE_GPU and key.batch_size >= _LEAST_SHARING_ROWS:
            groups: Int32Array = np.zeros(key.batch_size // 2 + 1, dtype=np.int32)
            none = SharedBlocks(groups, np.zeros(key.batch_size // 2 * 2, dtype=np.int32), inputs.kv_indptr)
            self._capture(key, inputs, none, stream)
        self._sizes[key.partition] = tuple(sorted({*self._sizes.get(key.partition, ()), key.batch_size}))

    def _capture(
        self, key: GraphKey, inputs: DecodeInputs, shared: SharedBlocks[Int32Array] | None, stream: torch.cuda.Stream
    ) -> None:
        # The last user of the shared buffers must be done: the lane may have changed its stream.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step = self._prepare(inputs, key.partition, shared)
            # The first run loads the kernels of all layers, and libraries allocate: a capture allows neither.
            self._run(step, key.partition, last=1)
            with captured(self._pool) as graph:
                token_ids = self._run(step, key.partition)
        torch.cuda.current_stream().wait_stream(stream)
        self._captured[key, shared is not None] = graph, token_ids

    def run(
        self, inputs: DecodeInputs, partition: SmPartition = WHOLE_GPU, least_rows: int = 1, start: Event | None = None
    ) -> Tensor:
        """Enqueue a decode step on the current stream, padded to ``least_rows`` if there is a graph of that size.

        Returns [n] int32 sampled tokens, valid until the next step runs; their logits are in :meth:`logits`. ``start``
        is recorded after the host's work, which would count as the step's time on an idle GPU.
        """
        rows = len(inputs.slots)
        sizes = self._sizes.get(partition, ())
        key = GraphKey(least_rows if rows < least_rows in sizes else smallest_holding(rows, sizes) or rows, partition)
        if (key, False) not in self._captured:
            raise ConfigError(f"no decode graph was captured for {key}; captured: {len(self._captured)} graphs")
        padded, shared = self._pad(inputs, key.batch_size), None
        if (key, True) in self._captured:
            shared = self._attention.shared_blocks(padded.kv_indptr, padded.kv_indices)
        self._prepare(padded, partition, shared)
        graph, token_ids = self._captured[key, shared is not None]
        if start is not None:
            start.record()
        graph.replay()
        return token_ids[:rows]

    def logits(self, rows: int) -> Tensor:
        """Logits of the step that was enqueued last, [rows, vocab_size]."""
        return self._logits[:rows]

    def _functions_for(self, rows: int) -> LayerFunctions:
        config = self._decoder.config
        # Experts in 16 bits were not measured, but for one row (bench/LOG.md).
        if rows == 1 or config.fp8 is not None or (rows <= FEW_ROWS and not config.num_experts):
            return self._eager
        if self._compiled is None:
            self._compiled = compiled_functions(
                self._decoder, self._ops, TritonNormOps(), self.batch_sizes[-1], self._compiler
            )
        return self._compiled

    def _pad(self, inputs: DecodeInputs, batch_size: int) -> DecodeInputs:
        missing = batch_size - len(inputs.slots)
        if missing == 0:
            return inputs
        zeros: Int32Array = np.zeros(missing, dtype=np.int32)
        return DecodeInputs(
            np.append(inputs.slots, zeros + np.int32(self._padding_slot)),
            np.append(inputs.positions, zeros),
            np.append(inputs.kv_lens, zeros + np.int32(1)),
            np.append(inputs.kv_slots, zeros),
            # The first block is nobody's: one for each row.
            np.append(inputs.kv_indptr, inputs.kv_indptr[-1] + np.arange(1, missing + 1, dtype=np.int32)),
            np.append(inputs.kv_indices, zeros),
        )

    def _prepare(
        self, inputs: DecodeInputs, partition: SmPartition, shared: SharedBlocks[Int32Array] | None = None
    ) -> _DeviceStep:
        """Upload the inputs; addresses depend on the batch size and on whether blocks are shared alone."""
        block_tokens = np.int32(self._decoder.cache.block_tokens)
        uploaded = self._uploader.upload(
            inputs.slots,
            inputs.positions,
            inputs.positions + np.int32(1),
            inputs.kv_slots,
            inputs.positions % block_tokens + np.int32(1),
            inputs.kv_indptr,
            *(window_indptr(inputs.kv_lens, window, int(block_tokens)) for window in self._windows),
            *(shared or ()),
            inputs.kv_indices,
        )
        slots, positions, sample_positions, kv_slots, last_block_tokens, kv_indptr, *windows = uploaded
        kv_indices = windows.pop()
        on_device = None if shared is None else SharedBlocks(*windows)
        # To the end of the buffer: a captured step may read more blocks when it is replayed.
        all_indices = self._uploader.device_buffer[kv_indices.storage_offset() :]
        by_window = dict(zip(self._windows, windows, strict=False))
        batch = DecodeBatch(kv_indptr, all_indices, last_block_tokens, by_window, on_device)
        attention = self._attention.plan(batch, num_sms=lane_sms(partition))
        return _DeviceStep(slots, positions, sample_positions, kv_slots, attention)

    def _run(self, step: _DeviceStep, partition: SmPartition, last: int | None = None) -> Tensor:
        """Launch the step's kernels, of the layers before ``last``."""
        rows, num_sms = len(step.slots), lane_sms(partition)
        functions = self._functions_for(rows)
        with fitting_blas(rows, num_sms):
            hidden = self._decoder.run_layers(
                self._decoder.embed(self._state.last_token[step.slots], functions.ops),
                step.positions,
                step.kv_slots,
                step.attention,
                functions,
                last=last,
            )
            logits = self._decoder.logits(hidden, functions.ops, out=self._logits[:rows])
            return sample(logits, step.slots, step.sample_positions, self._state)
