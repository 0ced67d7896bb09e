"""A decoder's shape and constants, and what all families read alike from ``config.json``; needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bullet_graph.errors import UnsupportedModelError
from bullet_graph.models.json_files import JsonObject, read_json_object
from bullet_graph.perf.roofline import DecoderShape, decode_weight_bytes

DtypeName = Literal["bfloat16", "float16", "float32"]

DTYPE_BYTES: Mapping[DtypeName, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


_MAX_EOS_IDS = 1024
_MAX_VOCAB, _MAX_LAYERS, _MAX_HEADS, _MAX_HEAD_DIM, _MAX_WIDTH = 2**24, 2**10, 2**12, 2**12, 2**20
"""Several times the largest published models': above, a file is broken or made to exhaust this machine."""


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Llama 3's frequency-dependent RoPE scaling (Llama 3.1 model card; ``rope_type: llama3``).

    Attributes:
        factor: divides the lowest frequencies.
        low_freq_factor: longer wavelengths than ``original_max_position_embeddings / low_freq_factor`` scale fully.
        high_freq_factor: shorter wavelengths than ``original_max_position_embeddings / high_freq_factor`` stay.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(DecoderShape):
    """Shape and constants of a dense decoder (Llama 3.x, Mistral, Qwen2/2.5, Qwen3); ``dtype`` is the checkpoint's own.

    ``architecture`` is the Hugging Face class name.
    """

    architecture: str
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None = None
    tie_word_embeddings: bool = False
    dtype: DtypeName
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or all value) heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, tied embeddings counted once."""
        embedding_rows = 0 if self.tie_word_embeddings else self.vocab_size
        return decode_weight_bytes(self, batch_size=embedding_rows, dtype_bytes=1)


def read_dense_config(
    config: JsonObject, architecture: str, *, qkv_bias: bool = False, qk_norm: bool = False
) -> ModelConfig:
    """Read a dense decoder's config, as transformers 4 or 5 writes it; raises as ``presets.load_model_config``."""
    _refuse_unsupported_features(config)
    hidden_size = config.read("hidden_size", int, at_most=_MAX_WIDTH)
    num_heads = config.read("num_attention_heads", int, at_most=_MAX_HEADS)
    num_kv_heads = config.read("num_key_value_heads", int, default=num_heads)
    if num_heads % num_kv_heads:
        config.fail("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    vocab_size = config.read("vocab_size", int, at_most=_MAX_VOCAB)
    rope_theta, rope_scaling = _read_rope(config)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.read("intermediate_size", int, at_most=_MAX_WIDTH),
        num_layers=config.read("num_hidden_layers", int, at_most=_MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, hidden_size, num_heads),
        max_position_embeddings=config.read("max_position_embeddings", int),
        rms_norm_eps=config.read("rms_norm_eps", float),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=config.read("tie_word_embeddings", bool, default=False),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        dtype=_dtype(config),
        eos_token_ids=_eos_token_ids(config, vocab_size),
    )


def _refuse_unsupported_features(config: JsonObject) -> None:
    if config.get("hidden_act") not in (None, "silu"):
        config.fail("hidden_act", "silu, the only activation implemented", UnsupportedModelError)
    config.refuse("use_sliding_window", "mlp_bias")
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            config.fail(key, "absent: only bf16, fp16 and fp32 weights are read", UnsupportedModelError)
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        config.fail("layer_types", "full_attention for every layer", UnsupportedModelError)


def _head_dim(config: JsonObject, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is None and hidden_size % num_heads:
        config.fail(
            "hidden_size", f"a multiple of num_attention_heads ({num_heads}), as there is no head_dim"
        )
    head_dim = config.read("head_dim", int, default=hidden_size // num_heads, at_most=_MAX_HEAD_DIM)
    if head_dim % 2:
        config.fail("head_dim", f"even, for RoPE rotates pairs; it is {head_dim}")
    return head_dim


def _read_rope(config: JsonObject) -> tuple[float, Llama3RopeScaling | None]:
    """Theta and scaling, from ``rope_parameters`` (transformers 5), ``rope_scaling`` (4) or the config itself."""
    keys = (key for key in ("rope_parameters", "rope_scaling") if config.get(key) is not None)
    key = next(keys, None)
    rope = JsonObject(config.path, {}) if key is None else config.nested(key)
    source = config if rope.get("rope_theta") is None else rope
    theta = source.read("rope_theta", float, default=10000.0)  # the default of Hugging Face's config classes
    for source in (config, rope):
        if source.get("partial_rotary_factor") not in (None, 1):
            source.fail("partial_rotary_factor", "1: partial RoPE is not implemented", UnsupportedModelError)
    # Configs written before transformers 4.43 call the key "type".
    type_key = "type" if rope.get("rope_type") is None and "type" in rope.values else "rope_type"
    rope_type = rope.get(type_key)
    if rope_type == "default" or (rope_type is None and set(rope.values) <= {"rope_theta"}):
        return theta, None
    if rope_type != "llama3":
        rope.fail(type_key, "default or llama3", UnsupportedModelError)
    scaling = Llama3RopeScaling(
        factor=rope.read("factor", float),
        low_freq_factor=rope.read("low_freq_factor", float),
        high_freq_factor=rope.read("high_freq_factor", float),
        original_max_position_embeddings=rope.read("original_max_position_embeddings", int),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        rope.fail("low_freq_factor", f"below high_freq_factor ({scaling.high_freq_factor})")
    return theta, scaling


def _dtype(config: JsonObject) -> DtypeName:
    key = "torch_dtype" if config.get("dtype") is None else "dtype"
    # Hugging Face's default is float32.
    found = str(config.get(key) or "float32").removeprefix("torch.")
    name = next((name for name in DTYPE_BYTES if name == found), None)
    if name is None:
        config.fail(key, f"one of {', '.join(DTYPE_BYTES)}", UnsupportedModelError)
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
