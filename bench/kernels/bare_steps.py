"""Forwards that stand for a workload's: as many rows, keys and values as it has on average, and how many of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.reporting.work import serving_work
from bullet_graph.models.config import ModelConfig
from bullet_graph.perf.traffic import kv_cache_bytes_per_token
from bullet_graph.perf.waves import layer_matrices
from bullet_graph.workloads import WorkloadRequest

_DTYPE_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BareStep:
    """A forward's matrix products and attention.

    Attributes:
        rows: of the layers' products.
        head_rows: of the output head's.
        decode_rows: that attend to ``context`` tokens of the KV cache each.
        context: tokens.
        prompt_lens: of fresh prompts, which attend to themselves; may be empty.
        repeats: of the step that make up the work.
    """

    rows: int
    head_rows: int
    decode_rows: int
    context: int
    prompt_lens: tuple[int, ...]
    repeats: float

    @property
    def kv_tokens(self) -> int:
        """That its decode rows attend to."""
        return self.decode_rows * self.context

    def flops(self, config: ModelConfig) -> float:
        """Of products and attention, over all layers."""
        layer = self.rows * 2.0 * sum(map(math.prod, layer_matrices(config)))
        pairs = self.kv_tokens + sum(tokens * (tokens + 1) / 2 for tokens in self.prompt_lens)
        head = 2.0 * self.head_rows * config.hidden_size * config.vocab_size
        return config.num_layers * (layer + 4.0 * config.q_size * pairs) + head


def serving_step(config: ModelConfig, requests: Sequence[WorkloadRequest], rows: int) -> BareStep:
    """The average forward of ``rows`` rows that serves a workload, never more than the work that it stands for.

    Prompts are whole and fresh. What is not: a prompt longer than a forward attends to earlier chunks as well, which
    is left out.

    Args:
        config: the model's shape.
        requests: of the workload.
        rows: of a forward: those of prompts, and decode rows that ride along.
    """
    work = serving_work(config, requests)
    layer_flops = config.num_layers * 2.0 * sum(map(math.prod, layer_matrices(config)))
    repeats = work.layer_flops / (layer_flops * rows)
    decode_rows = int(sum(request.output_tokens - 1 for request in requests) / repeats)
    kv_tokens = work.kv_bytes / kv_cache_bytes_per_token(config, dtype_bytes=_DTYPE_BYTES) / repeats
    pairs = work.attention_flops / (4.0 * config.q_size * config.num_layers) / repeats
    prompt_tokens = int(sum(request.prompt_tokens for request in requests) / repeats)
    return BareStep(
        rows=rows,
        head_rows=int(sum(request.output_tokens for request in requests) / repeats),
        decode_rows=decode_rows,
        context=int(kv_tokens / max(decode_rows, 1)),
        prompt_lens=prompt_lens(prompt_tokens, int(2 * pairs / max(prompt_tokens, 1)) - 1),
        repeats=repeats,
    )


def prompt_lens(tokens: int, longest: int) -> tuple[int, ...]:
    """So many tokens in prompts of ``longest``, the last of them with what is left; none where that is below 1."""
    longest = min(longest, tokens)
    if longest < 1:
        return ()
    whole, left = divmod(tokens, longest)
    return (longest,) * whole + ((left,) if left else ())


def decode_step(rows: int, context: int) -> BareStep:
    """A decode step of equal rows, by itself."""
    return BareStep(rows=rows, head_rows=rows, decode_rows=rows, context=context, prompt_lens=(), repeats=1.0)
