"""Captured decode steps: one CUDA graph per batch size, replayed with new inputs at fixed addresses."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bullet_graph.errors import ConfigError
from bullet_graph.graphs.collector import paused_collector
from bullet_graph.graphs.compiled import PartCompiler, TritonNormOps, compile_now, compiled_functions
from bullet_graph.graphs.key import GraphKey, batch_size_buckets, smallest_holding
from bullet_graph.kernels.cublas import cublas_sm_count, fitting_blas
from bullet_graph.kernels.decode_attention import DecodeBatch, PlannedDecode, TritonDecodeAttention
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.kernels.memory import Uploader, packed_offsets
from bullet_graph.kernels.sampler import SamplingState
from bullet_graph.kernels.triton_ops import TritonOps, sample
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.layers import LayerFunctions, eager_functions
from bullet_graph.partition.masks import SMS_PER_TPC, WHOLE_GPU, SmPartition

Int32Array = NDArray[np.int32]

_HEADER_ARRAYS = 6


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Host inputs of a decode step of ``n`` rows, all int32.

    Attributes:
        slots: [n], whose last tokens the step reads.
        positions: [n], of the input tokens.
        kv_slots: [n], where their keys and values go.
        kv_indptr: [n + 1], where each row's blocks start in ``kv_indices``.
        kv_indices: block ids.
    """

    slots: Int32Array
    positions: Int32Array
    kv_slots: Int32Array
    kv_indptr: Int32Array
    kv_indices: Int32Array


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    token_ids: Tensor


@dataclass(frozen=True, slots=True)
class _DeviceStep:
    slots: Tensor
    positions: Tensor
    sample_positions: Tensor
    kv_slots: Tensor
    attention: PlannedDecode


def _padding_rows(count: int, padding_slot: int) -> tuple[Int32Array, ...]:
    """(slots, positions, kv_slots, kv_indptr, kv_indices) of rows that touch the padding slot and block."""
    zeros: Int32Array = np.zeros(count, dtype=np.int32)
    return zeros + np.int32(padding_slot), zeros, zeros, np.arange(count + 1, dtype=np.int32), zeros


class DecodeGraphs:
    """Captures decode steps by batch size, and replays the smallest graph that holds a step.

    All graphs read their inputs from one device buffer, and contain sampling and the feed of the next token: a step
    needs one small copy from the host.

    Args:
        decoder: weights and cache.
        state: sampling settings and last tokens by slot.
        max_batch_size: most rows of a step.
        num_kv_blocks: most entries of ``kv_indices``, without padding.
        padding_slot: slot that padding rows read and write.
        compiler: of a layer's two parts, for steps of two or more rows; one row has a matrix kernel of its own.
    """

    def __init__(
        self,
        decoder: Decoder,
        state: SamplingState,
        *,
        max_batch_size: int,
        num_kv_blocks: int,
        padding_slot: int,
        compiler: PartCompiler = compile_now,
    ) -> None:
        self._decoder = decoder
        self._compiler = compiler
        self._one_row = eager_functions(TritonOps())
        self._several_rows: LayerFunctions | None = None
        device = decoder.cos_sin.device
        self._attention = TritonDecodeAttention(
            decoder.config, decoder.cache, max_rows=max_batch_size, gpu=Gpu.of(device)
        )
        self._state = state
        self._padding_slot = padding_slot
        self.batch_sizes = batch_size_buckets(max_batch_size)
        header = _HEADER_ARRAYS * (max_batch_size + 8)
        self._uploader = Uploader(header + num_kv_blocks + max_batch_size, device)
        self._logits = torch.empty(
            max_batch_size, decoder.config.vocab_size, dtype=decoder.weights.lm_head.dtype, device=device
        )
        self._captured: dict[GraphKey, _Captured] = {}
        self._sizes: dict[SmPartition, tuple[int, ...]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def compile(self) -> None:
        """Compile a layer's two parts, or load them, for steps of all sizes."""
        for size in self.batch_sizes:
            self._functions_for(size)

    def capture_one(self, key: GraphKey, stream: torch.cuda.Stream) -> None:
        """Capture one graph on the stream, which is bound to its partition; compiles first if need be."""
        self._functions_for(key.batch_size)
        # Padding rows stand for all: lengths do not change the launches.
        inputs = self._pad(DecodeInputs(*_padding_rows(1, self._padding_slot)), key.batch_size)
        # The last user of the shared buffers must be done: the lane may have changed its stream.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step = self._prepare(inputs, key.partition)
            # The first run loads kernels and lets libraries allocate, which a capture does not allow; all layers use
            # the same kernels.
            self._run(step, key.partition, last=1)
            graph = torch.cuda.CUDAGraph()
            with paused_collector():
                # `torch.cuda.graph` would synchronize and empty the allocator's cache for every graph.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    token_ids = self._run(step, key.partition)
                finally:
                    graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._captured[key] = _Captured(graph, token_ids)
        self._sizes[key.partition] = tuple(sorted({*self._sizes.get(key.partition, ()), key.batch_size}))

    def run(self, inputs: DecodeInputs, partition: SmPartition = WHOLE_GPU, *, replay: bool = True) -> Tensor:
        """Enqueue a decode step on the current stream.

        Args:
            partition: which capture to replay.
            replay: False launches the graph's kernels one by one, for comparison.

        Returns:
            [n] int32 sampled tokens, valid until the next step runs; their logits are in :meth:`logits`.
        """
        rows = len(inputs.slots)
        key = GraphKey(smallest_holding(rows, self._sizes.get(partition, ())) or rows, partition)
        captured = self._captured.get(key)
        if captured is None and replay:
            raise ConfigError(
                f"no decode graph was captured for {key}; captured: {len(self._captured)} graphs"
            )
        step = self._prepare(self._pad(inputs, key.batch_size), partition)
        if captured is None or not replay:
            return self._run(step, partition)[:rows]
        captured.graph.replay()
        return captured.token_ids[:rows]

    def logits(self, rows: int) -> Tensor:
        """Logits of the step that was enqueued last, [rows, vocab_size]."""
        return self._logits[:rows]

    def _functions_for(self, rows: int) -> LayerFunctions:
        if rows == 1:
            return self._one_row
        if self._several_rows is None:
            self._several_rows = compiled_functions(
                self._decoder, TritonOps(), TritonNormOps(), self.batch_sizes[-1], self._compiler
            )
        return self._several_rows

    def _pad(self, inputs: DecodeInputs, batch_size: int) -> DecodeInputs:
        missing = batch_size - len(inputs.slots)
        if missing == 0:
            return inputs
        slots, positions, kv_slots, kv_indptr, kv_indices = _padding_rows(missing, self._padding_slot)
        return DecodeInputs(
            np.concatenate((inputs.slots, slots)),
            np.concatenate((inputs.positions, positions)),
            np.concatenate((inputs.kv_slots, kv_slots)),
            np.concatenate((inputs.kv_indptr, kv_indptr[1:] + inputs.kv_indptr[-1])),
            np.concatenate((inputs.kv_indices, kv_indices)),
        )

    def _prepare(self, inputs: DecodeInputs, partition: SmPartition) -> _DeviceStep:
        """Upload the inputs; addresses depend on the batch size alone."""
        rows = len(inputs.slots)
        kv_lens = inputs.positions + np.int32(1)
        block_tokens = np.int32(self._decoder.cache.block_tokens)
        slots, positions, sample_positions, kv_slots, last_block_tokens, kv_indptr, _ = self._uploader.upload(
            inputs.slots,
            inputs.positions,
            kv_lens,
            inputs.kv_slots,
            inputs.positions % block_tokens + np.int32(1),
            inputs.kv_indptr,
            inputs.kv_indices,
        )
        _, indices_start = packed_offsets([rows] * 5 + [rows + 1])
        batch = DecodeBatch(kv_indptr, self._uploader.device_buffer[indices_start:], last_block_tokens)
        attention = self._attention.plan(batch, num_sms=self._lane_sms(partition))
        return _DeviceStep(slots, positions, sample_positions, kv_slots, attention)

    def _run(self, step: _DeviceStep, partition: SmPartition, last: int | None = None) -> Tensor:
        """Launch the step's kernels, of the layers before ``last``."""
        num_sms = self._lane_sms(partition)
        with cublas_sm_count(num_sms), fitting_blas(len(step.slots), num_sms):
            return self._forward(step, last)

    def _lane_sms(self, partition: SmPartition) -> int | None:
        """SMs to lay kernels out for; None: all of the device."""
        return None if partition.decode_tpcs is None else SMS_PER_TPC * partition.decode_tpcs

    def _forward(self, step: _DeviceStep, last: int | None) -> Tensor:
        rows = len(step.slots)
        functions = self._functions_for(rows)
        hidden = self._decoder.run_layers(
            self._decoder.embed(self._state.last_token[step.slots]),
            step.positions,
            step.kv_slots,
            step.attention,
            functions,
            last=last,
        )
        logits = self._decoder.logits(hidden, functions.ops, out=self._logits[:rows])
        return sample(logits, step.slots, step.sample_positions, self._state)
