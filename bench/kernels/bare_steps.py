"""Forwards that stand for a workload's: as many rows, keys and values as it has on average, and how many of them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.reporting.work import serving_work
from bullet_graph.models.config import ModelConfig
from bullet_graph.perf.performance import attention_pairs
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
        continued_tokens: of one prompt whose earlier chunks are in the cache; 0: there is none.
        continued_cached: tokens of those chunks.
        repeats: of the step that make up the work.
    """

    rows: int
    head_rows: int
    decode_rows: int
    context: int
    prompt_lens: tuple[int, ...]
    continued_tokens: int
    continued_cached: int
    repeats: float

    @property
    def kv_tokens(self) -> int:
        """That its decode rows attend to."""
        return self.decode_rows * self.context

    @property
    def prompt_pairs(self) -> float:
        """(query, key) pairs of its prompts."""
        fresh = sum(attention_pairs(tokens) for tokens in self.prompt_lens)
        return fresh + attention_pairs(self.continued_tokens, self.continued_cached)

    def flops(self, config: ModelConfig) -> float:
        """Of products and attention, over all layers."""
        layer = self.rows * 2.0 * sum(map(math.prod, layer_matrices(config)))
        head = 2.0 * self.head_rows * config.hidden_size * config.vocab_size
        return config.num_layers * (layer + 4.0 * config.q_size * (self.kv_tokens + self.prompt_pairs)) + head


@dataclass(frozen=True, slots=True)
class Chunks:
    """What prompts come to when they are cut, one behind the other, into forwards of a size.

    Attributes:
        fresh_tokens: in all pieces with which a prompt begins.
        fresh_pairs: (query, key) pairs of their attention.
        continued_tokens: in all pieces that go on with a prompt; a forward has one at most, its first.
        continued_pairs: likewise.
    """

    fresh_tokens: int
    fresh_pairs: float
    continued_tokens: int
    continued_pairs: float


def cut(prompts: Sequence[int], tokens: int) -> Chunks:
    """Cut prompts of so many tokens each into forwards of ``tokens``, in the order given."""
    pieces = list(_pieces(prompts, tokens))
    fresh, continued = ([one for one in pieces if bool(one[1]) == goes_on] for goes_on in (False, True))
    return Chunks(
        sum(size for size, _ in fresh),
        sum(attention_pairs(*piece) for piece in fresh),
        sum(size for size, _ in continued),
        sum(attention_pairs(*piece) for piece in continued),
    )


def _pieces(prompts: Sequence[int], tokens: int) -> Iterator[tuple[int, int]]:
    """(tokens, those of the same prompt before them)."""
    left = tokens
    for length in prompts:
        start = 0
        while start < length:
            size = min(length - start, left)
            yield size, start
            start, left = start + size, (left - size) or tokens


def serving_step(config: ModelConfig, requests: Sequence[WorkloadRequest], rows: int) -> BareStep:
    """The average forward of ``rows`` rows that serves a workload, never more than the work that it stands for.

    Prompts are cut in the order of the requests. What of a forward is fresh, and what goes on with a prompt, has the
    tokens and the (query, key) pairs that it has on average.

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
    prompts = [request.prompt_tokens for request in requests]
    chunks = cut(prompts, max(int(sum(prompts) / repeats), 1))
    # Of the last layer, only what is sampled attends.
    share = (
        work.attention_flops / (4.0 * config.q_size * config.num_layers) / sum(map(attention_pairs, prompts))
    )
    fresh_tokens, continued_tokens = (
        int(n / repeats) for n in (chunks.fresh_tokens, chunks.continued_tokens)
    )
    fresh_depth = share * chunks.fresh_pairs / chunks.fresh_tokens
    continued_depth = share * chunks.continued_pairs / max(chunks.continued_tokens, 1)
    cached = int(continued_depth - (continued_tokens + 1) / 2)
    return BareStep(
        rows=rows,
        head_rows=int(sum(request.output_tokens for request in requests) / repeats),
        decode_rows=decode_rows,
        context=int(kv_tokens / max(decode_rows, 1)),
        prompt_lens=prompt_lens(fresh_tokens, int(2 * fresh_depth) - 1),
        continued_tokens=continued_tokens if cached > 0 else 0,
        continued_cached=max(cached, 0) if continued_tokens else 0,
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
    return BareStep(
        rows=rows,
        head_rows=rows,
        decode_rows=rows,
        context=context,
        prompt_lens=(),
        continued_tokens=0,
        continued_cached=0,
        repeats=1.0,
    )
