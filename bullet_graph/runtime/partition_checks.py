"""Checks which partition back ends work on this GPU, for which sizes, and which one an engine would take."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass

from bullet_graph.errors import PartitionError
from bullet_graph.partition.backend import (
    AUTO,
    OPENERS,
    BackendOpener,
    NoneBackend,
    PartitionBackend,
    open_backend,
    verify,
)
from bullet_graph.partition.masks import partition_of, sm_ranges
from bullet_graph.partition.probe import SmidProbe

_STEP_SMS = 8
"""Green contexts allow such steps."""


@dataclass(frozen=True, slots=True)
class SizeCheck:
    """One partition under one back end.

    Attributes:
        decode_sms: size of the decode lane; None for the whole GPU.
        seen_sms: the SMs that decode work was seen on, such as "0-15"; None if the partition does not hold.
        seconds: duration of the proof.
    """

    decode_sms: int | None
    seen_sms: str | None = None
    seconds: float | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class BackendCheck:
    """One back end; ``granularity_sms``, the step of a lane's size, is None if it cannot be opened."""

    name: str
    granularity_sms: int | None = None
    sizes: tuple[SizeCheck, ...] = ()
    problem: str | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """Of the back end and its sizes."""
        found = (self.problem, *(size.problem for size in self.sizes))
        return tuple(problem for problem in found if problem is not None)


@dataclass(frozen=True, slots=True)
class PartitionChecks:
    """The checks of all back ends.

    Attributes:
        backends: the preferred first.
        choice: the back end that an engine with these sizes would take; None if it would fail.
        why: the reason, and the refusals before it.
    """

    decode_sms: tuple[int, ...]
    backends: tuple[BackendCheck, ...]
    choice: str | None
    why: str


def default_decode_sms(num_sms: int) -> tuple[int, ...]:
    """About an eighth, a quarter and half of the GPU."""
    sizes = {num_sms // share // _STEP_SMS * _STEP_SMS for share in (8, 4, 2)}
    return tuple(sorted(sizes - {0}))


def check_partitions(
    name: str,
    decode_sms: Iterable[int],
    *,
    num_sms: int,
    device: int = 0,
    openers: Mapping[str, BackendOpener] = OPENERS,
    make_probe: Callable[[int], SmidProbe] = SmidProbe,
) -> PartitionChecks:
    """Open each back end, prove the sizes one by one, and close it; their failures are reported, not raised.

    Args:
        name: of the back end to check, or "auto" for all of them.
        decode_sms: sizes of the decode lane, in SMs; empty for :func:`default_decode_sms`.
        device: ordinal of the GPU; nothing else should run on it meanwhile.
    """
    asked = tuple(dict.fromkeys(decode_sms))
    sizes = asked or default_decode_sms(num_sms)
    backends = []
    for candidate in openers if name == AUTO else (name,):
        # "none" has the whole GPU only; it is checked for sizes only where it was asked for.
        wanted = sizes if candidate != NoneBackend.name else asked if name != AUTO else ()
        backends.append(_check_backend(candidate, (None, *wanted), device, openers[candidate], make_probe))
    if name == NoneBackend.name:
        sizes = asked
    try:
        partitions = [partition_of(size, num_sms=num_sms) for size in (None, *sizes)]
        chosen, why = open_backend(name, partitions, device=device, openers=openers, make_probe=make_probe)
        chosen.close()
    except PartitionError as error:
        return PartitionChecks(sizes, tuple(backends), None, str(error))
    return PartitionChecks(sizes, tuple(backends), chosen.name, why)


def _check_backend(
    name: str,
    sizes: Iterable[int | None],
    device: int,
    opener: BackendOpener,
    make_probe: Callable[[int], SmidProbe],
) -> BackendCheck:
    granularity, checks = None, []
    try:
        with closing(make_probe(device)) as probe, closing(opener(make_probe(device))) as backend:
            granularity = backend.granularity_sms
            checks = [_check_size(backend, size, probe) for size in sizes]
    except PartitionError as error:
        return BackendCheck(name, granularity, tuple(checks), str(error))
    return BackendCheck(name, granularity, tuple(checks))


def _check_size(backend: PartitionBackend, decode_sms: int | None, probe: SmidProbe) -> SizeCheck:
    try:
        verified = verify(backend, partition_of(decode_sms, num_sms=backend.num_sms), probe)
    except PartitionError as error:
        return SizeCheck(decode_sms, problem=str(error))
    return SizeCheck(decode_sms, sm_ranges(verified.decode_sms), verified.seconds)
