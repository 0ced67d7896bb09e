"""Calibration with children that crash, hang and disagree."""

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from bullet_graph.errors import PartitionError
from bullet_graph.partition import offsets
from bullet_graph.partition.calibrate import (
    BOOTSTRAP,
    CANDIDATES,
    PROOF_SEEDS,
    SEARCH_SEEDS,
    Outcome,
    calibrate,
    run_child,
)
from bullet_graph.partition.calibrate_child import Attempt, Verdict, trial_mask
from bullet_graph.partition.offsets import DriverId

RELEASE = "999.12.34"
DRIVER = DriverId(13990, RELEASE, "x86_64")
OFFSET = 0x51C
AROUND = Attempt(0x300, seeds=())


class FakeChildren:
    """Answers by offset; what is not listed has no effect. A list is used up, one verdict a try."""

    def __init__(self, verdicts: Mapping[int, Verdict | list[Verdict]]) -> None:
        self._verdicts = verdicts
        self._lock = threading.Lock()
        self.attempts: list[Attempt] = []

    def __call__(self, attempt: Attempt) -> Outcome:
        with self._lock:
            self.attempts.append(attempt)
            if not attempt.seeds:
                return Outcome(attempt, Verdict.HONOURED)
            verdict = self._verdicts.get(attempt.offset, Verdict.NO_EFFECT)
            return Outcome(attempt, verdict.pop(0) if isinstance(verdict, list) else verdict, "what it said")


def test_the_one_offset_is_found_and_proven() -> None:
    children = FakeChildren(
        {OFFSET: Verdict.HONOURED, 0x300: Verdict.CRASHED, 0x304: Verdict.CRASHED, 0x900: Verdict.TIMED_OUT}
    )
    seen: list[tuple[int, int]] = []
    found = calibrate(driver=DRIVER, run_child=children, progress=lambda *counts: seen.append(counts))
    assert (found.driver, found.offset) == (DRIVER, OFFSET)
    assert (found.tries, found.crashed, found.timed_out) == (385, 2, 1)
    assert found.seconds > 0
    assert seen == [(i, 385) for i in range(1, 386)]
    assert children.attempts[0] == AROUND
    assert sorted(attempt.offset for attempt in children.attempts[1:386]) == list(CANDIDATES)
    assert children.attempts[386:] == [Attempt(OFFSET, seeds) for seeds in PROOF_SEEDS]


def test_the_proof_uses_masks_of_its_own() -> None:
    assert len({*SEARCH_SEEDS, *PROOF_SEEDS[0], *PROOF_SEEDS[1]}) == 8
    assert len({trial_mask(seed, 66).bits for seeds in (SEARCH_SEEDS, *PROOF_SEEDS) for seed in seeds}) == 8


def test_the_line_to_contribute_is_a_line_of_the_table() -> None:
    found = calibrate(
        driver=DriverId(13000, RELEASE, "x86_64"), run_child=FakeChildren({OFFSET: Verdict.HONOURED})
    )
    line, comment = found.table_line.split("  # ")
    assert comment == f"calibrated on {RELEASE}"
    assert f"        {line}\n" in Path(offsets.__file__).read_text(encoding="utf-8")


def test_no_offset_acts() -> None:
    children = FakeChildren({0x300: Verdict.CRASHED, 0x400: Verdict.TIMED_OUT, 0x500: Verdict.CUDA_ERROR})
    with pytest.raises(PartitionError, match=rf"driver {RELEASE} .* but found none \(385 tried") as error:
        calibrate(driver=DRIVER, run_child=children)
    for count in ("382 did not honour", "1 crashed", "1 timed out", "1 failed a CUDA call"):
        assert count in str(error.value)


def test_two_offsets_act() -> None:
    children = FakeChildren({0x600: Verdict.HONOURED, OFFSET: Verdict.HONOURED})
    with pytest.raises(PartitionError, match=r"exactly one .* but found 0x51c, 0x600 \("):
        calibrate(driver=DRIVER, run_child=children)


@pytest.mark.parametrize("verdict", [verdict for verdict in Verdict if verdict is not Verdict.HONOURED])
@pytest.mark.parametrize("proofs_held", [0, 1])
def test_an_offset_that_does_not_hold(verdict: Verdict, proofs_held: int) -> None:
    children = FakeChildren({OFFSET: [Verdict.HONOURED] * (1 + proofs_held) + [verdict]})
    with pytest.raises(PartitionError, match=f"0x51c must hold .* {verdict} .what it said."):
        calibrate(driver=DRIVER, run_child=children)


@pytest.mark.parametrize("verdict", [Verdict.CUDA_ERROR, Verdict.NOT_TRIED])
def test_what_may_be_another_childs_fault_is_tried_again(verdict: Verdict) -> None:
    children = FakeChildren({OFFSET: [verdict] + [Verdict.HONOURED] * 3})
    assert calibrate(driver=DRIVER, run_child=children).offset == OFFSET


def test_an_offset_that_cannot_be_tried_may_be_the_second_one() -> None:
    children = FakeChildren({OFFSET: Verdict.HONOURED, 0x600: Verdict.NOT_TRIED})
    with pytest.raises(PartitionError, match=r"has to be tried, but 0x600 was not \(what it said\)"):
        calibrate(driver=DRIVER, run_child=children)


@pytest.mark.parametrize("verdict", [verdict for verdict in Verdict if verdict is not Verdict.HONOURED])
def test_nothing_is_tried_where_a_child_cannot_work(verdict: Verdict) -> None:
    attempts: list[Attempt] = []

    def run(attempt: Attempt) -> Outcome:
        attempts.append(attempt)
        return Outcome(attempt, verdict, "no GPU")

    with pytest.raises(PartitionError, match=rf"reach all SMs .* {verdict} \(no GPU\)"):
        calibrate(driver=DRIVER, run_child=run)
    assert attempts == [AROUND]


def test_an_error_of_our_own_ends_the_search() -> None:
    def run(attempt: Attempt) -> Outcome:
        if attempt.seeds:
            raise OSError("cannot start a process")
        return Outcome(attempt, Verdict.HONOURED)

    with pytest.raises(OSError, match="cannot start"):
        calibrate(driver=DRIVER, run_child=run)


def test_without_a_driver_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> DriverId:
        raise PartitionError("no driver")

    monkeypatch.setattr("bullet_graph.partition.calibrate.identify_driver", no_driver)
    children = FakeChildren({})
    with pytest.raises(PartitionError, match="no driver"):
        calibrate(run_child=children)
    assert children.attempts == []


# Child processes


@pytest.mark.parametrize(
    ("program", "verdict", "detail"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", Verdict.CRASHED, "Segmentation fault"),
        # Not 32 or 33: they are the C library's own and may be swallowed.
        ("import os; os.kill(os.getpid(), 40)", Verdict.CRASHED, "signal"),
        ("import sys; sys.exit('no cuda')", Verdict.CRASHED, "exit status 1, no verdict: no cuda"),
        ("", Verdict.CRASHED, "exit status 0, no verdict"),
        ("print('hello')", Verdict.CRASHED, "no verdict"),
        ("print('[5]')", Verdict.CRASHED, "no verdict"),
        ("""print('["unheard of", ""]')""", Verdict.CRASHED, "no verdict"),
        ("""print('noise\\n["crashed", "x"]')""", Verdict.CRASHED, "x"),
        ("""print('["honoured the masks", ""]')""", Verdict.HONOURED, ""),
    ],
)
def test_how_a_child_ends(program: str, verdict: Verdict, detail: str) -> None:
    outcome = run_child(AROUND, bootstrap=program)
    assert (outcome.attempt, outcome.verdict) == (AROUND, verdict)
    assert detail in outcome.detail


def test_a_child_that_hangs_is_killed() -> None:
    outcome = run_child(AROUND, timeout_s=0.2, bootstrap="import time; time.sleep(60)")
    assert outcome == Outcome(AROUND, Verdict.TIMED_OUT, "killed after 0.2 s")


def test_a_child_gets_its_attempt() -> None:
    attempt = Attempt(0x51C, (1, 2))
    program = "import json, sys; print(json.dumps(['crashed', sys.argv[2]]))"
    assert Attempt.from_json(run_child(attempt, bootstrap=program).detail) == attempt


def test_the_real_child_does_without_torch() -> None:
    start, _ = BOOTSTRAP.split("main(sys.argv[2])")
    program = f"{start}import json; print(json.dumps(['crashed', str('torch' in sys.modules)]))"
    assert run_child(AROUND, bootstrap=program).detail == "False"


def test_the_real_child_reports() -> None:
    # Without a seed it writes nothing, so this is harmless where there is a GPU.
    outcome = run_child(AROUND)
    assert outcome.verdict in (Verdict.NOT_TRIED, Verdict.HONOURED), outcome
    assert outcome.verdict is Verdict.HONOURED or "cuda" in outcome.detail.lower()
