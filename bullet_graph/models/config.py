"""What a decoder looks like, read from a Hugging Face ``config.json``."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from bullet_graph.errors import ModelError, UnsupportedModelError
from bullet_graph.perf.traffic import decode_weight_bytes

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

DtypeName = Literal["bfloat16", "float16", "float32"]

DTYPE_BYTES: Mapping[DtypeName, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of an element, by the name of its type."""

# What Hugging Face's config classes for these architectures take where config.json names no rope_theta.
_DEFAULT_ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Llama 3's frequency-dependent RoPE scaling (Llama 3.1 model card; ``rope_type: llama3``).

    Attributes:
        factor: by how much the lowest frequencies are slowed.
        low_freq_factor: wavelengths above ``original_max_position_embeddings / low_freq_factor`` scale fully.
        high_freq_factor: wavelengths below ``original_max_position_embeddings / high_freq_factor`` stay.
        original_max_position_embeddings: context length before scaling, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and constants of a dense decoder (Llama 3.x, Qwen2/2.5, Qwen3).

    Attributes:
        architecture: the Hugging Face class name, such as ``LlamaForCausalLM``.
        qkv_bias: the q, k and v projections have a bias (Qwen2).
        qk_norm: RMSNorm over each query and key head before RoPE (Qwen3).
        dtype: the checkpoint's own dtype.
        eos_token_ids: tokens that end an output, unless a request ignores them; may be empty.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    dtype: DtypeName
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        """Columns of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all key (or all value) heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, tied embeddings counted once."""
        embedding_rows = 0 if self.tie_word_embeddings else self.vocab_size
        return decode_weight_bytes(self, batch_size=embedding_rows, dtype_bytes=1)


def load_model_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` of a Hugging Face model folder, as transformers 4 or 5 writes it.

    The end-of-sequence tokens are those of ``generation_config.json`` where it names any, since instruct
    models list more of them there, else those of ``config.json``.

    Raises:
        UnsupportedModelError: the architecture, or a feature the file switches on, is not implemented.
        ModelError: no such folder or file, invalid JSON, a key that is missing, has the wrong type or range,
            or contradicts another.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; expected a model folder that holds config.json")
    config = read_json_object(folder / "config.json")
    architecture = _architecture(config)
    _reject_unsupported_features(config, architecture)

    hidden_size = config.positive_int("hidden_size")
    num_heads = config.positive_int("num_attention_heads")
    num_kv_heads = config.positive_int("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        config.fail("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    vocab_size = config.positive_int("vocab_size")
    rope = _rope_settings(config)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.positive_int("intermediate_size"),
        num_layers=config.positive_int("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, architecture, hidden_size, num_heads),
        max_position_embeddings=config.positive_int("max_position_embeddings"),
        rms_norm_eps=config.positive_float("rms_norm_eps"),
        rope_theta=_rope_theta(config, rope),
        rope_scaling=_rope_scaling(config, rope),
        tie_word_embeddings=config.boolean("tie_word_embeddings", default=False),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        dtype=_dtype(config),
        eos_token_ids=_eos_token_ids(folder, config, vocab_size),
    )


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A JSON object of a model folder, read key by key; null counts as missing, as Hugging Face has it.

    Attributes:
        path: the file, for messages.
        values: the object.
        prefix: what precedes its keys in messages, such as ``rope_scaling.``.
    """

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""

    def get(self, key: str) -> Any:
        """The value, or None where it is missing or null."""
        return self.values.get(key)

    def positive_int(self, key: str, default: int | None = None) -> int:
        """An integer above 0; ModelError for anything else."""
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.fail(key, "an integer of at least 1")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; ModelError for anything else."""
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            self.fail(key, "a finite number above 0")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false; ModelError for anything else."""
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, bool):
            self.fail(key, "true or false")
        return value

    def nested(self, key: str, error: type[ModelError] = ModelError) -> "JsonObject":
        """The object at ``key``; ``error`` for anything else."""
        value = self.get(key)
        if not isinstance(value, dict):
            self.fail(key, "an object", error)
        return JsonObject(self.path, value, f"{self.prefix}{key}.")

    def fail(self, key: str, required: str, error: type[ModelError] = ModelError) -> NoReturn:
        """Raise ``error``, naming the file, the key, what it must be and what it is."""
        found = repr(self.values[key]) if key in self.values else "no such key"
        raise error(f"{self.path}: {self.prefix}{key} must be {required}; found {found}")


def read_json_object(path: Path, error: type[ModelError] = ModelError) -> JsonObject:
    """Read a JSON file whose top level is an object.

    Raises:
        ModelError: (or ``error``) the file is missing, unreadable, not JSON, or holds no object.
    """
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as cause:
        raise error(f"{path} is missing; a Hugging Face model folder must hold it") from cause
    except OSError as cause:
        raise error(f"{path} cannot be read: {cause}") from cause
    except ValueError as cause:
        raise error(f"{path} is not valid JSON ({cause}); download it again") from cause
    if not isinstance(values, dict):
        raise error(f"{path} must hold a JSON object; found {type(values).__name__}")
    return JsonObject(path, values)


def _architecture(config: JsonObject) -> str:
    names = config.get("architectures")
    supported = f"a list naming one of {', '.join(SUPPORTED_ARCHITECTURES)}"
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        config.fail("architectures", supported)
    if names[0] not in SUPPORTED_ARCHITECTURES:
        config.fail("architectures", supported, UnsupportedModelError)
    return names[0]


def _reject_unsupported_features(config: JsonObject, architecture: str) -> None:
    if config.get("hidden_act") not in (None, "silu"):
        config.fail("hidden_act", "silu, the only activation implemented", UnsupportedModelError)
    switches = ["use_sliding_window", "mlp_bias"]
    if architecture != "Qwen2ForCausalLM":
        switches.append("attention_bias")
    for key in switches:
        if config.boolean(key, default=False):
            config.fail(key, "false: it is not implemented", UnsupportedModelError)
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            config.fail(key, "absent: only bf16, fp16 and fp32 weights are read", UnsupportedModelError)
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        config.fail("layer_types", "full_attention for every layer", UnsupportedModelError)


def _head_dim(config: JsonObject, architecture: str, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is None:
        if architecture == "Qwen3ForCausalLM":
            config.fail("head_dim", "given: Qwen3's does not follow from hidden_size")
        if hidden_size % num_heads:
            config.fail(
                "hidden_size", f"a multiple of num_attention_heads ({num_heads}), as there is no head_dim"
            )
        head_dim = hidden_size // num_heads
    else:
        head_dim = config.positive_int("head_dim")
    if head_dim % 2:
        config.fail("head_dim", f"even, for RoPE rotates pairs; it is {head_dim}")
    return head_dim


def _rope_settings(config: JsonObject) -> JsonObject:
    """RoPE's own object: ``rope_parameters`` (transformers 5), ``rope_scaling`` (4), or an empty one."""
    for key in ("rope_parameters", "rope_scaling"):
        if config.get(key) is not None:
            return config.nested(key)
    return JsonObject(config.path, {})


def _rope_theta(config: JsonObject, rope: JsonObject) -> float:
    source = config if rope.get("rope_theta") is None else rope
    return source.positive_float("rope_theta", default=_DEFAULT_ROPE_THETA)


def _rope_scaling(config: JsonObject, rope: JsonObject) -> Llama3RopeScaling | None:
    for source in (config, rope):
        if source.get("partial_rotary_factor") not in (None, 1):
            source.fail("partial_rotary_factor", "1: partial RoPE is not implemented", UnsupportedModelError)
    # Configs written before transformers 4.43 call the key "type".
    type_key = "type" if rope.get("rope_type") is None and "type" in rope.values else "rope_type"
    rope_type = rope.get(type_key)
    if rope_type == "default" or (rope_type is None and set(rope.values) <= {"rope_theta"}):
        return None
    if rope_type != "llama3":
        rope.fail(type_key, "default or llama3", UnsupportedModelError)
    scaling = Llama3RopeScaling(
        factor=rope.positive_float("factor"),
        low_freq_factor=rope.positive_float("low_freq_factor"),
        high_freq_factor=rope.positive_float("high_freq_factor"),
        original_max_position_embeddings=rope.positive_int("original_max_position_embeddings"),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        rope.fail("low_freq_factor", f"below high_freq_factor ({scaling.high_freq_factor})")
    return scaling


def _dtype(config: JsonObject) -> DtypeName:
    key = "torch_dtype" if config.get("dtype") is None else "dtype"
    # Hugging Face takes a checkpoint that does not say for float32.
    found = str(config.get(key) or "float32").removeprefix("torch.")
    name = next((name for name in DTYPE_BYTES if name == found), None)
    if name is None:
        config.fail(key, f"one of {', '.join(DTYPE_BYTES)}", UnsupportedModelError)
    return name


def _eos_token_ids(folder: Path, config: JsonObject, vocab_size: int) -> tuple[int, ...]:
    source = config
    if (folder / "generation_config.json").exists():
        generation = read_json_object(folder / "generation_config.json")
        if generation.get("eos_token_id") is not None:
            source = generation
    value = source.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            source.fail("eos_token_id", f"token ids in [0, vocab_size ({vocab_size}))")
    return tuple(ids)
