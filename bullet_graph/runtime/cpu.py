"""The CPU executor: the same model code with reference attention, each step run to its end."""

import time

import torch

from bullet_graph.models.attention import ReferenceAttention
from bullet_graph.models.decoder import Decoder, eager_functions
from bullet_graph.models.ops import TorchOps
from bullet_graph.models.sampler import SamplingState, sample, token_logprobs
from bullet_graph.runtime.rows import lay_out
from bullet_graph.runtime.slots import settings_row
from bullet_graph.runtime.step import Step, StepLogprobs, StepResult


class CpuExecutor:
    """Runs a decoder on the CPU.

    Args:
        decoder: weights and cache on the CPU.
        max_num_seqs: slots.
    """

    max_in_flight = 1

    def __init__(self, decoder: Decoder, *, max_num_seqs: int) -> None:
        self._decoder = decoder
        self._functions = eager_functions(TorchOps())
        self._state = SamplingState(max_num_seqs, torch.device("cpu"))
        self._results: dict[int, StepResult] = {}
        self._next_ticket = 0

    @torch.inference_mode()
    def launch(self, step: Step) -> int:
        """Run the step; see :meth:`Executor.launch`."""
        for init in step.admitted:
            self._state.settings[init.slot] = torch.from_numpy(settings_row(init))
        rows = lay_out(step.prefill, step.decode, self._decoder.cache.block_tokens)
        attention = ReferenceAttention(
            self._decoder.cache,
            q_indptr=rows.q_indptr.tolist(),
            kv_lens=rows.kv_lens.tolist(),
            kv_indptr=rows.kv_indptr.tolist(),
            kv_indices=torch.from_numpy(rows.kv_indices).long(),
        )
        fed_back = self._state.last_token[torch.from_numpy(rows.decode_slots).long()]
        hidden = self._decoder.run_layers(
            self._decoder.embed(torch.cat((torch.from_numpy(rows.token_ids), fed_back))),
            torch.from_numpy(rows.positions).long(),
            torch.from_numpy(rows.kv_slots).long(),
            attention,
            self._functions,
        )
        logits = self._decoder.logits(hidden, torch.from_numpy(rows.sample_rows).long(), self._functions.ops)
        token_ids = sample(
            logits,
            torch.from_numpy(rows.sample_slots).long(),
            torch.from_numpy(rows.sample_positions),
            self._state,
        )
        logprobs = None
        if step.num_logprobs is not None:
            chosen, top_ids, top = token_logprobs(logits, token_ids, step.num_logprobs)
            logprobs = StepLogprobs(chosen.numpy(), top_ids.int().numpy(), top.numpy())
        ticket = self._next_ticket
        self._next_ticket += 1
        self._results[ticket] = StepResult(token_ids.numpy(), logprobs)
        return ticket

    def done(self, ticket: int) -> bool:
        """See :meth:`Executor.done`."""
        return ticket in self._results

    def wait(self, ticket: int) -> StepResult:
        """See :meth:`Executor.wait`."""
        return self._results.pop(ticket)

    def now(self) -> float:
        """See :meth:`Executor.now`."""
        return time.perf_counter()

    def shutdown(self) -> None:
        """See :meth:`Executor.shutdown`."""
        del self._decoder, self._state
