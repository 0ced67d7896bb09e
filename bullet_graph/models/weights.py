"""A model's weights: their shapes, names, memory and random values; :mod:`checkpoint` reads files."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from bullet_graph.config import ModelDtype
from bullet_graph.kernels.fp8 import FP8, quantize_weight
from bullet_graph.kernels.ops import Experts, HeadNorms, Linear
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.layers import Layer, Mixture, Mlp, SelfAttention
from bullet_graph.models.sharding import part_of
from bullet_graph.perf.roofline import FP8_BLOCK, expert_projections, layer_projections

_DUMMY_BIAS_STD = 0.02
_MOST_SHARE = 0.999
_GLU_NAMES = ["gate_proj", "up_proj", "down_proj"]
_MOST_ELEMENTS = 2**22
"""Weights that are quantized at once: float32 copies of them are made."""
SCALE = ".weight_scale"


def torch_dtype(name: ModelDtype) -> torch.dtype:
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
    """Shapes of a checkpoint's tensors by Hugging Face's names, but scales; no ``lm_head`` with tied embeddings."""
    return {name: shape for name, shape in _shapes(config).items() if not name.endswith(SCALE)}


def scale_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the scales of FP8 weights, by the weights' names."""
    shapes = _shapes(config).items()
    return {name.removesuffix(SCALE) + ".weight": shape for name, shape in shapes if name.endswith(SCALE)}


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    if config.stored_head_dim is not None:
        config = replace(config, head_dim=config.stored_head_dim, stored_head_dim=None)
    return _view_shapes(config)


def _view_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
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
    views = dict(checkpoint_views(config, weights))
    shapes = {} if config.whole is None else _view_shapes(config.whole)
    for name in shapes or views:
        if name.endswith(SCALE):
            continue
        if name not in views:
            # An expert of another rank: as many numbers are drawn.
            weights.embed.new_empty(shapes[name]).normal_(generator=generator)
            continue
        held_view, held_scales = views[name], views.get(scale_name(name))
        view, scales = held_view, held_scales
        if shapes:
            view = held_view.new_empty(shapes[name])
            scales = None if held_scales is None else held_scales.new_empty(shapes[scale_name(name)])
        if zipf_exponent is not None and name.endswith(".gate.bias"):
            order = torch.randperm(config.num_experts, generator=generator, device=view.device)
            view.copy_(skewed_router_bias(config.num_experts, config.experts_per_token, zipf_exponent)[order.cpu()])
        elif scales is not None:
            drawn = weights.embed.new_empty(view.shape).normal_(0.0, view.shape[1] ** -0.5, generator=generator)
            put_quantized(drawn, view, scales)
        elif name.endswith(".bias"):
            view.normal_(0.0, _DUMMY_BIAS_STD, generator=generator)
        elif view.dim() == 1:
            view.fill_(1.0)
        else:
            view.normal_(0.0, view.shape[1] ** -0.5, generator=generator)
        if shapes:
            _put_part(config, name, view, held_view)
            if scales is not None and held_scales is not None:
                _put_part(config, scale_name(name), scales, held_scales)
        yield held_view.nbytes


def _put_part(config: ModelConfig, name: str, whole: Tensor, view: Tensor) -> None:
    """Put a rank's part of a tensor where it is held; the last rank's vocabulary may be shorter."""
    part = part_of(config, name, tuple(whole.shape))
    mine = whole if part is None else part.of(whole)
    view[: len(mine)].copy_(mine)


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


def scale_name(name: str) -> str:
    """The name of a weight's scales among the views."""
    return name.removesuffix(".weight") + SCALE


def put_quantized(source: Tensor, values: Tensor, scales: Tensor) -> None:
    """Quantize weights [out, in] into FP8 ``values``, and ``scales`` of channels or blocks, some rows at a time."""
    blocks = len(scales) != len(values)
    rows = max(FP8_BLOCK, _MOST_ELEMENTS // source.shape[1] // FP8_BLOCK * FP8_BLOCK)
    for start in range(0, len(source), rows):
        some, its_scales = quantize_weight(source[start : start + rows], blocks=blocks)
        values[start : start + rows] = some
        first = start // FP8_BLOCK if blocks else start
        scales[first : first + len(its_scales)] = its_scales


def zero_weights(config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Weights to fill later; until then, a forward with them gives no NaN."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def linear(projection: str, has_bias: bool = False, count: int | None = None) -> Linear:
        """A projection of all rows, or of ``count`` experts, stacked."""
        rows, columns = (layer_projections if count is None else expert_projections)(config)[projection]
        fp8, stack = config.fp8, () if count is None else (count,)
        bias = zeros(rows) if has_bias else None
        if fp8 is None or projection in fp8.plain:
            return Linear(zeros(*stack, rows, columns), bias)
        shape = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)) if fp8.blocks else (rows, 1)
        return Linear(
            torch.zeros(*stack, rows, columns, dtype=FP8, device=device),
            bias,
            torch.zeros(*stack, *shape, dtype=torch.float32, device=device),
            FP8_BLOCK if fp8.blocks else columns,
        )

    def norm(size: int) -> Tensor:
        # One plus a weight has more digits than the weight.
        return torch.zeros(size, dtype=torch.float32 if config.norm_plus_one else dtype, device=device)

    def attention(layer: int) -> SelfAttention:
        spans, norms = config.qk_norm_spans_heads, None
        if config.qk_norm:
            q_norm, k_norm = map(norm, config.qk_norm_sizes)
            norms = HeadNorms(q_norm, k_norm, config.rms_norm_eps)
        return SelfAttention(
            qkv=linear("qkv", config.qkv_bias),
            o=linear("o"),
            head_norms=None if spans else norms,
            spanning_norms=norms if spans else None,
            rope=config.distinct_ropes.index(config.layer_ropes[layer]) if config.layer_ropes else 0,
        )

    def mlp() -> Mlp:
        return Mlp(linear("gate_up"), linear("down"), gelu=config.gelu)

    def mixture() -> Mixture:
        count, all_of_them = config.own_experts, config.num_experts
        experts = Experts(
            router=Linear(zeros(all_of_them, config.hidden_size), zeros(all_of_them) if config.router_bias else None),
            gate_up=linear("gate_up", count=count),
            down=linear("down", count=count),
            top_k=config.experts_per_token,
            renormalize=config.renormalize_experts,
            first=config.first_expert,
        )
        has_shared = config.shared_expert_intermediate_size > 0
        return Mixture(experts, mlp(), Linear(zeros(1, config.hidden_size))) if has_shared else Mixture(experts)

    embed = zeros(config.vocab_rows, config.hidden_size)
    before, after = config.norms != "after", config.norms != "before"
    layers = tuple(
        Layer(
            input_norm=norm(config.hidden_size) if before else None,
            attention=attention(index),
            attended_norm=norm(config.hidden_size) if after else None,
            mlp_norm=norm(config.hidden_size) if before else None,
            mlp=mixture() if config.num_experts else mlp(),
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
    """Each tensor of a checkpoint: its Hugging Face name, and the view of ``weights`` that holds it.

    Scales of FP8 weights are named ``weight_scale``, whatever a checkpoint calls them.
    """
    qkv_sizes = [config.q_size, config.kv_size, config.kv_size]
    yield "model.embed_tokens.weight", weights.embed
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        attention = layer.attention
        for name, norm in _norm_views(layer):
            if norm is not None:
                yield f"{prefix}.{name}.weight", norm
        qkv_names = ["qkv_proj"] if config.fused_projections else ["q_proj", "k_proj", "v_proj"]
        yield from _linear_views(f"{prefix}.self_attn", qkv_names, attention.qkv, qkv_sizes)
        yield from _linear_views(f"{prefix}.self_attn", ["o_proj"], attention.o)
        yield from _mlp_views(config, prefix, layer.mlp)
    yield "model.norm.weight", weights.final_norm
    if weights.lm_head is not weights.embed:
        yield "lm_head.weight", weights.lm_head


def _mlp_views(config: ModelConfig, prefix: str, mlp: Mlp | Mixture) -> Iterator[tuple[str, Tensor]]:
    if isinstance(mlp, Mlp):
        names = ["gate_up_proj", "down_proj"] if config.fused_projections else _GLU_NAMES
        yield from _glu_views(f"{prefix}.mlp", names, mlp.gate_up, mlp.down)
        return
    block = "block_sparse_moe" if config.mixtral_names else "mlp"
    names = ["w1", "w3", "w2"] if config.mixtral_names else _GLU_NAMES
    yield from _linear_views(f"{prefix}.{block}", ["gate"], mlp.experts.router)
    for index in range(config.own_experts):
        own = mlp.experts.gate_up.of_expert(index), mlp.experts.down.of_expert(index)
        yield from _glu_views(f"{prefix}.{block}.experts.{config.first_expert + index}", names, *own)
    if mlp.shared is not None and mlp.shared_gate is not None:
        yield from _glu_views(f"{prefix}.mlp.shared_expert", names, mlp.shared.gate_up, mlp.shared.down)
        yield from _linear_views(f"{prefix}.mlp", ["shared_expert_gate"], mlp.shared_gate)


def _glu_views(prefix: str, names: list[str], gate_up: Linear, down: Linear) -> Iterator[tuple[str, Tensor]]:
    *gate_up_names, down_name = names
    yield from _linear_views(prefix, gate_up_names, gate_up, [down.weight.shape[1]] * 2)
    yield from _linear_views(prefix, [down_name], down)


def _linear_views(
    prefix: str, names: list[str], linear: Linear, sizes: list[int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Weights, bias and scales of the modules whose rows a projection holds one after the other."""
    for kind, fused in (("weight", linear.weight), ("bias", linear.bias), ("weight_scale", linear.scale)):
        if fused is None:
            continue
        rows = [len(fused)] if len(names) == 1 or sizes is None else sizes
        if sum(rows) != len(fused):
            rows = [-(-size // FP8_BLOCK) for size in rows]
        for name, view in zip(names, fused.split(rows), strict=True):
            yield f"{prefix}.{name}.{kind}", view


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
    if projection == "o_proj" and name.endswith(SCALE):
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


def scale_cached(config: ModelConfig, layer: Layer, k_scale: float, v_scale: float) -> None:
    """Have a layer's keys and values cached divided by these scales, and its output stay the same.

    Powers of two change no digits: weights, biases and scales take them up, and no kernel needs to know of them.
    """
    attention = layer.attention
    sizes = [config.q_size, config.kv_size, config.kv_size]
    (attention.o.weight if attention.o.scale is None else attention.o.scale).mul_(v_scale)
    norms = attention.head_norms or attention.spanning_norms
    if norms is not None:
        norms.q.mul_(k_scale)
        norms.k.div_(k_scale)
    weight, bias, scale, _ = attention.qkv
    for tensor in (weight if scale is None else scale, bias):
        if tensor is None:
            continue
        q, k, v = tensor.split(sizes if sum(sizes) == len(tensor) else [-(-size // FP8_BLOCK) for size in sizes])
        v.div_(v_scale)
        if norms is None:
            q.mul_(k_scale)
            k.div_(k_scale)
