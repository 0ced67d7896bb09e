"""A decoder's shape and constants, and what all families read alike from ``config.json``; needs no torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from bullet_graph.config import ModelDtype
from bullet_graph.errors import UnsupportedModelError
from bullet_graph.models.json_files import JsonObject, read_json_object
from bullet_graph.models.quantization import FUSED_MODULES, MODULES, expert_modules, read_quantization
from bullet_graph.models.rope import Rope, read_rope
from bullet_graph.perf.roofline import DecoderShape, fp8_savings, num_weights

_GELU = "gelu_pytorch_tanh"
_SLIDING, _FULL = "sliding_attention", "full_attention"
_REFUSED = {"compression_config": "only bf16, fp16, fp32 and FP8 weights are read"} | dict.fromkeys(
    ("attn_logit_softcapping", "final_logit_softcapping"), "soft caps are not implemented"
)
"""Keys that must be absent, and why."""
_MAX_EOS_IDS = 1024
_MAX_VOCAB, _MAX_LAYERS, _MAX_HEADS, _MAX_HEAD_DIM, MAX_WIDTH = 2**24, 2**10, 2**12, 2**12, 2**20
_MAX_EXPERTS = 2**10
"""Several times the largest published models': above, a file is broken or made to exhaust this machine."""

GPU_HEAD_DIMS = (64, 128, 256)
"""Head sizes that FlashInfer's fa2 and fa3 kernels are written for; smaller heads are padded with zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(DecoderShape):
    """Shape and constants of a decoder, of any family; ``dtype`` is the checkpoint's own.

    Attributes:
        architecture: the Hugging Face class name.
        rope: of all layers that ``layer_ropes`` does not give another.
        layer_ropes: by layer, None where positions are not encoded; empty: all as ``rope``.
        rotary_dim: dimensions of a head that RoPE rotates; None: all.
        stored_head_dim: dimensions of a head in the checkpoint, where ``head_dim`` has more: the others are 0.
        attention_scale: multiplies attention scores; None: 1 / √head_dim.
        norms: RMSNorms before each of a layer's two sub-layers, after it, or both.
        qk_norm_spans_heads: ``qk_norm`` is over all query heads together and over all key heads, not over each.
        gelu: the MLP's gate is GELU, in its tanh approximation; else SiLU.
        norm_plus_one: a stored norm weight w means 1 + w. Such norms are held in float32.
        embedding_multiplier: multiplies embeddings, rounded to their dtype.
        residual_multiplier: multiplies what a sub-layer adds to the residual.
        logits_divisor: divides logits.
        fused_projections: the checkpoint has q, k and v in one tensor, gate and up in another.
        renormalize_experts: the weights of a row's experts add up to 1.
        router_bias: the router has a bias, as dummy weights with a router skew have it.
        mixtral_names: the checkpoint names experts as Mixtral's do.
        rank: of tensor parallelism, where the numbers are those of one rank; see :mod:`sharding`.
        whole: the model that the ranks share; None where there is one.
    """

    architecture: str
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    layer_ropes: tuple[Rope | None, ...] = ()
    rotary_dim: int | None = None
    stored_head_dim: int | None = None
    attention_scale: float | None = None
    norms: Literal["before", "after", "both"] = "before"
    qk_norm_spans_heads: bool = False
    gelu: bool = False
    norm_plus_one: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    tie_word_embeddings: bool = False
    fused_projections: bool = False
    renormalize_experts: bool = False
    router_bias: bool = False
    mixtral_names: bool = False
    dtype: ModelDtype
    eos_token_ids: tuple[int, ...]
    rank: int = 0
    whole: "ModelConfig | None" = None

    @property
    def distinct_ropes(self) -> tuple[Rope | None, ...]:
        """Each RoPE that a layer has, once."""
        return tuple(dict.fromkeys(self.layer_ropes or (self.rope,)))

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Sizes of the norms of queries and keys, where there are any."""
        return (self.q_size, self.kv_size) if self.qk_norm_spans_heads else (self.head_dim, self.head_dim)

    @property
    def first_expert(self) -> int:
        """The first expert of a layer that the rank holds."""
        return self.rank * self.own_experts if self.expert_parallel else 0

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, or of its rank, tied embeddings counted once."""
        embedding_rows = 0 if self.tie_word_embeddings else self.vocab_rows
        more_norms = 2 * self.hidden_size if self.norms == "both" else 0
        if self.qk_norm:
            more_norms += sum(self.qk_norm_sizes) - 2 * self.head_dim
        more_norms += self.num_experts if self.router_bias else 0
        least = num_weights(self, embedding_rows=embedding_rows, experts=self.own_experts)
        return round(least) + self.num_layers * more_norms

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Memory of all weights, scales included; ``dtype_bytes`` are of those that are not FP8."""
        saved = fp8_savings(self, dtype_bytes=dtype_bytes, experts=self.own_experts)
        return self.num_parameters * dtype_bytes - round(saved)


def with_padded_heads(config: ModelConfig, head_dims: tuple[int, ...]) -> ModelConfig:
    """The same model with heads of one of these sizes, ascending, as kernels need them; unchanged if none will do.

    Zeros in the new dimensions of queries, keys and values change no score and no output.
    """
    # A norm over a head counts its dimensions.
    sizes = [size for size in head_dims if size >= config.head_dim and not config.qk_norm]
    if not sizes or sizes[0] == config.head_dim:
        return config
    return replace(
        config,
        head_dim=sizes[0],
        stored_head_dim=config.head_dim,
        rotary_dim=config.rotary_dim or config.head_dim,
        attention_scale=config.attention_scale or config.head_dim**-0.5,
    )


def without_wide_windows(config: ModelConfig, max_model_len: int) -> ModelConfig:
    """The same model without the windows that hold every sequence: the kernels without are faster."""
    windows = tuple(None if window is None or window >= max_model_len else window for window in config.windows)
    return replace(config, layer_windows=windows if any(windows) else ())


def read_dense_config(
    config: JsonObject,
    *,
    activation_key: str = "hidden_act",
    fused_projections: bool = False,
    has_experts: bool = False,
    slides: Callable[[int], bool] | None = None,
) -> ModelConfig:
    """Read what all families have in common, as transformers 4 or 5 writes it; raises as ``presets.load_model_config``.

    A family replaces what it has of its own; one that ``has_experts`` calls :func:`with_experts`, which reads how the
    weights are quantized. ``slides`` says of a layer whether it has a sliding window where
    ``layer_types`` does not; None refuses windows.
    """
    _refuse_unsupported_features(config, may_slide=slides is not None)
    if config.get(activation_key) not in (None, "silu", _GELU):
        config.fail(activation_key, f"silu or {_GELU}: no other is implemented", UnsupportedModelError)
    hidden_size = config.read("hidden_size", int, at_most=MAX_WIDTH)
    num_heads = config.read("num_attention_heads", int, at_most=_MAX_HEADS)
    num_kv_heads = config.read("num_key_value_heads", int, default=num_heads)
    if num_heads % num_kv_heads:
        config.fail("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    vocab_size = config.read("vocab_size", int, at_most=_MAX_VOCAB)
    num_layers = config.read("num_hidden_layers", int, at_most=_MAX_LAYERS)
    head_dim = _head_dim(config, hidden_size, num_heads)
    modules = FUSED_MODULES if fused_projections else MODULES
    rope, rotary_dim = read_rope(config, head_dim, can_be_partial=fused_projections)
    return ModelConfig(
        architecture=config.get("architectures")[0],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.read("intermediate_size", int, at_most=MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layer_windows=() if slides is None else _layer_windows(config, num_layers, slides),
        fp8=None if has_experts else read_quantization(config, num_layers, modules),
        max_position_embeddings=max(config.read("max_position_embeddings", int), rope.extended_positions),
        rms_norm_eps=config.read("rms_norm_eps", float),
        rope=rope,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        gelu=config.get(activation_key) == _GELU,
        tie_word_embeddings=config.read("tie_word_embeddings", bool, default=False),
        fused_projections=fused_projections,
        dtype=_dtype(config),
        eos_token_ids=_eos_token_ids(config, vocab_size),
    )


def with_experts(
    model: ModelConfig,
    config: JsonObject,
    *,
    expert_size: int,
    renormalize: bool,
    shared_size: int = 0,
    mixtral_names: bool = False,
) -> ModelConfig:
    """The same model with experts instead of MLPs in all layers; raises as ``presets.load_model_config``.

    ``expert_size`` and ``shared_size`` are the intermediate sizes of a routed expert and of the shared one.
    """
    why = "layers without experts among others are not implemented"
    if config.get("mlp_only_layers"):
        config.fail("mlp_only_layers", f"empty: {why}", UnsupportedModelError)
    if config.read("decoder_sparse_step", int, default=1) != 1:
        config.fail("decoder_sparse_step", f"1: {why}", UnsupportedModelError)
    if model.gelu:
        config.fail("hidden_act", "silu in a model of experts", UnsupportedModelError)
    # transformers 5 writes the second for Qwen3.
    key = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    num_experts = config.read(key, int, at_most=_MAX_EXPERTS)
    modules = expert_modules(num_experts, has_shared=shared_size > 0, mixtral_names=mixtral_names)
    return replace(
        model,
        num_experts=num_experts,
        experts_per_token=config.read("num_experts_per_tok", int, at_most=num_experts),
        expert_intermediate_size=expert_size,
        shared_expert_intermediate_size=shared_size,
        renormalize_experts=renormalize,
        mixtral_names=mixtral_names,
        fp8=read_quantization(config, model.num_layers, modules),
    )


def _layer_windows(config: JsonObject, num_layers: int, slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [_SLIDING if slides(layer) else _FULL for layer in range(num_layers)]
    known = isinstance(kinds, list) and all(kind in (_SLIDING, _FULL) for kind in kinds)
    if not known or (_SLIDING in kinds and len(kinds) != num_layers):
        required = f"a list of {_SLIDING} or {_FULL} for each of {num_layers} layers"
        config.fail("layer_types", required, UnsupportedModelError)
    if config.get("sliding_window") is None or _SLIDING not in kinds:
        return ()
    window = config.read("sliding_window", int)
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _refuse_unsupported_features(config: JsonObject, *, may_slide: bool) -> None:
    config.refuse("attention_bias", "mlp_bias", "use_bidirectional_attention")
    for key, why in _REFUSED.items():
        if config.get(key) is not None:
            config.fail(key, f"absent: {why}", UnsupportedModelError)
    if may_slide:
        return
    config.refuse("use_sliding_window")
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != _FULL for kind in layer_types):
        config.fail("layer_types", f"{_FULL} for every layer", UnsupportedModelError)


def _head_dim(config: JsonObject, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is None and hidden_size % num_heads:
        config.fail("hidden_size", f"a multiple of num_attention_heads ({num_heads}), as there is no head_dim")
    head_dim = config.read("head_dim", int, default=hidden_size // num_heads, at_most=_MAX_HEAD_DIM)
    if head_dim % 2:
        config.fail("head_dim", f"even, for RoPE rotates pairs; it is {head_dim}")
    return head_dim


def _dtype(config: JsonObject) -> ModelDtype:
    key = "torch_dtype" if config.get("dtype") is None else "dtype"
    # Hugging Face's default is float32.
    found = str(config.get(key) or "float32").removeprefix("torch.")
    names: tuple[ModelDtype, ...] = get_args(ModelDtype)
    name = next((name for name in names if name == found), None)
    if name is None:
        config.fail(key, f"one of {', '.join(names)}", UnsupportedModelError)
    return name


def _eos_token_ids(config: JsonObject, vocab_size: int) -> tuple[int, ...]:
    source = config
    path = config.path.with_name("generation_config.json")
    # Instruct models list more of them there.
    if path.exists() and (generation := read_json_object(path)).get("eos_token_id") is not None:
        source = generation
    value = source.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > _MAX_EOS_IDS:
        source.fail("eos_token_id", f"at most {_MAX_EOS_IDS} token ids")
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            source.fail("eos_token_id", f"token ids in [0, vocab_size ({vocab_size}))")
    return tuple(ids)
