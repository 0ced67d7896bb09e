"""How a checkpoint's weights are quantized, from ``quantization_config`` of ``config.json``; needs no torch.

FP8 (E4M3) is read: of ``quant_method`` "fp8" (transformers, vLLM) and of "compressed-tensors". All else is refused by
name. A checkpoint's scales of activations are not used: computing those of each token is at least as accurate.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NoReturn, TypeVar

from bullet_graph.errors import UnsupportedModelError
from bullet_graph.models.json_files import JsonObject
from bullet_graph.perf.roofline import FP8_BLOCK, PROJECTIONS, DecoderShape, Fp8Weights

Modules = Mapping[str, tuple[str, ...]]

MODULES: Modules = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Modules of a checkpoint's layer, by the projection that holds them."""

FUSED_MODULES: Modules = {**MODULES, "qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)}
_FP8 = "FP8 (E4M3) of quant_method fp8 or compressed-tensors"
_Shape = TypeVar("_Shape", bound=DecoderShape)
_INSTEAD = "take the model's 16-bit checkpoint, with quantization=fp8 if it should be smaller"
_BLOCK = [FP8_BLOCK, FP8_BLOCK]
_MAX_IGNORED, _MAX_PATTERNS = 2**16, 64


def expert_modules(num_experts: int, *, has_shared: bool, mixtral_names: bool) -> Modules:
    """As :data:`MODULES`, of a layer with experts; without router and gate, which are never quantized."""
    block, names = ("block_sparse_moe", "w1 w3 w2") if mixtral_names else ("mlp", "gate_proj up_proj down_proj")
    experts = [f"{block}.experts.{index}" for index in range(num_experts)] + ["mlp.shared_expert"] * has_shared
    gate, up, down = names.split()
    gate_up = tuple(f"{expert}.{name}" for expert in experts for name in (gate, up))
    return {**MODULES, "gate_up": gate_up, "down": tuple(f"{expert}.{down}" for expert in experts)}


def read_quantization(config: JsonObject, num_layers: int, modules: Modules) -> Fp8Weights | None:
    """The format of the weights; None where they are not quantized. UnsupportedModelError for any but FP8."""
    if config.get("quantization_config") is None:
        return None
    found = config.nested("quantization_config")
    if found.get("quant_method") == "fp8":
        blocks, ignored = _read_fp8(found)
    elif found.get("quant_method") == "compressed-tensors":
        blocks, ignored = _read_compressed_tensors(found)
    else:
        _refuse(found, "quant_method", _FP8)
    return Fp8Weights(blocks, _plain(found, ignored, modules, num_layers), is_stored=True)


def in_formats(shape: _Shape, *, quantization: str | None, kv_cache_dtype: str) -> _Shape:
    """A model as the engine's settings hold it; weights that a checkpoint has in FP8 stay as they are."""
    fp8 = Fp8Weights() if quantization == "fp8" and shape.fp8 is None else shape.fp8
    return replace(shape, fp8=fp8, fp8_kv=kv_cache_dtype == "fp8")


def _read_fp8(found: JsonObject) -> tuple[bool, str]:
    for key, allowed in (("activation_scheme", ("dynamic", "static")), ("fmt", ("e4m3",)), ("scale_fmt", ("float",))):
        if found.get(key) not in (None, *allowed):
            _refuse(found, key, " or ".join(allowed))
    if found.get("weight_block_size") not in (None, _BLOCK):
        _refuse(found, "weight_block_size", f"{_BLOCK} or absent")
    if found.get("modules_to_convert"):
        _refuse(found, "modules_to_convert", "absent: embeddings and output head stay in 16 bits")
    name = "modules_to_not_convert" if found.get("modules_to_not_convert") is not None else "ignored_layers"
    return found.get("weight_block_size") is not None, name


def _read_compressed_tensors(found: JsonObject) -> tuple[bool, str]:
    if found.get("format") not in (None, "float-quantized"):
        _refuse(found, "format", f"float-quantized, which is {_FP8}")
    if len(found.read("config_groups", dict)) != 1:
        _refuse(found, "config_groups", "one group, of all projections")
    groups = found.nested("config_groups")
    group = groups.nested(next(iter(groups.values)))
    if group.get("targets") != ["Linear"]:
        _refuse(group, "targets", '["Linear"]')
    weights = group.nested("weights")
    for part in (weights, group.nested("input_activations")):
        for key, required in (("num_bits", 8), ("type", "float")):
            if part.get(key) != required:
                _refuse(part, key, f"{required}: only {_FP8} is read")
        if part.get("symmetric") is False:
            _refuse(part, "symmetric", "true")
    if group.get("output_activations") is not None:
        _refuse(group, "output_activations", "absent")
    if weights.get("strategy") not in ("tensor", "channel", "block"):
        _refuse(weights, "strategy", "tensor, channel or block")
    blocks = weights.get("strategy") == "block"
    if blocks and weights.get("block_structure") != _BLOCK:
        _refuse(weights, "block_structure", str(_BLOCK))
    if found.get("kv_cache_scheme") is not None:
        scheme = found.nested("kv_cache_scheme")
        for key, wanted in (("num_bits", 8), ("type", "float"), ("strategy", "tensor")):
            if scheme.get(key) != wanted:
                _refuse(scheme, key, f"{wanted}: keys and values have one FP8 scale a layer")
    return blocks, "ignore"


def _plain(found: JsonObject, key: str, modules: Modules, num_layers: int) -> tuple[str, ...]:
    """The projections that stay in 16 bits: of all layers, and with all that are fused with them."""
    entries = found.get(key) or []
    if not isinstance(entries, list) or len(entries) > _MAX_IGNORED or not all(isinstance(e, str) for e in entries):
        found.fail(key, "a list of names of modules")
    patterns = [_glob(found, key, entry) for entry in entries if entry.startswith("re:")]
    if len(patterns) > _MAX_PATTERNS:
        found.fail(key, f"at most {_MAX_PATTERNS} expressions")
    names_ignored = {entry for entry in entries if not entry.startswith("re:")}
    plain = []
    for projection in PROJECTIONS:
        names = [f"model.layers.{i}.{name}" for i in range(num_layers) for name in modules[projection]]
        if (ignored := sum(_is_ignored(name, names_ignored, patterns) for name in names)) == len(names):
            plain.append(projection)
        elif ignored:
            _refuse(
                found,
                key,
                f"alike in all layers, and for all of {', '.join(modules[projection][:6])} (of {len(names)} such "
                f"modules, {ignored} stay in 16 bits)",
            )
    if len(plain) == len(PROJECTIONS):
        _refuse(found, key, "no list of all projections")
    return tuple(plain)


def _is_ignored(name: str, ignored: Collection[str], patterns: Collection[str]) -> bool:
    """Whether a module, one that it is in, or the last part of its name is ignored."""
    parts = name.split(".")
    named = (".".join(some) for i in range(len(parts)) for some in (parts[: i + 1], parts[i:]))
    return any(part in ignored for part in named) or any(fnmatchcase(name, pattern) for pattern in patterns)


def _glob(found: JsonObject, key: str, entry: str) -> str:
    """A regular expression as a pattern of :mod:`fnmatch`, which takes no more than linear time to match."""
    # As in compressed-tensors, it matches from a name's start on, not to its end.
    pattern = entry.removeprefix("re:").removeprefix("^").replace("\\.", ".").replace(".*", "*")
    pattern = pattern[:-1] if pattern.endswith("$") else f"{pattern}*"
    if any(character in pattern for character in "\\()[]{}+?|^$"):
        _refuse(found, key, f"names, and expressions of letters, '.*' and '$', not {entry!r:.80}")
    return pattern


def _refuse(found: JsonObject, key: str, required: str) -> NoReturn:
    found.fail(key, f"{required}; {_INSTEAD}", UnsupportedModelError)
