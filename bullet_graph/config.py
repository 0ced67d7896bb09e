"""The engine's settings: one frozen value, checked once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from bullet_graph.errors import ConfigError
from bullet_graph.slo import NO_TARGETS, Slo

DeviceName = Literal["auto", "cuda", "cpu"]
DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
PartitionBackendName = Literal["auto", "smctrl", "green", "none"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
SelfCheckChoice = Literal["off", "sample", "all"]
ReadyName = Literal["hot", "all"]
PromptOrder = Literal["arrival", "longest-output"]
PolicyChoice = Literal["serial", "mixed", "split", "auto"]

KV_BLOCK_TOKENS = 16
"""Tokens in a KV-cache block (a page in FlashInfer's words)."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How prefill and decode share the device: the policy that the planner follows.

    ``serial`` runs whole prompts and decode steps in turn. ``mixed`` puts prefill chunks and decode rows into one
    forward. ``split`` runs both at once on disjoint SMs. ``auto`` chooses among them at every step, by measured
    performance and latency targets.

    Attributes:
        name: the policy.
        chunk_tokens: most rows of a forward of ``serial`` and ``mixed``; None takes the engine's
            ``max_num_batched_tokens``, or, in ``mixed`` under a TPOT target, what the target allows.
        decode_sms: SMs of the decode lane in ``split``; None lets the planner choose.

    Raises:
        ConfigError: at construction, naming the field.
    """

    name: PolicyChoice
    chunk_tokens: int | None = None
    decode_sms: int | None = None

    def __post_init__(self) -> None:
        if self.name not in get_args(PolicyChoice):
            raise ConfigError(
                f"a policy's name must be one of {', '.join(get_args(PolicyChoice))}, got {self.name!r}"
            )
        for field, names in (("chunk_tokens", ("serial", "mixed")), ("decode_sms", ("split",))):
            value = getattr(self, field)
            if value is not None:
                _require_count(f"a policy's {field}", value)
                if self.name not in names:
                    raise ConfigError(
                        f"a policy's {field} goes with {' or '.join(names)}, not with {self.name}"
                    )

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """Read a name, or ``serial:CHUNK``, ``mixed:CHUNK`` or ``split:NUM_SMS``.

        Raises:
            ConfigError: for any other text, with the forms allowed.
        """
        name, colon, number = text.partition(":")
        sized = {"serial": "chunk_tokens", "mixed": "chunk_tokens", "split": "decode_sms"}
        if name not in get_args(PolicyChoice) or (
            colon and not (name in sized and number.isdecimal() and int(number) >= 1)
        ):
            raise ConfigError(
                f"unknown policy {text!r}: use serial, mixed, split or auto, serial:CHUNK or mixed:CHUNK "
                "(in tokens, ≥ 1), or split:NUM_SMS (SMs of the decode lane)"
            )
        choice = cast(PolicyChoice, name)
        return cls(choice, **{sized[name]: int(number)}) if colon else cls(choice)

    @property
    def uses_prefill_lane(self) -> bool:
        """Whether prompts may run on a lane of their own."""
        return self.name in ("split", "auto")

    def __str__(self) -> str:
        number = self.chunk_tokens or self.decode_sms
        return self.name if number is None else f"{self.name}:{number}"


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
        policy: how prefill and decode share the device.
        prompt_order: which prompts are prefilled first where none has a target for its first token: ``arrival``, as
            they came, or ``longest-output``, those with the most ``max_tokens`` first. The latter is for batches
            of which nothing is needed before the end: the longest outputs then do not end alone, in small batches.
            Short ones wait for as long as longer ones come.
        seed: of dummy weights and of requests without a seed of their own.
        cuda_graphs: capture decode steps; without, they run eagerly (slower; for debugging).
        partition_backend: what confines a lane to its SMs: ``smctrl``, ``green``, ``none``, or ``auto`` for the
            first that verifies.
        decode_sms: sizes of the decode lane, in SMs, to verify and capture graphs for besides the whole GPU; the
            prefill lane has the rest. None given, ``auto`` and ``split`` take those of the performance table.
        slo: latency targets of requests that have none of their own.
        perf_table: the performance model's numbers, for policies and targets that need predictions: a table file of
            ``bullet-graph profile``, or ``roofline`` for an unmeasured estimate; None looks for a table of this
            GPU and model among the user's own and those that come with the package.
        capture_plan: which decode steps and short forwards to capture, for which partitions: a file of
            ``bullet-graph capture plan`` (ending in ``.toml``), or the name of one that comes with the package; None
            captures all buckets for all partitions.
        compile: on the CPU, fuse each layer's halves with torch.compile; a GPU's captured decode steps always are.
        capture_cache: start from what ``bullet-graph capture build`` has kept in this folder, or ``auto`` for the
            user's own; what does not fit or does not hold is compiled, with a warning. None compiles everything.
            A cache is code: take one from a trusted place only.
        self_check: at which batch sizes a start from a cache compares its logits with the uncompiled model's: ``off``,
            ``sample`` (the smallest, the middle, the largest) or ``all``.
        ready: when an engine on a GPU counts as ready: once ``all`` graphs are captured, or the ``hot`` ones, without
            which it could not serve well. The others then follow while it is idle and, where no latency target
            suffers, between steps.

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
    policy: Policy = Policy("mixed")
    prompt_order: PromptOrder = "arrival"
    seed: int = 0
    cuda_graphs: bool = True
    partition_backend: PartitionBackendName = "auto"
    decode_sms: tuple[int, ...] = ()
    slo: Slo = NO_TARGETS
    perf_table: str | None = None
    capture_plan: str | None = None
    compile: bool = False
    capture_cache: str | None = None
    self_check: SelfCheckChoice = "sample"
    ready: ReadyName = "all"

    def __post_init__(self) -> None:
        choices = {
            "load_format": ("auto", "safetensors", "dummy"),
            "dtype": ("auto", "bfloat16", "float16", "float32"),
            "device": ("auto", "cuda", "cpu"),
            "partition_backend": ("auto", "smctrl", "green", "none"),
            "prompt_order": get_args(PromptOrder),
            "self_check": get_args(SelfCheckChoice),
            "ready": ("hot", "all"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            _require_count(name, getattr(self, name))
        for name in ("max_model_len", "kv_cache_bytes"):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name))
        if self.perf_table is not None and not self.perf_table:
            raise ConfigError("perf_table must be a file's name, roofline or None, got ''")
        if self.capture_plan is not None:
            if not isinstance(self.capture_plan, str) or not self.capture_plan:
                raise ConfigError(
                    f"capture_plan must be a file's name, a shipped plan's or None, got {self.capture_plan!r}"
                )
            if self.decode_sms or not self.cuda_graphs:
                raise ConfigError(
                    "capture_plan says which partitions and sizes are captured: leave out decode_sms and "
                    "cuda_graphs=False, or leave out the plan"
                )
        if self.capture_cache is not None and (
            not isinstance(self.capture_cache, str) or not self.capture_cache
        ):
            raise ConfigError(f"capture_cache must be a folder, auto or None, got {self.capture_cache!r}")
        share = self.gpu_memory_utilization
        if not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {share!r}")

    @property
    def is_folder(self) -> bool:
        """Whether ``model`` names an existing folder rather than a preset."""
        return Path(self.model).is_dir()

    @property
    def chunk_tokens(self) -> int:
        """Most rows of one forward under the chosen policy."""
        if self.policy.chunk_tokens is None:
            return self.max_num_batched_tokens
        return min(self.policy.chunk_tokens, self.max_num_batched_tokens)


def _require_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")
