"""Rotary position embeddings (RoPE) as configs describe them; needs no torch."""

import math
from dataclasses import dataclass

from bullet_graph.errors import UnsupportedModelError
from bullet_graph.models.json_files import MAX_INT, JsonObject


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


@dataclass(frozen=True, slots=True)
class RopeDivisors:
    """What divides each frequency (linear scaling, YaRN, LongRoPE); ``attention_factor`` multiplies cosines and sines.

    LongRoPE has ``long_divisors``, for engines whose ``max_model_len`` exceeds ``original_max_position_embeddings``.
    """

    divisors: tuple[float, ...]
    attention_factor: float = 1.0
    long_divisors: tuple[float, ...] = ()
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class Rope:
    """The base of the frequencies, and how they are slowed for contexts longer than those of the training.

    YaRN's ``extended_positions`` may exceed the config's ``max_position_embeddings``.
    """

    theta: float
    scaling: Llama3RopeScaling | RopeDivisors | None = None
    extended_positions: int = 0


def read_rope(config: JsonObject, head_dim: int, *, can_be_partial: bool) -> tuple[Rope, int]:
    """RoPE of all layers, and the number of a head's dimensions that it rotates.

    It is in ``rope_scaling`` (transformers 4, and added by hand as model cards say), ``rope_parameters`` (5) or the
    config itself. The first goes before the second, but for what it leaves out of the unscaled RoPE.
    """
    given = [config.nested(key) for key in ("rope_scaling", "rope_parameters") if config.get(key) not in (None, {})]
    rope = given[0] if given else JsonObject(config.path, {})
    unscaled = [key for key in ("rope_theta", "partial_rotary_factor") if given and config.get(key) is None]
    rope = rope.with_defaults(**{key: given[-1].get(key) for key in unscaled})
    source = config if rope.get("partial_rotary_factor") is None else rope
    rotary_dim = int(head_dim * source.read("partial_rotary_factor", float, default=1.0))
    if rotary_dim != head_dim and not can_be_partial:
        source.fail("partial_rotary_factor", "1: partial RoPE is not implemented here", UnsupportedModelError)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        source.fail("partial_rotary_factor", f"such that it leaves an even part of head_dim ({head_dim})")
    return read_rope_entry(config, rope, rotary_dim), rotary_dim


def read_rope_entry(config: JsonObject, rope: JsonObject, rotary_dim: int) -> Rope:
    """RoPE as an object of the config describes it; some keys may be in the config itself."""
    source = config if rope.get("rope_theta") is None else rope
    # The default of Hugging Face's config classes.
    theta = source.read("rope_theta", float, default=10000.0)
    if theta <= 1:
        source.fail("rope_theta", "above 1")
    # Configs written before transformers 4.43 call the key "type".
    type_key = "type" if rope.get("rope_type") is None and "type" in rope.values else "rope_type"
    rope_type = rope.get(type_key)
    if rope_type is None and set(rope.values) <= {"rope_theta", "partial_rotary_factor"}:
        return Rope(theta)
    max_length = config.read("max_position_embeddings", int)
    original_key = "original_max_position_embeddings"
    source = rope if config.get(original_key) is None else config
    original = source.read(original_key, int, default=max_length)
    scaling: Llama3RopeScaling | RopeDivisors | None = None
    match rope_type:
        case "default":
            pass
        case "linear":
            scaling = RopeDivisors((rope.read("factor", float),) * (rotary_dim // 2))
        case "dynamic":
            # It changes sequences beyond max_position_embeddings alone, which no engine takes.
            rope.read("factor", float)
        case "yarn":
            # Qwen's cards add YaRN and leave max_position_embeddings as it was.
            extended = int(min(original * rope.read("factor", float), MAX_INT))
            return Rope(theta, _yarn(rope, theta, original, rotary_dim), extended)
        case "longrope":
            scaling = _longrope(rope, max_length, original, rotary_dim)
        case "llama3":
            scaling = _llama3(rope, original)
        case _:
            rope.fail(type_key, "default, linear, dynamic, yarn, longrope or llama3", UnsupportedModelError)
    return Rope(theta, scaling)


def _yarn(rope: JsonObject, theta: float, original: int, rotary_dim: int) -> RopeDivisors:
    """YaRN (Peng et al. 2023): frequencies that turn often in the original length stay, those that do seldom slow."""
    factor = rope.read("factor", float)

    def index_that_turns(times: float) -> float:
        return rotary_dim * math.log(min(max(original / (times * 2 * math.pi), 1e-99), 1e99)) / (2 * math.log(theta))

    low = index_that_turns(rope.read("beta_fast", float, default=32.0))
    high = index_that_turns(rope.read("beta_slow", float, default=1.0))
    if rope.read("truncate", bool, default=True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    slowed = [(i - low) / (high - low if high != low else 0.001) for i in range(rotary_dim // 2)]
    shares = [min(max(share, 0.0), 1.0) for share in slowed]

    def attention_factor(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    inferred = attention_factor(1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        inferred = attention_factor(rope.read("mscale", float))
        inferred /= attention_factor(rope.read("mscale_all_dim", float))
    return RopeDivisors(
        tuple(1 / (1 - share + share / factor) for share in shares),
        rope.read("attention_factor", float, default=inferred),
    )


def _longrope(rope: JsonObject, max_length: int, original: int, rotary_dim: int) -> RopeDivisors:
    """LongRoPE (Ding et al. 2024): a divisor for each frequency, found by search."""
    factor = rope.read("factor", float, default=max_length / original)
    inferred = math.sqrt(1 + math.log(factor) / math.log(max(original, 2))) if factor > 1 else 1.0
    short, long = (rope.read_floats(f"{name}_factor", rotary_dim // 2) for name in ("short", "long"))
    return RopeDivisors(short, rope.read("attention_factor", float, default=inferred), long, original)


def _llama3(rope: JsonObject, original: int) -> Llama3RopeScaling:
    low, high = rope.read("low_freq_factor", float), rope.read("high_freq_factor", float)
    if low >= high:
        rope.fail("low_freq_factor", f"below high_freq_factor ({high})")
    return Llama3RopeScaling(rope.read("factor", float), low, high, original)
