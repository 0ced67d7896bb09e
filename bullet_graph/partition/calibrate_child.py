"""One try of a calibration, in a process of its own since it writes masks at an offset that may be wrong."""

import json
import os
import random
import resource
from dataclasses import dataclass
from enum import StrEnum

from bullet_graph.errors import PartitionError
from bullet_graph.partition.masks import SMS_PER_TPC, TpcMask
from bullet_graph.partition.probe import SmidProbe
from bullet_graph.partition.smctrl import bind, read_words, write_words

PROBE_RUNS = 3
"""Launches after which an SM that took no block counts as one that may not be used."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """The task of a child.

    Attributes:
        offset: in bytes from the start of the stream object.
        seeds: one random mask each. Without any, the child writes nothing and only checks that it reaches all SMs.
    """

    offset: int
    seeds: tuple[int, ...]

    def to_json(self) -> str:
        return json.dumps([self.offset, self.seeds])

    @classmethod
    def from_json(cls, text: str) -> "Attempt":
        offset, seeds = json.loads(text)
        return cls(offset, tuple(seeds))


class Verdict(StrEnum):
    """How a try ended; the parent gives the last two to a child that did not report."""

    HONOURED = "honoured the masks"
    NO_EFFECT = "did not honour the masks"
    CUDA_ERROR = "failed a CUDA call"
    NOT_TRIED = "could not be tried"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"


def trial_mask(seed: int, num_tpcs: int) -> TpcMask:
    """A third of the TPCs at random, so that a mask written a few words off cannot pass for itself."""
    tpcs = random.Random(seed).sample(range(num_tpcs), max(1, num_tpcs // 3))
    return TpcMask(sum(1 << tpc for tpc in tpcs), num_tpcs)


def honours(attempt: Attempt, probe: SmidProbe, stream: int) -> bool:
    """Whether masks written at the offset confine ``stream`` to exactly their SMs; leaves the memory as it was.

    Raises:
        PartitionError: a CUDA call failed.
    """
    words = read_words(stream, attempt.offset)
    try:
        for seed in attempt.seeds:
            mask = trial_mask(seed, probe.num_sms // SMS_PER_TPC)
            bind(stream, attempt.offset, mask)
            if not uses_exactly(mask.sms, probe, stream):
                return False
        return True
    finally:
        write_words(stream, attempt.offset, words)


def uses_exactly(expected: frozenset[int], probe: SmidProbe, stream: int) -> bool:
    """Whether the stream's kernels use exactly these SMs.

    Other children use the GPU too, so a launch may miss an SM: only then is it repeated.
    """
    seen: frozenset[int] = frozenset()
    for _ in range(PROBE_RUNS):
        seen |= probe.run(stream)
        if seen >= expected:
            break
    return seen == expected


def judge(attempt: Attempt) -> tuple[Verdict, str]:
    """The verdict of one try on GPU 0, with the error's text.

    Closes nothing: the driver's own clean-up could stumble over memory that a wrong offset has corrupted.
    """
    try:
        probe = SmidProbe()
        stream = probe.driver.create_stream(urgent=False)
        if not uses_exactly(frozenset(range(probe.num_sms)), probe, stream):
            return Verdict.NOT_TRIED, f"a stream without a mask does not reach all of the {probe.num_sms} SMs"
    except PartitionError as error:
        return Verdict.NOT_TRIED, str(error)
    try:
        return (Verdict.HONOURED if honours(attempt, probe, stream) else Verdict.NO_EFFECT), ""
    except PartitionError as error:
        return Verdict.CUDA_ERROR, str(error)


def main(request: str) -> None:
    """Carry out ``request`` (JSON of an :class:`Attempt`) and print the verdict as JSON."""
    # Crashes are expected, and a core file takes hundreds of megabytes.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps(judge(Attempt.from_json(request))), flush=True)
    # Not sys.exit: see judge.
    os._exit(0)
