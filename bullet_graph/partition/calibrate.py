"""Finds where an unknown driver keeps the stream mask, by trying offsets in child processes.

A write at a wrong offset corrupts the driver's memory, so the parent never writes, and does not even initialise
CUDA: each try is a short-lived process (:mod:`bullet_graph.partition.calibrate_child`) that may crash or hang.
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
from bullet_graph.partition import offsets
from bullet_graph.partition.calibrate_child import Attempt, Verdict
from bullet_graph.partition.offsets import DriverId, KnownOffset, MaskLayout
from bullet_graph.partition.smctrl import identify_driver

CANDIDATES = range(0x300, 0x901, offsets.OFFSET_ALIGNMENT)
"""Offsets of all 128-bit masks found so far lie in the middle third of this range."""
JOBS = 8
TIMEOUT_S = 20.0
SEARCH_SEEDS = (1, 2)
PROOF_SEEDS = ((3, 4, 5), (6, 7, 8))
"""Masks of the fresh children that prove what the search found, one tuple for each."""

# The package's own __init__ imports the engine and with it torch, which takes seconds; hundreds of children
# do without.
BOOTSTRAP = """
import sys, types
package = types.ModuleType("bullet_graph")
package.__path__ = [sys.argv[1]]
sys.modules["bullet_graph"] = package
from bullet_graph.partition.calibrate_child import main
main(sys.argv[2])
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one try ended.

    Attributes:
        attempt: what was tried.
        verdict: how it ended.
        detail: an error's text, or how the process ended; may be empty.
    """

    attempt: Attempt
    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A proven offset, and what it took to find it.

    Attributes:
        driver: for which the offset holds.
        known: the offset and its layout.
        tries: child processes that searched.
        crashed: of these, how many died.
        timed_out: of these, how many had to be killed.
        seconds: search and proof together.
    """

    driver: DriverId
    known: KnownOffset
    tries: int
    crashed: int
    timed_out: int
    seconds: float

    @property
    def table_line(self) -> str:
        """The line to contribute to the table in ``bullet_graph/partition/offsets.py``."""
        return offsets.table_line(self.driver, self.known)


RunChild = Callable[[Attempt], Outcome]


def run_child(attempt: Attempt, *, timeout_s: float = TIMEOUT_S, bootstrap: str = BOOTSTRAP) -> Outcome:
    """Try one offset in a process of its own; never raises for what the process does.

    Args:
        attempt: what to try.
        timeout_s: after which the process is killed.
        bootstrap: the Python program to run, with the package's folder and the attempt as arguments.
    """
    package = str(Path(__file__).parents[1])
    command = [sys.executable, "-P", "-c", bootstrap, package, attempt.to_json()]
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
    candidates: Sequence[int] = CANDIDATES,
    layout: MaskLayout = MaskLayout.BITS_128,
    jobs: int = JOBS,
    run_child: RunChild = run_child,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Find the one offset at which a mask acts, and prove it. About a minute; the GPU should be idle.

    Args:
        driver: of this machine; by default it is asked for.
        candidates: offsets to try, all of them: a second one that acts must not go unseen.
        layout: of the mask.
        jobs: children at a time; each takes about half a GiB of GPU memory.
        run_child: tries one offset.
        progress: called with (tries done, tries in all) after each try.

    Raises:
        PartitionError: there is no driver or GPU, no offset acts or several do, or the proof failed.
    """
    started = time.monotonic()
    driver = driver or identify_driver()
    _look_around(run_child(Attempt(candidates[0], layout, seeds=())))
    attempts = [Attempt(offset, layout, SEARCH_SEEDS) for offset in candidates]
    outcomes = _second_chance(_search(attempts, jobs, run_child, progress), run_child)
    found = [outcome.attempt.offset for outcome in outcomes if outcome.verdict is Verdict.HONOURED]
    if len(found) != 1:
        raise PartitionError(
            f"exactly one offset must make the driver {driver.release} honour a mask, but found "
            f"{', '.join(map(hex, sorted(found))) or 'none'} ({_summary(outcomes)}): let the GPU be idle and try "
            "again; if that changes nothing, use --partition-backend green"
        )
    for seeds in PROOF_SEEDS:
        _prove(run_child(Attempt(found[0], layout, seeds)))
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    return Calibration(
        driver=driver,
        known=KnownOffset(found[0], layout),
        tries=len(outcomes),
        crashed=verdicts[Verdict.CRASHED],
        timed_out=verdicts[Verdict.TIMED_OUT],
        seconds=time.monotonic() - started,
    )


def remember(calibration: Calibration, path: Path | None = None) -> Path:
    """Keep the offset for this driver on this machine; returns the file.

    Raises:
        PartitionError: the file is there and corrupt, or cannot be written.
    """
    return offsets.remember(calibration.driver, calibration.known, path)


def _report_of(child: subprocess.CompletedProcess[str]) -> tuple[Verdict, str]:
    if child.returncode < 0:
        return Verdict.CRASHED, signal.strsignal(-child.returncode) or f"signal {-child.returncode}"
    try:
        # The last line: the driver may have written to the same stream before.
        verdict, detail = json.loads(child.stdout.splitlines()[-1])
        return Verdict(verdict), str(detail)
    except (IndexError, TypeError, ValueError):
        return Verdict.CRASHED, f"exit status {child.returncode}, no verdict: {child.stderr[-500:].strip()}"


def _search(
    attempts: Sequence[Attempt], jobs: int, run_child: RunChild, progress: Callable[[int, int], None] | None
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    pool = ThreadPoolExecutor(jobs)
    try:
        for future in as_completed([pool.submit(run_child, attempt) for attempt in attempts]):
            outcomes.append(future.result())
            if progress is not None:
                progress(len(outcomes), len(attempts))
    finally:
        pool.shutdown(cancel_futures=True)
    return outcomes


def _second_chance(outcomes: Sequence[Outcome], run_child: RunChild) -> list[Outcome]:
    """Try again, alone, what may have failed for another child's sake: memory was short, or a fault spread."""
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


def _look_around(outcome: Outcome) -> None:
    """Before anything is written: a child must work at all, else every try would fail for the same reason."""
    if outcome.verdict is not Verdict.HONOURED:
        raise PartitionError(
            f"a child process must reach all SMs of the GPU before offsets can be tried, but it {outcome.verdict} "
            f"({outcome.detail}): see to that first"
        )


def _prove(outcome: Outcome) -> None:
    if outcome.verdict is not Verdict.HONOURED:
        raise PartitionError(
            f"offset 0x{outcome.attempt.offset:x} must hold for other masks in a fresh process, but that "
            f"{outcome.verdict} ({outcome.detail}): let the GPU be idle and try again"
        )


def _summary(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(outcome.verdict for outcome in outcomes)
    return f"{len(outcomes)} tried; " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
