"""Finds where an unknown driver keeps the stream mask, by trying offsets in child processes.

A write at a wrong offset corrupts the driver's memory. So the parent never writes, nor initialises CUDA: each try is a
short-lived process (:mod:`bullet_graph.partition.calibrate_child`) that may crash or hang.
"""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from bullet_graph.errors import PartitionError
from bullet_graph.partition.calibrate_child import Attempt, Verdict
from bullet_graph.partition.offsets import OFFSET_ALIGNMENT, DriverId
from bullet_graph.partition.smctrl import identify_driver

CANDIDATES = range(0x300, 0x901, OFFSET_ALIGNMENT)
"""All offsets found so far lie in the middle third of this range."""
JOBS = 8
"""Children at a time; each takes about half a GiB of GPU memory."""
TIMEOUT_S = 20.0
SEARCH_SEEDS = (1, 2)
PROOF_SEEDS = ((3, 4, 5), (6, 7, 8))
"""Masks of the fresh children that prove the offset found, one tuple for each child."""

BOOTSTRAP = """
import sys
sys.path.insert(0, sys.argv[1])
from bullet_graph.partition.calibrate_child import main
main(sys.argv[2])
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one try ended; ``detail`` is an error's text, or how the process ended, and may be empty."""

    attempt: Attempt
    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A proven offset, and the cost of finding it.

    Attributes:
        driver: for which the offset holds.
        offset: in bytes.
        tries: child processes of the search.
        crashed: those that died.
        timed_out: those that had to be killed.
        seconds: search and proof together.
    """

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


RunChild = Callable[[Attempt], Outcome]


def run_child(attempt: Attempt, *, timeout_s: float = TIMEOUT_S, bootstrap: str = BOOTSTRAP) -> Outcome:
    """Try one offset in a process of its own, killed after ``timeout_s``; its failure is an outcome, not an error.

    Args:
        attempt: the offset and its masks.
        timeout_s: limit of the process's time.
        bootstrap: the Python program to run, with the folder of the package and the attempt as arguments.
    """
    folder = str(Path(__file__).parents[2])
    command = [sys.executable, "-P", "-c", bootstrap, folder, attempt.to_json()]
    try:
        child = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return Outcome(attempt, Verdict.TIMED_OUT, f"killed after {timeout_s:g} s")
    verdict, detail = _report_of(child)
    return Outcome(attempt, verdict, detail)


def calibrate(
    *,
    driver: DriverId | None = None,
    run_child: RunChild = run_child,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Find the one offset at which a mask acts, and prove it: about a minute on an idle GPU.

    Every candidate is tried: a second offset that acts must not go unseen.

    Args:
        driver: of this machine; None identifies it.
        run_child: tries one offset.
        progress: called with (tries done, tries in all) after each try.

    Raises:
        PartitionError: there is no driver or GPU, no offset acts or several do, or the proof failed.
    """
    started = time.monotonic()
    driver = driver or identify_driver()
    # Without seeds nothing is written. A child must work at all, else every try would fail for the same reason.
    look = run_child(Attempt(CANDIDATES[0], seeds=()))
    if look.verdict is not Verdict.HONOURED:
        raise PartitionError(
            f"a child process must reach all SMs of the GPU before offsets can be tried, but it {look.verdict} "
            f"({look.detail}): see to that first"
        )
    outcomes = _second_chance(_search(run_child, progress), run_child)
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    found = [outcome.attempt.offset for outcome in outcomes if outcome.verdict is Verdict.HONOURED]
    if len(found) != 1:
        summary = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        raise PartitionError(
            f"exactly one offset must make the driver {driver.release} honour a mask, but found "
            f"{', '.join(map(hex, sorted(found))) or 'none'} ({len(outcomes)} tried; {summary}): let the GPU be idle "
            "and try again; if that changes nothing, use --partition-backend green"
        )
    for seeds in PROOF_SEEDS:
        proof = run_child(Attempt(found[0], seeds))
        if proof.verdict is not Verdict.HONOURED:
            raise PartitionError(
                f"offset 0x{found[0]:x} must hold for other masks in a fresh process, but that {proof.verdict} "
                f"({proof.detail}): let the GPU be idle and try again"
            )
    return Calibration(
        driver=driver,
        offset=found[0],
        tries=len(outcomes),
        crashed=verdicts[Verdict.CRASHED],
        timed_out=verdicts[Verdict.TIMED_OUT],
        seconds=time.monotonic() - started,
    )


def _report_of(child: subprocess.CompletedProcess[str]) -> tuple[Verdict, str]:
    if child.returncode < 0:
        return Verdict.CRASHED, signal.strsignal(-child.returncode) or f"signal {-child.returncode}"
    try:
        # The last line: the driver may have written to the same stream before.
        verdict, detail = json.loads(child.stdout.splitlines()[-1])
        return Verdict(verdict), str(detail)
    except (IndexError, TypeError, ValueError):
        return Verdict.CRASHED, f"exit status {child.returncode}, no verdict: {child.stderr[-500:].strip()}"


def _search(run_child: RunChild, progress: Callable[[int, int], None] | None) -> list[Outcome]:
    attempts = [Attempt(offset, SEARCH_SEEDS) for offset in CANDIDATES]
    outcomes: list[Outcome] = []
    pool = ThreadPoolExecutor(JOBS)
    try:
        for future in as_completed([pool.submit(run_child, attempt) for attempt in attempts]):
            outcomes.append(future.result())
            if progress is not None:
                progress(len(outcomes), len(attempts))
    finally:
        pool.shutdown(cancel_futures=True)
    return outcomes


def _second_chance(outcomes: Sequence[Outcome], run_child: RunChild) -> list[Outcome]:
    """Try again, alone, where another child may be to blame: memory was short, or a fault spread."""
    settled: list[Outcome] = []
    for outcome in outcomes:
        if outcome.verdict in (Verdict.NOT_TRIED, Verdict.CUDA_ERROR):
            outcome = run_child(outcome.attempt)
        if outcome.verdict is Verdict.NOT_TRIED:
            # An offset left out could be the right one, or a second one.
            raise PartitionError(
                f"every offset has to be tried, but 0x{outcome.attempt.offset:x} was not ({outcome.detail}): let "
                "the GPU be idle and its memory free, and try again"
            )
        settled.append(outcome)
    return settled
