"""The decoder's forward, for all families, for the CPU, eager prefill and captured decode."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bullet_graph.kernels.attention import Attention, LayerRows
from bullet_graph.kernels.memory import KVCache
from bullet_graph.kernels.ops import Linear, RowInputs, TorchOps
from bullet_graph.kernels.sampler import token_logprobs
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.layers import LayerFunctions
from bullet_graph.models.rope import Rope, RopeDivisors
from bullet_graph.models.weights import ModelWeights
from bullet_graph.sampling_params import SCORED_ROWS


@dataclass(frozen=True, slots=True)
class Hidden:
    """Activations between layers, both [rows, hidden_size].

    ``x`` is the last sub-layer's output, not yet added. ``residual`` starts as zero, so that all layers are alike.
    """

    x: Tensor
    residual: Tensor

    def rows(self, rows: Tensor) -> "Hidden":
        """The rows [n] alone."""
        return Hidden(self.x[rows], self.residual[rows])


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The sampled rows of a forward, [s] rising: after the last layer's keys and values, only these are computed.

    ``attention`` is planned for one query row each; None if there is none. ``num_padding`` rows of zeros are appended,
    to reach a number of rows whose kernels the device has loaded.
    """

    rows: Tensor
    attention: Attention | None
    num_padding: int = 0


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder and its KV cache; the forward can stop and resume between any two layers.

    ``cos_sin`` is of :func:`cos_sin_tables`, ``embedding_scale`` the ``embedding_multiplier``, rounded as in training.
    """

    config: ModelConfig
    weights: ModelWeights
    cache: KVCache
    cos_sin: Tensor
    embedding_scale: float = field(init=False)

    def __post_init__(self) -> None:
        scale = torch.tensor(self.config.embedding_multiplier, dtype=self.weights.embed.dtype)
        object.__setattr__(self, "embedding_scale", scale.item())

    @property
    def most_blocks(self) -> int:
        """KV blocks of the longest sequence."""
        return -(-self.cos_sin.shape[1] // self.cache.block_tokens)

    def embed(self, token_ids: Tensor, ops: TorchOps) -> Hidden:
        """Look up the embeddings of [rows] integer token ids."""
        if ops.communicator is None:
            x = torch.nn.functional.embedding(token_ids, self.weights.embed)
        else:
            # Each row is on one rank; the others add zeros.
            rows = self.config.vocab_rows
            own = token_ids - self.config.rank * rows
            others = (own < 0) | (own >= rows)
            x = torch.nn.functional.embedding(own.masked_fill(others, 0), self.weights.embed)
            x = ops.all_reduce(x.masked_fill_(others[:, None], 0))
        if self.config.embedding_multiplier != 1.0:
            x = x * self.embedding_scale
        return Hidden(x, torch.zeros_like(x))

    def run_layers(
        self,
        hidden: Hidden,
        positions: Tensor,
        kv_slots: Tensor,
        attention: Attention,
        functions: LayerFunctions,
        *,
        first: int = 0,
        last: int | None = None,
        sampled: SampledRows | None = None,
    ) -> Hidden:
        """Run layers [first, last); None means to the end.

        ``positions`` and ``kv_slots`` are those of :class:`~bullet_graph.kernels.ops.RowInputs`; ``attention`` is
        planned for these rows. The last layer returns the rows (and padding) ``sampled``; None means all rows.
        """
        by_rope = [RowInputs(positions, kv_slots, table) for table in self.cos_sin.unbind()]
        eps = self.config.rms_norm_eps
        x, residual = hidden.x, hidden.residual
        for index in range(first, self.config.num_layers if last is None else last):
            layer = self.weights.layers[index]
            inputs, norms = by_rope[layer.attention.rope], layer.attention.head_norms
            qkv, residual = functions.attention_input(x, residual, *layer.input_weights, eps)
            rows = LayerRows.of(functions.ops.rope_and_cache(qkv, inputs, self.cache.layer(index), norms), qkv)
            if sampled is not None and index == self.config.num_layers - 1:
                return self.finish_last_layer(rows, residual, sampled, functions)
            x, residual = functions.attention_output(attention.run(index, rows), residual, *layer.output_weights, eps)
        return Hidden(x, residual)

    def finish_last_layer(
        self, rows: LayerRows, residual: Tensor, sampled: SampledRows, functions: LayerFunctions
    ) -> Hidden:
        """Compute the last layer from its attention on, for the sampled rows alone.

        ``rows`` and ``residual`` [rows, hidden_size] are of all rows, whose keys and values are in the cache.
        """
        rows = LayerRows(rows.q[sampled.rows], rows.k, rows.v)
        residual = residual[sampled.rows]
        if sampled.attention is None:
            return Hidden(residual, residual)
        layer = self.weights.layers[-1]
        attended = sampled.attention.run(self.config.num_layers - 1, rows)
        if sampled.num_padding:
            attended, residual = (
                torch.nn.functional.pad(one, (0, 0, 0, sampled.num_padding)) for one in (attended, residual)
            )
        x, residual = functions.attention_output(attended, residual, *layer.output_weights, self.config.rms_norm_eps)
        return Hidden(x, residual)

    def logits(self, hidden: Hidden, ops: TorchOps, out: Tensor | None = None) -> Tensor:
        """Final norm and output projection: [n, vocab_size] in the weights' dtype; ``out`` None is new memory."""
        x, _ = ops.add_rms_norm(hidden.x, hidden.residual, self.weights.final_norm, self.config.rms_norm_eps)
        if self.config.logits_divisor != 1.0:
            x.div_(self.config.logits_divisor)
        if ops.communicator is None or not len(x):
            return ops.linear(x, Linear(self.weights.lm_head), out=out)
        parts = ops.communicator.all_gather(ops.linear(x, Linear(self.weights.lm_head)))
        logits = parts.transpose(0, 1).flatten(1)[:, : self.config.vocab_size]
        return logits if out is None else out.copy_(logits)

    def score(
        self, hidden: Hidden, rows: Tensor, token_ids: Tensor, count: int, ops: TorchOps
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of [n] tokens after [n] rows, as :func:`token_logprobs`; logits of a few rows at a time."""
        parts = [
            token_logprobs(self.logits(hidden.rows(some), ops), ids, count)
            for some, ids in zip(rows.split(SCORED_ROWS), token_ids.split(SCORED_ROWS), strict=True)
        ]
        chosen, top_ids, top = zip(*parts, strict=True)
        return torch.cat(chosen), torch.cat(top_ids), torch.cat(top)


def _inverse_frequencies(rope: Rope, rotary_dim: int, max_positions: int) -> Tensor:
    """theta ** (-2i / rotary_dim) (Su et al. 2021, section 3.2.2), slowed as the scaling says: [rotary_dim / 2]."""
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim))
    scaling = rope.scaling
    if scaling is None:
        return inv_freq
    if isinstance(scaling, RopeDivisors):
        is_long = scaling.long_divisors and max_positions > scaling.original_max_position_embeddings
        return inv_freq / torch.tensor(scaling.long_divisors if is_long else scaling.divisors)
    # Slow long wavelengths by the factor, keep short ones, blend between (Llama 3.1 reference code).
    wavelength = 2 * math.pi / inv_freq
    turns = scaling.original_max_position_embeddings / wavelength
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return inv_freq * (blend + (1 - blend) / scaling.factor)


def cos_sin_tables(config: ModelConfig, max_positions: int, device: torch.device) -> Tensor:
    """Cosines, then sines, by position, of each of ``distinct_ropes``: [ropes, max_positions, head_dim] float32.

    What is not rotated has a cosine of 1 and a sine of 0. Queries and keys both go through the tables, so the root of
    ``attention_scale`` in them scales the attention scores, and attention needs no scale of its own.
    """
    half, rotary_dim = config.head_dim // 2, config.rotary_dim or config.head_dim
    tables = torch.zeros(len(config.distinct_ropes), max_positions, 2, half)
    tables[:, :, 0] = 1.0
    for table, rope in zip(tables, config.distinct_ropes, strict=True):
        if rope is not None:
            frequencies = _inverse_frequencies(rope, rotary_dim, max_positions)
            angles = torch.outer(torch.arange(max_positions).float(), frequencies)
            factor = rope.scaling.attention_factor if isinstance(rope.scaling, RopeDivisors) else 1.0
            table[:, :, : rotary_dim // 2] = torch.stack((angles.cos(), angles.sin()), dim=1) * factor
    if config.attention_scale is not None:
        tables *= math.sqrt(config.attention_scale * math.sqrt(config.head_dim))
    return tables.flatten(2).to(device)
