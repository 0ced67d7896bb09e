"""Tensor parallelism: each rank's share of a model (Shoeybi et al. 2019), in numbers and in rows of weights.

A rank has its heads and its part of each MLP, of the vocabulary, and of each expert, or else some whole experts.
Products that end with a sum over ranks are cut along their inputs, the others along their outputs. Norms, routers and
gates are whole on every rank.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from bullet_graph.errors import ConfigError
from bullet_graph.models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

_BY_INPUTS = ("o_proj", "down_proj", "w2")
_BY_OUTPUTS = ("gate_proj", "up_proj", "w1", "w3")


def shard(model: ModelConfig, num_ranks: int, rank: int, *, expert_parallel: bool = False) -> ModelConfig:
    """A rank's share of a model; the model itself for one rank. Raises ConfigError for what cannot be divided.

    With ``expert_parallel``, a rank has whole experts, not a part of each. If key heads are too few, ranks share them.
    """
    if num_ranks == 1:
        return model
    if expert_parallel and not model.num_experts:
        raise ConfigError(f"expert_parallel divides experts, but {model.architecture} has none: leave it out")
    expert_size = model.expert_intermediate_size
    what = {
        "query heads": model.num_heads,
        "intermediate columns": 0 if model.num_experts else model.intermediate_size,
        "experts": model.num_experts if expert_parallel else 0,
        "intermediate columns of an expert": 0 if expert_parallel else expert_size,
        "intermediate columns of the shared expert": model.shared_expert_intermediate_size,
    }
    odd = [f"{number} {name}" for name, number in what.items() if number % num_ranks]
    if model.num_kv_heads % num_ranks and num_ranks % model.num_kv_heads:
        odd.append(f"{model.num_kv_heads} key heads (nor is it a multiple of them)")
    if odd:
        raise ConfigError(
            f"tensor_parallel_size={num_ranks} must divide what the ranks share, but the model has {', '.join(odd)}: "
            f"take a smaller power of two, or 1{', or leave out expert_parallel' if expert_parallel else ''}"
        )
    return replace(
        model,
        num_heads=model.num_heads // num_ranks,
        num_kv_heads=max(model.num_kv_heads // num_ranks, 1),
        intermediate_size=model.intermediate_size // num_ranks,
        expert_intermediate_size=expert_size if expert_parallel else expert_size // num_ranks,
        shared_expert_intermediate_size=model.shared_expert_intermediate_size // num_ranks,
        num_ranks=num_ranks,
        expert_parallel=expert_parallel,
        rank=rank,
        whole=model,
    )


class Part(NamedTuple):
    """What a rank holds of a tensor: the spans [first, end) of a dimension, joined."""

    dim: int
    spans: tuple[tuple[int, int], ...]

    def of(self, tensor: Any) -> "Tensor":
        """Cut the part from a tensor, or read it from a safetensors slice, and nothing else of it."""
        import torch  # noqa: PLC0415 - the simulator divides models without it

        return torch.cat([tensor[a:b] if self.dim == 0 else tensor[:, a:b] for a, b in self.spans], self.dim)


def part_of(config: ModelConfig, name: str, shape: tuple[int, ...]) -> Part | None:
    """What a rank's config says it holds of a tensor of the whole model; None: all of it.

    ``shape`` is the whole tensor's: the checkpoint's, or with heads padded as the weights hold them.
    """
    whole, rank, ranks = config.whole, config.rank, config.num_ranks
    if whole is None:
        return None
    projection = name.split(".")[-2]
    if config.expert_parallel and ".experts." in name:
        return None

    def share(size: int, *, count: int = ranks, first: int = 0) -> tuple[int, int]:
        """This rank's share of a dimension's ``size`` entries, which ``count`` heads or ranks divide."""
        start = first + rank * count // ranks * size // count
        return start, start + max(count // ranks, 1) * size // count

    if projection in ("embed_tokens", "lm_head"):
        first = min(rank * config.vocab_rows, shape[0])
        return Part(0, ((first, min(first + config.vocab_rows, shape[0])),))
    if projection in _BY_INPUTS:
        # Scales of channels go with the outputs, which are all here.
        return None if name.endswith("_scale") and shape[1] == 1 else Part(1, (share(shape[1]),))
    if projection in _BY_OUTPUTS or projection == "q_proj" or (projection == "q_norm" and config.qk_norm_spans_heads):
        return Part(0, (share(shape[0]),))
    if projection in ("k_proj", "v_proj") or (projection == "k_norm" and config.qk_norm_spans_heads):
        return Part(0, (share(shape[0], count=whole.num_kv_heads),))
    if projection == "gate_up_proj":
        half = shape[0] // 2
        return Part(0, (share(half), share(half, first=half)))
    if projection == "qkv_proj":
        heads = whole.num_heads + 2 * whole.num_kv_heads
        q, kv = (shape[0] * count // heads for count in (whole.num_heads, whole.num_kv_heads))
        return Part(0, (share(q), *(share(kv, count=whole.num_kv_heads, first=first) for first in (q, q + kv))))
    return None
