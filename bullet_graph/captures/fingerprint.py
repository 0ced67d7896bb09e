"""What a cache was built with, what a machine has, and which parts of the cache a difference makes stale."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from bullet_graph.errors import CacheError

_ID_DIGITS = 16
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_MAX_VALUE_CHARACTERS = 500


class ArtifactKind(StrEnum):
    """A part of a cache that is built, and goes stale, on its own.

    Attributes:
        TORCH_COMPILE: layer halves, compiled by AOTInductor; or what Inductor's own caches have of them.
        TRITON: compiled Triton kernels.
        TUNING: choices among kernels or their settings that were made by timing.
        FLASHINFER: FlashInfer's compiled modules.
        PERF_TABLE: the performance table that the planner predicts from.
        MASK_OFFSET: where the driver keeps SM masks, as proven.
        CAPTURE: sizes and times of the captured graphs.
    """

    TORCH_COMPILE = "torch_compile"
    TRITON = "triton"
    TUNING = "tuning"
    FLASHINFER = "flashinfer"
    PERF_TABLE = "perf_table"
    MASK_OFFSET = "mask_offset"
    CAPTURE = "capture"


ALL_KINDS = tuple(ArtifactKind)

_HARDWARE = ("device", "platform", "gpu", "num_sms")
_CPU_CODE = ("host_cpu", "cpu_threads", "cxx_compiler")
_MODEL = ("model", "dtype")

DEPENDS_ON: Mapping[ArtifactKind, tuple[str, ...]] = MappingProxyType(
    {
        ArtifactKind.TORCH_COMPILE: (
            *(*_HARDWARE, *_CPU_CODE, "host_isa", "cuda", "python", "torch", "triton"),
            *("code_kernels", *_MODEL, "plan"),
        ),
        ArtifactKind.TRITON: (*_HARDWARE, "cuda", "python", "triton", "code_kernels", *_MODEL, "plan"),
        # Timings follow the driver and the code that was timed.
        ArtifactKind.TUNING: (
            *(*_HARDWARE, *_CPU_CODE, "driver", "cuda", "torch", "triton", "flashinfer"),
            *("code_kernels", *_MODEL, "plan"),
        ),
        # FlashInfer's modules know head size and dtype, but neither the model nor our code.
        ArtifactKind.FLASHINFER: (
            *("device", "platform", "gpu", "cuda", "python", "torch", "flashinfer"),
            *("head_dim", "dtype"),
        ),
        # As perf.table.TableKey: a table outlives changes of our code, and predictions are corrected while serving.
        ArtifactKind.PERF_TABLE: ("device", "gpu", "num_sms", "torch", "triton", "flashinfer", *_MODEL),
        ArtifactKind.MASK_OFFSET: ("device", "platform", "driver"),
        ArtifactKind.CAPTURE: (
            *(*_HARDWARE, *_CPU_CODE, "driver", "cuda", "python", "torch", "triton", "flashinfer"),
            *("code_kernels", "code_graphs", *_MODEL, "head_dim", "plan"),
        ),
    }
)
"""The components that each kind of artifact holds for; ``plan`` stands for the plan that a cache was built for."""

MODEL_COMPONENTS = ("model", "head_dim", "dtype")
"""What a cache is for; the other components are what it was built with."""

PLAN = "plan"

_ORDER = (
    *("device", "platform", "gpu", "num_sms", "driver", "cuda"),
    *("host_cpu", "host_isa", "cpu_threads", "cxx_compiler"),
    *("python", "torch", "triton", "flashinfer", "code_kernels", "code_graphs", *MODEL_COMPONENTS),
)


@dataclass(frozen=True, slots=True)
class Difference:
    """A component that a cache and this machine do not share.

    Attributes:
        component: its name, or ``plan`` or ``plan.KEY``.
        cached: what the cache has; None: it does not name the component.
        here: what this machine has; None likewise.
        stale: the kinds of artifacts that this makes unusable here.
    """

    component: str
    cached: str | None
    here: str | None
    stale: tuple[ArtifactKind, ...]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the contents of a cache depend on, as text by name.

    Attributes:
        components: (name, value) pairs, in the order of :meth:`of`.

    Raises:
        CacheError: a name or a value is not fit to be compared and shown.
    """

    components: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        for name, value in self.components:
            if not _NAME.fullmatch(name) or name == PLAN:
                raise CacheError(f"a fingerprint's component needs a lower-case name, found {name!r:.80}")
            # Shown on terminals: an imported cache must not bring control characters.
            if not value.isprintable() or not 0 < len(value) <= _MAX_VALUE_CHARACTERS:
                raise CacheError(
                    f"component {name} of a fingerprint needs 1 to {_MAX_VALUE_CHARACTERS} printable characters, "
                    f"found {value!r:.80}"
                )
        if self.components != _ordered(dict(self.components)):
            raise CacheError("a fingerprint's components must have different names and be in their order")

    @classmethod
    def of(cls, components: Mapping[str, str]) -> "Fingerprint":
        """Of components by name: those known first, hardware to model, then others by name."""
        return cls(_ordered(components))

    @property
    def values(self) -> dict[str, str]:
        """The components by name."""
        return dict(self.components)

    @property
    def short_id(self) -> str:
        """The first 16 hexadecimal digits of the components' SHA-256."""
        return digest(self.values)

    def differences(self, here: "Fingerprint") -> tuple[Difference, ...]:
        """Where this one, a cache's, differs from a machine's, in the order of the components."""
        cached, found = self.values, here.values
        names = [name for name, _ in _ordered({**cached, **found})]
        return tuple(
            Difference(name, cached.get(name), found.get(name), kinds_depending_on(name))
            for name in names
            if cached.get(name) != found.get(name)
        )


def kinds_depending_on(component: str) -> tuple[ArtifactKind, ...]:
    """The kinds that a change of ``component`` makes stale; all of them where the component is not known here."""
    kinds = tuple(kind for kind in ALL_KINDS if component in DEPENDS_ON[kind])
    return kinds or ALL_KINDS


def plan_differences(cached: Mapping[str, object], here: Mapping[str, object]) -> tuple[Difference, ...]:
    """Where two plans differ, key by key."""
    stale = kinds_depending_on(PLAN)
    return tuple(
        Difference(f"{PLAN}.{key}", _text(cached, key), _text(here, key), stale)
        for key in sorted({*cached, *here})
        if _text(cached, key) != _text(here, key)
    )


def stale_kinds(differences: Iterable[Difference]) -> frozenset[ArtifactKind]:
    """The kinds that any of the differences makes unusable."""
    return frozenset(kind for difference in differences for kind in difference.stale)


def digest(value: object) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a JSON value, whatever the order of its keys."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:_ID_DIGITS]


def entry_id(fingerprint: Fingerprint, plan: Mapping[str, object]) -> str:
    """Name of the cache entry for a fingerprint and a plan: 16 hexadecimal digits."""
    return digest({"fingerprint": fingerprint.values, "plan": plan})


def _ordered(components: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    known = [name for name in _ORDER if name in components]
    others = sorted(name for name in components if name not in _ORDER)
    return tuple((name, components[name]) for name in (*known, *others))


def _text(plan: Mapping[str, object], key: str) -> str | None:
    return json.dumps(plan[key], sort_keys=True) if key in plan else None
