"""The CPU executor: the same model code with reference attention; each launch runs to its end."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import torch
from torch import Tensor

from bullet_graph.graphs.compiled import CompiledOps, PartCompiler, by_rows, compiled_functions
from bullet_graph.kernels.attention import ReferenceAttention
from bullet_graph.kernels.communicator import ALONE, Communicator, Communicators
from bullet_graph.kernels.memory import KVCache
from bullet_graph.kernels.ops import TorchOps
from bullet_graph.kernels.sampler import SamplingState, sample, token_logprobs
from bullet_graph.models.decoder import Decoder, Hidden, SampledRows
from bullet_graph.models.layers import LayerFunctions, eager_functions
from bullet_graph.partition.masks import LANES, Lane
from bullet_graph.runtime.executor import Executor, clear_frames
from bullet_graph.runtime.rows import Rows, adjustments_row, lay_out, settings_row
from bullet_graph.runtime.step import Int32Array, Placement, Step, StepLogprobs, StepResult


@dataclass(frozen=True, slots=True)
class _Forward:
    """A forward between two of its layers."""

    rows: Rows
    attention: ReferenceAttention
    sampled: SampledRows
    hidden: Hidden


def reference_attention(cache: KVCache, rows: Rows, q_indptr: Int32Array) -> ReferenceAttention:
    """Attention of a forward's rows, or of the sampled ones: ``q_indptr`` [n + 1], where each sequence's start."""
    return ReferenceAttention(
        cache,
        q_indptr=q_indptr.tolist(),
        kv_lens=rows.kv_lens.tolist(),
        kv_indptr=rows.kv_indptr.tolist(),
        kv_indices=torch.from_numpy(rows.kv_indices).long().to(cache.layer(0)[0].device),
    )


@torch.inference_mode()
def compiled_for_cpu(
    decoder: Decoder, max_rows: int, compiler: PartCompiler, communicator: Communicator | None
) -> LayerFunctions:
    """Layer functions for up to ``max_rows`` rows, compiled for forwards of two or more rows."""
    ops = TorchOps(communicator)
    return by_rows(eager_functions(ops), compiled_functions(decoder, ops, CompiledOps(), max_rows, compiler))


class CpuExecutor(Executor):
    """Runs a decoder on the CPU; the lanes take turns, launch by launch.

    ``functions`` are a layer's, by lane; None runs it eagerly, with ``communicators``.
    """

    max_in_flight = 1

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_num_seqs: int,
        functions: Mapping[Lane, LayerFunctions] | None = None,
        communicators: Communicators = ALONE,
    ) -> None:
        self._decoder = decoder
        self._functions = functions or {lane: eager_functions(TorchOps(communicators.get(lane))) for lane in LANES}
        self._state = SamplingState(max_num_seqs, decoder.config.vocab_size, torch.device("cpu"))
        self._forwards: dict[Lane, _Forward] = {}
        self._results: dict[int, StepResult] = {}
        self._tickets = count()

    @torch.inference_mode()
    def launch(self, step: Step, placement: Placement) -> int:
        start_s = time.perf_counter()
        functions = self._functions[placement.lane]
        if placement.first_layer == 0:
            self._forwards[placement.lane] = self._begin(step, functions.ops)
        forward = self._forwards[placement.lane]
        rows = forward.rows
        hidden = self._decoder.run_layers(
            forward.hidden,
            torch.from_numpy(rows.positions).long(),
            torch.from_numpy(rows.kv_slots).long(),
            forward.attention,
            functions,
            first=placement.first_layer,
            last=placement.last_layer,
            sampled=forward.sampled if rows.scored is None else None,
        )
        token_ids: Int32Array = np.empty(0, dtype=np.int32)
        logprobs = prompt_logprobs = None
        if placement.last_layer is None:
            del self._forwards[placement.lane]
            if (scored := rows.scored) is not None:
                ids = torch.from_numpy(scored.rows), torch.from_numpy(scored.token_ids)
                prompt_logprobs = _logprobs(self._decoder.score(hidden, *ids, scored.num_logprobs, functions.ops))
                hidden = hidden.rows(forward.sampled.rows)
            logits = self._decoder.logits(hidden, functions.ops)
            slots, positions = torch.from_numpy(rows.sample_slots), torch.from_numpy(rows.sample_positions)
            sampled = sample(logits, slots.long(), positions, self._state)
            token_ids = sampled.numpy()
            if step.num_logprobs is not None:
                logprobs = _logprobs(token_logprobs(logits, sampled, step.num_logprobs))
        else:
            self._forwards[placement.lane] = replace(forward, hidden=hidden)
        ticket = next(self._tickets)
        device_ms = (time.perf_counter() - start_s) * 1e3
        self._results[ticket] = StepResult(token_ids, logprobs, device_ms, prompt_logprobs)
        return ticket

    def _begin(self, step: Step, ops: TorchOps) -> _Forward:
        for init in step.admitted:
            self._state.settings[init.slot] = torch.from_numpy(settings_row(init))
            if init.adjustments is not None:
                self._state.write_adjustments(init.slot, adjustments_row(init.adjustments, self._state.vocab_size))
        if step.bitmasks is not None:
            self._state.write_bitmasks(step.bitmasks.slots, step.bitmasks.words)
        rows = lay_out(step.prefill, step.decode, self._decoder.cache.block_tokens)
        attention, sampled_attention = (
            reference_attention(self._decoder.cache, rows, q_indptr) for q_indptr in (rows.q_indptr, rows.sample_indptr)
        )
        sampled = SampledRows(
            torch.from_numpy(rows.sample_rows).long(), sampled_attention if len(rows.sample_rows) else None
        )
        fed_back = self._state.last_token[torch.from_numpy(rows.decode_slots).long()]
        hidden = self._decoder.embed(torch.cat((torch.from_numpy(rows.token_ids), fed_back)), ops)
        return _Forward(rows, attention, sampled, hidden)

    def wait_any(self, tickets: Sequence[int], until_s: float | None) -> int | None:
        del until_s  # all launches have finished
        return tickets[0]

    def wait(self, ticket: int) -> StepResult:
        return self._results.pop(ticket)

    def drain(self) -> None:
        self._results.clear()

    def shutdown(self, failure: BaseException | None = None) -> None:
        self.__dict__.clear()
        clear_frames(failure)


def _logprobs(on_cpu: tuple[Tensor, Tensor, Tensor]) -> StepLogprobs:
    chosen, top_ids, top = on_cpu
    return StepLogprobs(chosen.numpy(), top_ids.int().numpy(), top.numpy())
