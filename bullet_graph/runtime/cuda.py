"""The CUDA executor: decode from captured graphs, prefill and mixed steps eagerly, on one stream."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bullet_graph.graphs.decode_graph import DecodeGraphs, DecodeInputs
from bullet_graph.graphs.key import batch_size_buckets
from bullet_graph.graphs.report import CaptureReport
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.decoder import Decoder
from bullet_graph.models.flashinfer_attention import decode_workspace_bytes
from bullet_graph.models.pinned import Uploader
from bullet_graph.models.sampler import SamplingState, token_logprobs
from bullet_graph.partition.spec import WHOLE_GPU, SmPartition
from bullet_graph.runtime.eager_lane import EagerLane
from bullet_graph.runtime.launcher import Launcher
from bullet_graph.runtime.rows import lay_out
from bullet_graph.runtime.slots import settings_row
from bullet_graph.runtime.step import SlotInit, Step, StepLogprobs, StepResult

_GRAPH_BYTES = 8 * 1024**2
"""A captured decode step of 32 layers: 2.5 to 7 MiB measured (bench/results/h200/partitions.json)."""
_LIBRARY_BYTES = 1024**3
"""Loaded kernels, cuBLAS workspaces and the allocator's slack."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step under way: where its results will be once the event has passed."""

    finished: torch.cuda.Event
    token_ids: Tensor
    logprobs: tuple[Tensor, Tensor, Tensor] | None


class CudaExecutor:
    """Runs a decoder on one NVIDIA GPU.

    Args:
        decoder: weights and cache on the GPU.
        max_num_seqs: slots; one more is kept for padded rows.
        max_rows: most rows of a forward.
        num_kv_blocks: blocks of the cache.
        launcher: the lanes' streams; closed with the executor.
        partitions: to capture decode steps for; with none, they are launched kernel by kernel.
        progress: show a progress bar while capturing.

    Attributes:
        capture: what capturing cost, or None.
    """

    max_in_flight = 2

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_num_seqs: int,
        max_rows: int,
        num_kv_blocks: int,
        launcher: Launcher,
        partitions: Sequence[SmPartition],
        progress: bool,
    ) -> None:
        device = decoder.cos_sin.device
        self._decoder = decoder
        self._launcher = launcher
        self._stream = launcher.stream("decode", WHOLE_GPU)
        self._padding_slot = max_num_seqs
        self._pending: dict[int, _Pending] = {}
        self._next_ticket = 0
        torch.cuda.synchronize(device)  # weights and cache were made on the default stream
        with torch.cuda.stream(self._stream), torch.inference_mode():
            self._state = SamplingState(max_num_seqs + 1, device)
            self._eager = EagerLane(
                decoder,
                self._state,
                max_num_seqs=max_num_seqs,
                max_rows=max_rows,
                num_kv_blocks=num_kv_blocks,
            )
            self._slot_uploader = Uploader(max_num_seqs * (self._state.settings.shape[1] + 1) + 8, device)
            self._graphs = None
            self.capture: CaptureReport | None = None
            if partitions:
                self._graphs = DecodeGraphs(
                    decoder,
                    self._state,
                    max_batch_size=max_num_seqs,
                    num_kv_blocks=num_kv_blocks,
                    padding_slot=self._padding_slot,
                )
                self.capture = self._graphs.capture(
                    partitions, partial(launcher.stream, "decode"), progress=progress
                )
                launcher.stream("decode", WHOLE_GPU)  # eager steps have all SMs again

    @staticmethod
    def workspace_bytes(config: ModelConfig, max_num_seqs: int) -> int:
        """Fixed scratch of the executor, for the memory ledger."""
        return 2 * decode_workspace_bytes(config, max_num_seqs) + _LIBRARY_BYTES

    @staticmethod
    def graph_bytes(max_num_seqs: int, num_partitions: int) -> int:
        """Estimate of the captured graphs' memory, for the memory ledger."""
        return len(batch_size_buckets(max_num_seqs)) * num_partitions * _GRAPH_BYTES

    @torch.inference_mode()
    def launch(self, step: Step) -> int:
        """See :meth:`Executor.launch`."""
        with torch.cuda.stream(self._stream):
            if step.admitted:
                self._write_slots(step.admitted)
            rows = lay_out(step.prefill, step.decode, self._decoder.cache.block_tokens)
            if step.prefill is None and self._graphs is not None:
                inputs = DecodeInputs(
                    rows.decode_slots, rows.positions, rows.kv_slots, rows.kv_indptr, rows.kv_indices
                )
                token_ids = self._graphs.run(inputs)
                logits = self._graphs.logits(len(token_ids))
            else:
                logits, token_ids = self._eager.run(rows)
            logprobs = None
            if step.num_logprobs is not None:
                logprobs = token_logprobs(logits, token_ids, step.num_logprobs)
            pending = _Pending(
                torch.cuda.Event(),
                _to_host(token_ids),
                None
                if logprobs is None
                else (_to_host(logprobs[0]), _to_host(logprobs[1]), _to_host(logprobs[2])),
            )
            pending.finished.record()
        ticket = self._next_ticket
        self._next_ticket += 1
        self._pending[ticket] = pending
        return ticket

    def done(self, ticket: int) -> bool:
        """See :meth:`Executor.done`."""
        return bool(self._pending[ticket].finished.query())

    def wait(self, ticket: int) -> StepResult:
        """See :meth:`Executor.wait`."""
        pending = self._pending.pop(ticket)
        pending.finished.synchronize()
        logprobs = None
        if pending.logprobs is not None:
            chosen, top_ids, top = pending.logprobs
            logprobs = StepLogprobs(chosen.numpy(), top_ids.int().numpy(), top.numpy())
        return StepResult(pending.token_ids.numpy(), logprobs)

    def now(self) -> float:
        """See :meth:`Executor.now`."""
        return time.perf_counter()

    def shutdown(self) -> None:
        """See :meth:`Executor.shutdown`."""
        torch.cuda.synchronize()
        launcher = self._launcher
        self.__dict__.clear()
        launcher.close()

    def _write_slots(self, admitted: tuple[SlotInit, ...]) -> None:
        slots = np.array([init.slot for init in admitted], dtype=np.int32)
        table = np.concatenate([settings_row(init) for init in admitted])
        device_slots, device_table = self._slot_uploader.upload(slots, table)
        self._state.settings[device_slots] = device_table.view(len(admitted), -1)


def _to_host(tensor: Tensor) -> Tensor:
    """Start a copy into pinned memory on the current stream."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
