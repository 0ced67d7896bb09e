"""The engine's settings: one frozen value, checked once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bullet_graph.errors import ConfigError

DeviceName = Literal["auto", "cuda", "cpu"]
DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
PartitionBackendName = Literal["auto", "smctrl", "green", "none"]
LoadFormat = Literal["auto", "safetensors", "dummy"]

KV_BLOCK_TOKENS = 16
"""Tokens in a KV-cache block (a page in FlashInfer's words)."""


@dataclass(frozen=True, slots=True)
class Arm:
    """How prefill and decode share the device: the policy the scheduler follows each step.

    ``serial`` runs whole prompts and decode steps in turn; ``mixed`` puts prefill chunks and decode rows
    into one forward.

    Attributes:
        name: the policy.
        chunk_tokens: most rows of a forward (prefill chunk plus decode rows in ``mixed``); None takes the
            engine's ``max_num_batched_tokens``.

    Raises:
        ConfigError: at construction, naming the field.
    """

    name: Literal["serial", "mixed"]
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.name not in ("serial", "mixed"):
            raise ConfigError(f"an arm's name must be serial or mixed, got {self.name!r}")
        if self.chunk_tokens is not None:
            _require_count("an arm's chunk_tokens", self.chunk_tokens)

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """Read ``serial``, ``mixed`` or ``mixed:CHUNK`` (``serial:CHUNK`` bounds its forwards likewise).

        Raises:
            ConfigError: for any other text, with the forms allowed.
        """
        name, colon, chunk = text.partition(":")
        if name not in ("serial", "mixed") or (colon and not (chunk.isdecimal() and int(chunk) >= 1)):
            raise ConfigError(
                f"unknown arm {text!r}: use serial, mixed, serial:CHUNK or mixed:CHUNK (CHUNK in tokens, ≥ 1)"
            )
        return cls("serial" if name == "serial" else "mixed", int(chunk) if colon else None)

    def __str__(self) -> str:
        return self.name if self.chunk_tokens is None else f"{self.name}:{self.chunk_tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        model: a Hugging Face model folder, or the name of a preset (see ``bullet_graph.models.presets``).
        load_format: ``safetensors`` reads the folder's weights, ``dummy`` fills them with seeded random
            numbers, ``auto`` means dummy for a preset and safetensors for a folder.
        dtype: of weights, activations and KV cache; ``auto`` is float32 on the CPU; on a GPU config.json's,
            or bfloat16 where that is float32.
        device: ``auto`` takes the GPU where there is one.
        max_model_len: most tokens of a prompt and its output together; None takes the model's own limit.
        max_num_seqs: most sequences running at once.
        max_num_batched_tokens: most rows of one forward with prompt tokens in it; one block's worth of them
            may go beside more decode rows than that.
        gpu_memory_utilization: share of the device's memory that the engine may fill, in (0, 1].
        kv_cache_bytes: fixes the KV cache's size instead of taking what memory is left.
        arm: how prefill and decode share the device.
        seed: of dummy weights and of requests without a seed of their own.
        cuda_graphs: capture decode steps; without, they run eagerly (slower; for debugging).
        partition_backend: what confines a lane to its SMs: ``smctrl``, ``green``, ``none``, or ``auto`` for the
            first that verifies.
        decode_sms: sizes of the decode lane, in SMs, to verify and capture graphs for besides the whole GPU; the
            prefill lane has the rest.

    Raises:
        ConfigError: at construction, naming the setting.
    """

    model: str
    load_format: LoadFormat = "auto"
    dtype: DtypeName = "auto"
    device: DeviceName = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    arm: Arm = Arm("mixed")
    seed: int = 0
    cuda_graphs: bool = True
    partition_backend: PartitionBackendName = "auto"
    decode_sms: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        choices = {
            "load_format": ("auto", "safetensors", "dummy"),
            "dtype": ("auto", "bfloat16", "float16", "float32"),
            "device": ("auto", "cuda", "cpu"),
            "partition_backend": ("auto", "smctrl", "green", "none"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            _require_count(name, getattr(self, name))
        for name in ("max_model_len", "kv_cache_bytes"):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name))
        share = self.gpu_memory_utilization
        if not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {share!r}")

    @property
    def is_folder(self) -> bool:
        """Whether ``model`` names an existing folder rather than a preset."""
        return Path(self.model).is_dir()

    @property
    def chunk_tokens(self) -> int:
        """Most rows of one forward under the chosen arm."""
        if self.arm.chunk_tokens is None:
            return self.max_num_batched_tokens
        return min(self.arm.chunk_tokens, self.max_num_batched_tokens)


def _require_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")
