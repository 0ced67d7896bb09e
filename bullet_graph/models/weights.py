"""A model's weights: their shapes, names, memory and random values; :mod:`checkpoint` reads files."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from bullet_graph.kernels.ops import Experts, HeadNorms, Linear
from bullet_graph.models.config import DtypeName, ModelConfig
from bullet_graph.models.layers import Layer, Mixture, Mlp, SelfAttention
from bullet_graph.models.sharding import part_of

_DUMMY_BIAS_STD = 0.02
_MOST_SHARE = 0.999
_GLU_NAMES = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL_NAMES = ("w1", "w3", "w2")


def torch_dtype(name: DtypeName) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a decoder.

    ``embed`` and ``lm_head`` are [vocab_rows, hidden_size], and one tensor if the embeddings are tied.
    """

    embed: Tensor
    layers: tuple[Layer, ...]
    final_norm: Tensor
    lm_head: Tensor


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a checkpoint's tensors by Hugging Face's names; no ``lm_head`` with tied embeddings."""
    if config.stored_head_dim is not None:
        config = replace(config, head_dim=config.stored_head_dim, stored_head_dim=None)
    return _shapes(config)


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a checkpoint's tensors as the weights hold them."""
    weights = zero_weights(config, dtype=torch.float32, device=torch.device("meta"))
    return {name: tuple(tensor.shape) for name, tensor in checkpoint_views(config, weights)}


def fill_dummy(
    config: ModelConfig, weights: ModelWeights, *, seed: int, zipf_exponent: float | None = None
) -> Iterator[int]:
    """Draw random weights on the current stream, and yield the bytes of each tensor.

    The same seed, dtype and kind of device give the same weights, of which a rank keeps its part. Matrices are normal
    with variance 1 / in_features: activations keep their size at any depth. Norms are 1 and biases small, but for those
    of :func:`skewed_router_bias`, which each layer has in an order of its own.
    """
    generator = torch.Generator(weights.embed.device).manual_seed(seed)
    shapes = {} if config.whole is None else _shapes(config.whole)
    for name, held_view in checkpoint_views(config, weights):
        part = part_of(config, name, shapes[name]) if shapes else None
        view = held_view if part is None else held_view.new_empty(shapes[name])
        if zipf_exponent is not None and name.endswith(".gate.bias"):
            order = torch.randperm(config.num_experts, generator=generator, device=view.device)
            view.copy_(skewed_router_bias(config.num_experts, config.experts_per_token, zipf_exponent)[order.cpu()])
        elif name.endswith(".bias"):
            view.normal_(0.0, _DUMMY_BIAS_STD, generator=generator)
        elif view.dim() == 1:
            view.fill_(1.0)
        else:
            view.normal_(0.0, view.shape[1] ** -0.5, generator=generator)
        if part is not None:
            mine = part.of(view)
            held_view[: len(mine)].copy_(mine)
        yield held_view.nbytes


def skewed_router_bias(num_experts: int, top_k: int, zipf_exponent: float) -> Tensor:
    """Biases [num_experts] with which the r-th expert gets a share of the rows in proportion to r^-S, falling.

    Shares are at most 1 and add up to ``top_k``. Without biases, logits of random rows are standard normal: with the
    quantile of its share, an expert's logit is above 0 with that probability, and those of ``top_k`` experts are, on
    average. The highest ``top_k`` are nearly those above 0, so shares are met nearly.
    """
    weights = torch.arange(1, num_experts + 1, dtype=torch.float64) ** -zipf_exponent
    low, high = 0.0, top_k / float(weights[-1])
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if float((middle * weights).clamp(max=1.0).sum()) < top_k else (low, middle)
    bias: Tensor = torch.special.ndtri((high * weights).clamp(max=_MOST_SHARE))
    return bias


def zero_weights(config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Weights to fill later; until then, a forward with them gives no NaN."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def norm(size: int) -> Tensor:
        # One plus a weight has more digits than the weight.
        return torch.zeros(size, dtype=torch.float32 if config.norm_plus_one else dtype, device=device)

    def attention(layer: int) -> SelfAttention:
        spans, norms = config.qk_norm_spans_heads, None
        if config.qk_norm:
            q_norm, k_norm = map(norm, config.qk_norm_sizes)
            norms = HeadNorms(q_norm, k_norm, config.rms_norm_eps)
        return SelfAttention(
            qkv=Linear(zeros(qkv_size, config.hidden_size), zeros(qkv_size) if config.qkv_bias else None),
            o=Linear(zeros(config.hidden_size, config.q_size)),
            head_norms=None if spans else norms,
            spanning_norms=norms if spans else None,
            rope=config.rope_index(layer),
        )

    def mlp(size: int) -> Mlp:
        gate_up, down = zeros(2 * size, config.hidden_size), zeros(config.hidden_size, size)
        return Mlp(Linear(gate_up), Linear(down), gelu=config.gelu)

    def mixture() -> Mixture:
        count, size, shared = config.num_experts, config.expert_intermediate_size, config.dense_mlp_size
        experts = Experts(
            router=Linear(zeros(count, config.hidden_size), zeros(count) if config.router_bias else None),
            gate_up=Linear(zeros(count, 2 * size, config.hidden_size)),
            down=Linear(zeros(count, config.hidden_size, size)),
            top_k=config.experts_per_token,
            renormalize=config.renormalize_experts,
        )
        return Mixture(experts, mlp(shared), Linear(zeros(1, config.hidden_size))) if shared else Mixture(experts)

    qkv_size = config.q_size + 2 * config.kv_size
    embed = zeros(config.vocab_rows, config.hidden_size)
    before, after = config.norms != "after", config.norms != "before"
    layers = tuple(
        Layer(
            input_norm=norm(config.hidden_size) if before else None,
            attention=attention(index),
            attended_norm=norm(config.hidden_size) if after else None,
            mlp_norm=norm(config.hidden_size) if before else None,
            mlp=mixture() if config.num_experts else mlp(config.intermediate_size),
            output_norm=norm(config.hidden_size) if after else None,
            residual_multiplier=config.residual_multiplier,
        )
        for index in range(config.num_layers)
    )
    return ModelWeights(
        embed=embed,
        layers=layers,
        final_norm=norm(config.hidden_size),
        lm_head=embed if config.tie_word_embeddings else zeros(config.vocab_rows, config.hidden_size),
    )


def checkpoint_views(config: ModelConfig, weights: ModelWeights) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of a checkpoint: its Hugging Face name, and the view of ``weights`` that holds it."""
    qkv_sizes = [config.q_size, config.kv_size, config.kv_size]
    yield "model.embed_tokens.weight", weights.embed
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        attention = layer.attention
        for name, norm in _norm_views(layer):
            if norm is not None:
                yield f"{prefix}.{name}.weight", norm
        for kind, fused in (("weight", attention.qkv.weight), ("bias", attention.qkv.bias)):
            if fused is not None and config.fused_projections:
                yield f"{prefix}.self_attn.qkv_proj.{kind}", fused
            elif fused is not None:
                for name, view in zip("qkv", torch.split(fused, qkv_sizes), strict=True):
                    yield f"{prefix}.self_attn.{name}_proj.{kind}", view
        yield f"{prefix}.self_attn.o_proj.weight", attention.o.weight
        yield from ((f"{prefix}.{name}", view) for name, view in _mlp_views(config, layer.mlp))
    yield "model.norm.weight", weights.final_norm
    if weights.lm_head is not weights.embed:
        yield "lm_head.weight", weights.lm_head


def _mlp_views(config: ModelConfig, mlp: Mlp | Mixture) -> Iterator[tuple[str, Tensor]]:
    if isinstance(mlp, Mlp):
        if config.fused_projections:
            yield from (("mlp.gate_up_proj.weight", mlp.gate_up.weight), ("mlp.down_proj.weight", mlp.down.weight))
        else:
            yield from _glu_views("mlp", _GLU_NAMES, mlp.gate_up.weight, mlp.down.weight)
        return
    prefix = "block_sparse_moe" if config.mixtral_names else "mlp"
    names = _MIXTRAL_NAMES if config.mixtral_names else _GLU_NAMES
    router = mlp.experts.router
    yield f"{prefix}.gate.weight", router.weight
    if router.bias is not None:
        yield f"{prefix}.gate.bias", router.bias
    for index, weights in enumerate(zip(mlp.experts.gate_up.weight, mlp.experts.down.weight, strict=True)):
        yield from _glu_views(f"{prefix}.experts.{index}", names, *weights)
    if mlp.shared is not None and mlp.shared_gate is not None:
        yield from _glu_views("mlp.shared_expert", names, mlp.shared.gate_up.weight, mlp.shared.down.weight)
        yield "mlp.shared_expert_gate.weight", mlp.shared_gate.weight


def _glu_views(prefix: str, names: tuple[str, str, str], gate_up: Tensor, down: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name, view in zip(names, (*gate_up.chunk(2), down), strict=True):
        yield f"{prefix}.{name}.weight", view


def _norm_views(layer: Layer) -> Iterator[tuple[str, Tensor | None]]:
    if norms := layer.attention.head_norms or layer.attention.spanning_norms:
        yield from (("self_attn.q_norm", norms.q), ("self_attn.k_norm", norms.k))
    yield "input_layernorm", layer.input_norm
    if layer.attended_norm is None:
        # Named for its place in the file: before the MLP.
        yield "post_attention_layernorm", layer.mlp_norm
        return
    yield "post_attention_layernorm", layer.attended_norm
    yield "pre_feedforward_layernorm", layer.mlp_norm
    yield "post_feedforward_layernorm", layer.output_norm


def held(config: ModelConfig, name: str, stored: Tensor) -> Tensor:
    """A checkpoint's tensor as the weights hold it: its rows (outputs) in another order, and heads padded with zeros.

    Kernels rotate dimension i of a head with i + head_dim / 2, partial RoPE with i + rotary_dim / 2. In the order in
    which q and k are held, the two agree: each half begins with its rotated dimensions.
    """
    size, projection = config.stored_head_dim or config.head_dim, name.split(".")[-2]
    if config.rotary_dim is None or projection not in ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"):
        return stored
    more = config.head_dim - size
    if projection == "o_proj":
        return pad(stored.unflatten(1, (-1, size)), (0, more)).flatten(1)
    halves = torch.arange(config.rotary_dim).view(2, -1), torch.arange(config.rotary_dim, size).view(2, -1)
    # Row ``size`` is one of zeros.
    turned = pad(torch.cat(halves, dim=1), (0, more // 2), value=size).flatten()
    heads = pad(stored.unflatten(0, (-1, size)), (0, 0) * (stored.dim() - 1) + (0, max(more, 1)))
    num_turned = {"qkv_proj": config.num_heads + config.num_kv_heads, "v_proj": 0}.get(projection, len(heads))
    return torch.cat((heads[:num_turned, turned], heads[num_turned:, : config.head_dim])).flatten(0, 1)
