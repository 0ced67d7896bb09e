"""The engine's settings, as one frozen value. The command line's options and the engine's keywords come from here."""

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path, PurePath
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from bullet_graph.errors import ConfigError
from bullet_graph.slo import NO_TARGETS, Slo

DeviceName = Literal["auto", "cuda", "cpu"]
QuantizationName = Literal["fp8"]
KvCacheDtypeName = Literal["auto", "fp8"]
ModelDtype = Literal["bfloat16", "float16", "float32"]
DtypeName = Literal["auto", ModelDtype]
PartitionBackendName = Literal["auto", "smctrl", "green", "none"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
SelfCheckChoice = Literal["off", "sample", "all"]
ReadyName = Literal["hot", "all"]
PromptOrder = Literal["arrival", "longest-output"]
GenerationConfigChoice = Literal["auto", "none"]
PolicyChoice = Literal["serial", "mixed", "split", "auto"]

_ROUTER_SKEW = r"uniform|zipf:\d+(\.\d+)?"

KV_BLOCK_TOKENS = 16
"""Tokens in a KV-cache block (a page in FlashInfer's words)."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How prefill and decode share the device.

    ``serial`` runs whole prompts and decode steps in turn. ``mixed`` puts prefill chunks and decode rows into one
    forward. ``split`` runs both at once on disjoint SMs. ``auto`` chooses among them at every step, by measured
    performance and latency targets.

    ``chunk_tokens`` are the most rows of a forward of ``serial`` and ``mixed``; None takes the engine's
    ``max_num_batched_tokens``, or, in ``mixed`` under a TPOT target, what ``auto`` would take. ``decode_sms`` are those
    of the decode lane in ``split``; None lets the planner choose. A wrong value raises ConfigError, at construction.
    """

    name: PolicyChoice
    chunk_tokens: int | None = None
    decode_sms: int | None = None

    def __post_init__(self) -> None:
        if self.name not in get_args(PolicyChoice):
            raise ConfigError(f"a policy's name must be one of {', '.join(get_args(PolicyChoice))}, got {self.name!r}")
        for name, policies in (("chunk_tokens", ("serial", "mixed")), ("decode_sms", ("split",))):
            value = getattr(self, name)
            if value is not None:
                _require_count(f"a policy's {name}", value)
                if self.name not in policies:
                    raise ConfigError(f"a policy's {name} goes with {' or '.join(policies)}, not with {self.name}")

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """Read a name, or ``serial:CHUNK``, ``mixed:CHUNK`` or ``split:NUM_SMS``; ConfigError for another text."""
        name, colon, number = text.partition(":")
        sized = {"serial": "chunk_tokens", "mixed": "chunk_tokens", "split": "decode_sms"}
        is_sized = name in sized and re.fullmatch("0*[1-9][0-9]*", number)
        if name not in get_args(PolicyChoice) or (colon and not is_sized):
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


def parse_bytes(text: str) -> int:
    """Read a size such as ``8GiB``, ``512MB`` or ``1000000``; ConfigError for another form."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt]?)(i?)b)?\s*", text.lower())
    if match is None or (match[3] and not match[2]):
        raise ConfigError(f"{text!r} is no size: write 8GiB, 512MiB, 1.5GB or a number of bytes")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " "))


def parse_counts(text: str) -> tuple[int, ...]:
    """Read numbers such as ``32,48``; ConfigError for another form."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"{text!r} is no list of numbers: write 32,48,64") from None


@dataclass(frozen=True, slots=True)
class Setting:
    """Describes a field of a dataclass of settings: its option on the command line and its check.

    ``no_value`` says what happens without a value. ``minimum`` and ``maximum`` are of a count. ``wanted`` says what any
    other value must be, and ``holds`` tests it. ``parse`` reads a text. ``flag`` is the option's, if not as the name.
    Errors do not show a ``secret``. :func:`settings_of` fills in the last three.
    """

    help: str
    metavar: str | None = None
    no_value: str | None = None
    minimum: int | None = None
    maximum: int = 2**63 - 1
    parse: Callable[[str], Any] | None = None
    wanted: str = ""
    holds: Callable[[Any], bool] = lambda value: value != ""
    flag: str | None = None
    secret: bool = False
    name: str = ""
    default: Any = None
    hint: Any = None

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a setting that is a choice, besides None."""
        literal = next((hint for hint in (self.hint, *get_args(self.hint)) if get_origin(hint) is Literal), None)
        return get_args(literal)

    def check(self, value: object) -> None:
        """Raise ConfigError for a value that the setting cannot have."""
        if value is None and NoneType in get_args(self.hint):
            return
        if self.minimum is not None:
            _require_count(self.name, value, self.minimum, self.maximum)
        if choices := self.choices:
            wanted, fits = f"one of {', '.join(choices)}", value in choices
        else:
            wanted = self.wanted or f"of type {inspect.formatannotation(self.hint)}"
            fits = _is_a(value, self.hint) and (not self.wanted or self.holds(value))
        if not fits:
            found = "another" if self.secret else repr(value)
            raise ConfigError(f"{self.name} must be {wanted}, got {found}")


def _is_a(value: object, hint: Any) -> bool:
    inner = get_args(hint)
    if isinstance(hint, UnionType):
        return any(_is_a(value, each) for each in inner)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_is_a(each, inner[0]) for each in value)
    if hint in (int, float):
        # A bool is an int, and an int is a float.
        return isinstance(value, int | hint) and not isinstance(value, bool)
    return isinstance(value, hint)


def setting(default: Any, text: str, **details: Any) -> Any:
    """A field, with a default unless that is MISSING, described by a :class:`Setting`."""
    described = Setting(text, **details)
    return field(default=default, metadata={"setting": described}, repr=not described.secret)


def settings_of(owner: type) -> Mapping[str, Setting]:
    """The settings of a dataclass, by name."""
    hints, described = get_type_hints(owner), {}
    for each in fields(owner):
        if found := each.metadata.get("setting"):
            described[each.name] = replace(found, name=each.name, default=each.default, hint=hints[each.name])
    return MappingProxyType(described)


_FORMER_NAMES = {"arm": "policy", "canary": "self_check"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine: the only place where each is named, described, checked and given its default.

    A wrong one raises ConfigError, at construction.
    """

    model: str = setting(
        MISSING, "A Hugging Face model folder, a hub id such as Qwen/Qwen3-0.6B, or a preset (random weights)."
    )
    revision: str | None = setting(
        None, "Branch, tag or commit on the hub.", no_value="the main branch", wanted="a branch, tag, commit or None"
    )
    load_format: LoadFormat = setting(
        "auto",
        "Source of the weights. dummy: seeded random numbers; auto: dummy for a preset, safetensors for a folder.",
    )
    router_skew: str = setting(
        "uniform",
        "Popularity of experts under random weights. zipf:S: the r-th most popular of a layer gets a share of the rows "
        "in proportion to r^-S, at most all of them.",
        metavar="uniform|zipf:S",
        wanted="uniform, or zipf:S with a number such as zipf:0.8",
        holds=lambda text: re.fullmatch(_ROUTER_SKEW, text) is not None,
    )
    dtype: DtypeName = setting(
        "auto",
        "Number format of weights, activations and KV cache. auto: float32 on the CPU; on a GPU config.json's, or "
        "bfloat16 where that is float32.",
    )
    quantization: QuantizationName | None = setting(
        None,
        "Quantize a 16-bit checkpoint's projections while loading. fp8: E4M3, with a scale for each output channel and "
        "for each token's activations. A checkpoint in FP8 needs no such setting.",
        no_value="as the checkpoint is",
    )
    kv_cache_dtype: KvCacheDtypeName = setting(
        "auto",
        "Number format of the KV cache. auto: as dtype; fp8: E4M3, for twice the tokens in the same memory, with the "
        "checkpoint's scales if it has any.",
    )
    device: DeviceName = setting("auto", "Where to run; auto: the GPU if there is one.")
    tensor_parallel_size: int = setting(
        1, "Ranks that share the model, each a process with its own GPU; must divide the query heads.", minimum=1
    )
    expert_parallel: bool = setting(
        False, "Divide the experts among the ranks, each expert as a whole, instead of the columns of every expert."
    )
    policy: Policy = setting(
        Policy("mixed"),
        "How prefill and decode share the device. CHUNK: most tokens of one forward; NUM_SMS: SMs of the decode "
        "lane; auto: chosen at every step from measured performance.",
        metavar="serial[:CHUNK]|mixed[:CHUNK]|split[:NUM_SMS]|auto",
        parse=Policy.parse,
    )
    prompt_order: PromptOrder = setting(
        "arrival",
        "Which prompts are prefilled first if none has a TTFT target. longest-output: those with the most "
        "max_tokens, for batches whose outputs are needed only at the end; short ones wait.",
    )
    slo: Slo = setting(
        NO_TARGETS,
        'Latency targets in ms, such as "ttft:500 tpot:15" or "ttft:0.2ms/token", for requests without their own.',
        metavar="TARGETS",
        no_value="none",
        parse=lambda text: Slo.parse(text.replace(",", " ").split()),
    )
    reject_late: float | None = setting(
        None,
        "Refuse a request (429 on the server) whose predicted TTFT is more than this many times its target; needs a "
        "performance table.",
        metavar="FACTOR",
        no_value="refuse none",
        wanted="a number above 0",
        holds=lambda factor: factor > 0,
    )
    perf_table: str | None = setting(
        None,
        "Performance table of `bullet-graph profile`; roofline: an unmeasured estimate.",
        metavar="FILE|roofline",
        no_value="the one that fits this GPU and model",
        wanted="a file's name, roofline or None",
    )
    profile_if_missing: bool = setting(
        False,
        "Where a policy or target predicts times and no performance table fits this GPU and model, measure a short "
        "one first. That takes a minute or two, once.",
    )
    capture_plan: str | None = setting(
        None,
        "Plan of the steps to capture as CUDA graphs: a file of `bullet-graph capture plan`, or the name of a plan "
        "that comes with the package.",
        metavar="FILE.toml|NAME",
        no_value="all batch sizes for all partitions",
        wanted="a file's name, a shipped plan's or None",
    )
    compile: bool = setting(
        False, "On the CPU: fuse the two compiled parts of each layer with torch.compile. A GPU does not need it."
    )
    cpu_threads: int | None = setting(
        None,
        "Threads of torch on the CPU, in the whole process. With other busy processes, fewer are faster.",
        no_value="torch's",
        minimum=1,
        maximum=1024,  # far more end in a segmentation fault
    )
    capture_cache: str | None = setting(
        None,
        "Start from what `bullet-graph capture build` has put into this folder; auto: your own cache folder. A "
        "capture cache is code: use only one that you trust.",
        metavar="DIR|auto|off",
        no_value="off",
        parse=lambda text: None if text == "off" else text,
        wanted="a folder, auto or None",
    )
    self_check: SelfCheckChoice = setting(
        "sample",
        "Batch sizes at which a start from a capture cache compares its logits with the uncompiled model's. sample: "
        "the smallest, the middle and the largest.",
    )
    ready: ReadyName = setting(
        "all", "Serve once all CUDA graphs are captured, or only the hot ones; others follow in idle time."
    )
    max_num_seqs: int = setting(256, "Most sequences running at once.", minimum=1, maximum=2**16)
    max_num_batched_tokens: int = setting(8192, "Most tokens of one forward.", minimum=1, maximum=2**24)
    max_model_len: int | None = setting(
        None, "Most tokens of a prompt and its output together.", no_value="the model's limit", minimum=1
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "Share of the device's memory that the engine may fill, in (0, 1].",
        wanted="in (0, 1]",
        holds=lambda share: 0 < share <= 1,
    )
    kv_cache_bytes: int | None = setting(
        None,
        "Size of the KV cache, on each rank, such as 8GiB.",
        metavar="SIZE",
        no_value="what memory is left",
        minimum=1,
        parse=parse_bytes,
    )
    prefix_caching: bool = setting(
        True,
        "Keep the KV blocks of requests that have ended, for those that begin with the same tokens. Not for models "
        "whose layers all have a sliding window.",
    )
    cuda_graphs: bool = setting(
        True, "Capture decode steps into CUDA graphs; without, they run eagerly (slower; for debugging)."
    )
    partition_backend: PartitionBackendName = setting(
        "auto", "Mechanism that confines a lane to its SMs; auto: the first that verifies."
    )
    decode_sms: tuple[int, ...] = setting(
        (),
        "Sizes of the decode lane, in SMs, to verify and to capture graphs for, besides the whole GPU.",
        metavar="N,N,…",
        no_value="those of the performance table, for auto and split",
        parse=parse_counts,
    )
    generation_config: GenerationConfigChoice = setting(
        "auto",
        "Default sampling parameters. auto: those of the model's generation_config.json; none: this engine's own. "
        "Benchmarks decode greedily either way.",
    )
    seed: int = setting(0, "Seed of dummy weights, synthetic prompts and sampling.", minimum=0)

    @classmethod
    def of(cls, model: str, **settings: Any) -> "EngineConfig":
        """Read settings as users give them: as values, or as texts such as ``policy="mixed:2048"``."""
        parsed: dict[str, Any] = {}
        for name, value in settings.items():
            described = SETTINGS.get(name)
            if described is None:
                near = _FORMER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, SETTINGS, n=1)), None)
                hint = f"did you mean {near}?" if near else f"choose among {', '.join(SETTINGS)}"
                raise ConfigError(f"the engine has no setting {name!r}: {hint}")
            if isinstance(value, PurePath):
                value = str(value)
            if isinstance(value, str) and described.parse is not None:
                try:
                    value = described.parse(value)
                except ConfigError as error:
                    raise ConfigError(f"{name}: {error}") from None
            parsed[name] = tuple(value) if isinstance(value, list | range) else value
        return cls(model=model, **parsed)

    def values(self) -> dict[str, Any]:
        """The settings by name, as :meth:`of` and an engine take them."""
        return {name: getattr(self, name) for name in SETTINGS}

    def __post_init__(self) -> None:
        for name, described in SETTINGS.items():
            described.check(getattr(self, name))
        if self.expert_parallel and self.tensor_parallel_size == 1:
            raise ConfigError("expert_parallel needs several ranks, found 1: pass tensor_parallel_size or leave it out")
        if self.capture_cache is None and self.self_check != "sample":
            raise ConfigError("self_check is for starts from a capture cache: pass capture_cache, or leave it out")
        if self.capture_plan is not None and (self.decode_sms or not self.cuda_graphs):
            raise ConfigError("capture_plan names the graphs: leave out decode_sms and cuda_graphs=False, or the plan")

    @property
    def model_name(self) -> str:
        """The model's own name: the last part of its folder's path, even of ``.``, or of its hub id."""
        return Path(self.model).absolute().name

    @property
    def zipf_exponent(self) -> float | None:
        """S of ``router_skew``; None for ``uniform``."""
        return None if self.router_skew == "uniform" else float(self.router_skew.removeprefix("zipf:"))

    @property
    def predicts(self) -> bool:
        """Whether times are predicted: by ``auto``, ``split``, ``reject_late``, and ``mixed`` under a TPOT target."""
        policy = self.policy
        sized_by_target = policy.name == "mixed" and policy.chunk_tokens is None and self.slo.tpot_ms is not None
        return policy.uses_prefill_lane or sized_by_target or self.reject_late is not None

    @property
    def chunk_tokens(self) -> int:
        """Most rows of one forward under the chosen policy."""
        return min(self.policy.chunk_tokens or self.max_num_batched_tokens, self.max_num_batched_tokens)

    @property
    def max_forward_rows(self) -> int:
        """Most rows of a forward. At least 16 prompt rows (the planner's ``row_step``) may join those that decode."""
        return max(self.chunk_tokens, 16) + self.max_num_seqs


SETTINGS = settings_of(EngineConfig)

EngineConfig.__doc__ = f"{EngineConfig.__doc__}\nSettings:\n" + "\n".join(
    f"    {name}: {described.help}" for name, described in SETTINGS.items()
)


def _require_count(name: str, value: Any, minimum: int = 1, maximum: int = 2**63 - 1) -> None:
    if not _is_a(value, int) or value < minimum:
        raise ConfigError(f"{name} must be an integer of at least {minimum}, got {value!r}")
    if value > maximum:
        raise ConfigError(f"{name} must be at most {maximum}, got {value!r}")


def with_settings(signature: inspect.Signature) -> inspect.Signature:
    """A constructor's signature with its ``**settings`` spelled out."""
    own = [each for name, each in signature.parameters.items() if name not in ("self", "settings")]
    known = inspect.signature(EngineConfig).parameters
    spelled = [known[name] for name in known if name not in signature.parameters]
    return signature.replace(parameters=[own[0], *spelled, *own[1:]])
