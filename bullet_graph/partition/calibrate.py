"""Finds where an unknown driver keeps the stream mask, by trying offsets in child processes.

A write at a wrong offset corrupts the driver's memory. So the parent never writes, nor initialises CUDA: each try is a
short-lived child process that may crash or hang.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import astuple, dataclass
from enum import StrEnum
from pathlib import Path

from bullet_graph.errors import PartitionError
from bullet_graph.partition.masks import SMS_PER_TPC, TpcMask
from bullet_graph.partition.offsets import OFFSET_ALIGNMENT, DriverId
from bullet_graph.partition.probe import SmidProbe
from bullet_graph.partition.smctrl import bind, identify_driver, read_words, register, write_words

CANDIDATES = range(0x300, 0x901, OFFSET_ALIGNMENT)
"""All offsets found so far lie in the middle third of this range."""
JOBS = 8
"""Children at a time; each takes about half a GiB of GPU memory."""
TIMEOUT_S = 20.0
PROBE_RUNS = 3
"""Launches after which an SM that took no block counts as one that may not be used."""
SEARCH_SEEDS = (1, 2)
PROOF_SEEDS = ((3, 4, 5), (6, 7, 8))
"""Masks of the fresh children that prove the offset found, one tuple for each child."""

BOOTSTRAP = """
import sys
sys.path.insert(0, sys.argv[1])
from bullet_graph.partition.calibrate import child_main
child_main(sys.argv[2])
"""


class Verdict(StrEnum):
    """How a try ended; the parent gives the last two to a child that did not report."""

    HONOURED = "honoured the masks"
    NO_EFFECT = "did not honour the masks"
    CUDA_ERROR = "failed a CUDA call"
    NOT_TRIED = "could not be tried"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one try ended; ``detail`` is an error's text, or how the process ended, and may be empty."""

    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A proven offset in bytes, the child processes of the search, and the seconds of search and proof."""

    driver: DriverId
    offset: int
    tries: int
    crashed: int
    timed_out: int
    seconds: float

    @property
    def table_line(self) -> str:
        """The line to contribute to the table in ``bullet_graph/partition/offsets.py``."""
        driver = self.driver
        return f'({driver.cuda_version}, "{driver.machine}"): 0x{self.offset:X},  # calibrated on {driver.release}'


Seeds = tuple[int, ...]
"""The seed of each random mask that a child writes; without any it only checks that it reaches all SMs."""


def run_child(offset: int, seeds: Seeds, *, timeout_s: float = TIMEOUT_S, bootstrap: str = BOOTSTRAP) -> Outcome:
    """Try one offset in a process of its own, killed after ``timeout_s``; its failure is an outcome, not an error.

    ``bootstrap`` is the Python program to run, with the folder of the package and the attempt as arguments.
    """
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-c", bootstrap, str(Path(__file__).parents[2]), json.dumps([offset, seeds])],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return Outcome(Verdict.TIMED_OUT, f"killed after {timeout_s:g} s")
    if child.returncode < 0:
        return Outcome(Verdict.CRASHED, signal.strsignal(-child.returncode) or f"signal {-child.returncode}")
    try:
        # The last line: the driver may have written to the same stream before.
        verdict, detail = json.loads(child.stdout.splitlines()[-1])
        return Outcome(Verdict(verdict), str(detail))
    except (IndexError, TypeError, ValueError):
        return Outcome(Verdict.CRASHED, f"exit status {child.returncode}, no verdict: {child.stderr[-500:].strip()}")


def calibrate(*, advance: Callable[[int], object] = lambda _: None) -> Calibration:
    """Find the one offset at which a mask acts, and prove it: about a minute on an idle GPU.

    Every candidate is tried: a second offset that acts must not go unseen. ``advance`` is told of each try
    that is done. Raises PartitionError without driver or GPU, or where no offset acts, several do, or the proof fails.
    """
    started = time.monotonic()
    driver = identify_driver()
    # Without seeds nothing is written. A child must work at all, else every try would fail for the same reason.
    look = run_child(CANDIDATES[0], ())
    if look.verdict is not Verdict.HONOURED:
        raise PartitionError(
            f"a child process must reach all SMs of the GPU before offsets can be tried, but it {look.verdict} "
            f"({look.detail}): see to that first"
        )
    outcomes = _search(advance)
    verdicts = Counter(outcome.verdict for outcome in outcomes.values())
    found = [offset for offset, outcome in outcomes.items() if outcome.verdict is Verdict.HONOURED]
    if len(found) != 1:
        summary = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        raise PartitionError(
            f"exactly one offset must make the driver {driver.release} honour a mask, but found "
            f"{', '.join(map(hex, sorted(found))) or 'none'} ({len(outcomes)} tried; {summary}): let the GPU be idle "
            "and try again; if that changes nothing, use --partition-backend green"
        )
    prove(found[0])
    return Calibration(
        driver=driver,
        offset=found[0],
        tries=len(outcomes),
        crashed=verdicts[Verdict.CRASHED],
        timed_out=verdicts[Verdict.TIMED_OUT],
        seconds=time.monotonic() - started,
    )


def prove(offset: int) -> None:
    """Prove an offset on this machine, in processes of their own; PartitionError where it does not hold."""
    for seeds in PROOF_SEEDS:
        proof = run_child(offset, seeds)
        if proof.verdict is not Verdict.HONOURED:
            raise PartitionError(
                f"offset 0x{offset:x} must hold for other masks in a fresh process, but that {proof.verdict} "
                f"({proof.detail}): let the GPU be idle and try again"
            )


def _search(advance: Callable[[int], object]) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = {}
    pool = ThreadPoolExecutor(JOBS)
    try:
        tries = {pool.submit(run_child, offset, SEARCH_SEEDS): offset for offset in CANDIDATES}
        for future in as_completed(tries):
            outcomes[tries[future]] = future.result()
            advance(1)
    finally:
        pool.shutdown(cancel_futures=True)
    return {offset: _settle(offset, outcome) for offset, outcome in outcomes.items()}


def _settle(offset: int, outcome: Outcome) -> Outcome:
    """Try again, alone, where another child may be to blame: memory was short, or a fault spread."""
    if outcome.verdict in (Verdict.NOT_TRIED, Verdict.CUDA_ERROR):
        outcome = run_child(offset, SEARCH_SEEDS)
    if outcome.verdict is Verdict.NOT_TRIED:
        # An offset left out could be the right one, or a second one.
        raise PartitionError(
            f"every offset has to be tried, but 0x{offset:x} was not ({outcome.detail}): let "
            "the GPU be idle and its memory free, and try again"
        )
    return outcome


# The child process


def trial_mask(seed: int, num_tpcs: int) -> TpcMask:
    """A third of the TPCs at random, so that a mask written a few words off cannot pass for itself."""
    tpcs = random.Random(seed).sample(range(num_tpcs), max(1, num_tpcs // 3))
    return TpcMask(sum(1 << tpc for tpc in tpcs), num_tpcs)


def honours(offset: int, seeds: Seeds, probe: SmidProbe, stream: int) -> bool:
    """Whether masks written at the offset confine ``stream`` to exactly their SMs; leaves the memory as it was."""
    words = read_words(stream, offset)
    try:
        for seed in seeds:
            mask = trial_mask(seed, probe.num_sms // SMS_PER_TPC)
            bind(stream, offset, mask)
            if not uses_exactly(mask.sms, probe, stream):
                return False
        return True
    finally:
        write_words(stream, offset, words)


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


def judge(offset: int, seeds: Seeds) -> Outcome:
    """The outcome of one try on GPU 0.

    Closes nothing: the driver's own clean-up could stumble over memory that a wrong offset has corrupted.
    """
    try:
        probe = SmidProbe()
        stream = probe.driver.create_stream(urgent=False)
        register(stream)
        if not uses_exactly(frozenset(range(probe.num_sms)), probe, stream):
            return Outcome(Verdict.NOT_TRIED, f"a stream without a mask does not reach all of the {probe.num_sms} SMs")
    except PartitionError as error:
        return Outcome(Verdict.NOT_TRIED, str(error))
    try:
        return Outcome(Verdict.HONOURED if honours(offset, seeds, probe, stream) else Verdict.NO_EFFECT)
    except PartitionError as error:
        return Outcome(Verdict.CUDA_ERROR, str(error))


def child_main(request: str) -> None:
    """Carry out ``request``, [offset, seeds] as JSON, and print the verdict as JSON."""
    # Crashes are expected, and a core file takes hundreds of megabytes.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps(astuple(judge(*json.loads(request)))), flush=True)
    # Not sys.exit: see judge.
    os._exit(0)
