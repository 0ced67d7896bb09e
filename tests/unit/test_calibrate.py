"""Calibration with children that crash, hang and disagree; and one child over a fake libcuda."""

import ctypes
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import DEFAULT, Mock, patch

import pytest
from fakes.fake_driver import FakeDriver, fake_probe
from fakes.fake_streams import OBJECT_BYTES, RELEASE, FakeLibcuda, object_address, object_bytes
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph import _smctrl
from bullet_graph.errors import PartitionError
from bullet_graph.partition import calibrate as calibrate_module
from bullet_graph.partition import offsets
from bullet_graph.partition.calibrate import (
    BOOTSTRAP,
    CANDIDATES,
    PROOF_SEEDS,
    SEARCH_SEEDS,
    Calibration,
    Outcome,
    Verdict,
    calibrate,
    honours,
    judge,
    run_child,
    trial_mask,
    uses_exactly,
)
from bullet_graph.partition.offsets import KNOWN_OFFSETS, DriverId, cache_file, lookup, remember, remembered
from bullet_graph.partition.probe import SmidProbe
from bullet_graph.partition.smctrl import register

DRIVER = DriverId(13990, RELEASE, "x86_64")
OFFSET = 0x51C
AROUND = 0x300, ()


class FakeChildren:
    """Answers by offset; what is not listed has no effect. A list is used up, one verdict a try."""

    def __init__(self, verdicts: Mapping[int, Verdict | list[Verdict]]) -> None:
        self._verdicts = verdicts
        self._lock = threading.Lock()
        self.attempts: list[tuple[int, tuple[int, ...]]] = []

    def __call__(self, offset: int, seeds: tuple[int, ...]) -> Outcome:
        with self._lock:
            self.attempts.append((offset, seeds))
            if not seeds:
                return Outcome(Verdict.HONOURED)
            verdict = self._verdicts.get(offset, Verdict.NO_EFFECT)
            return Outcome(verdict.pop(0) if isinstance(verdict, list) else verdict, "what it said")


def calibrated_with(
    run: Callable[..., Outcome], *, driver: DriverId = DRIVER, advance: Callable[[int], object] = id
) -> Calibration:
    """A calibration of this driver, with a function in place of the child processes."""
    with patch.multiple(calibrate_module, run_child=run, identify_driver=lambda: driver):
        return calibrate(advance=advance)


def test_the_one_offset_is_found_and_proven() -> None:
    children = FakeChildren(
        {OFFSET: Verdict.HONOURED, 0x300: Verdict.CRASHED, 0x304: Verdict.CRASHED, 0x900: Verdict.TIMED_OUT}
    )
    seen: list[int] = []
    found = calibrated_with(children, advance=seen.append)
    assert (found.driver, found.offset) == (DRIVER, OFFSET)
    assert (found.tries, found.crashed, found.timed_out) == (385, 2, 1)
    assert found.seconds > 0
    assert seen == [1] * 385
    assert children.attempts[0] == AROUND
    assert sorted(offset for offset, _ in children.attempts[1:386]) == list(CANDIDATES)
    assert children.attempts[386:] == [(OFFSET, seeds) for seeds in PROOF_SEEDS]


def test_the_line_to_contribute_is_a_line_of_the_table() -> None:
    found = calibrated_with(FakeChildren({OFFSET: Verdict.HONOURED}), driver=DriverId(13000, RELEASE, "x86_64"))
    line, comment = found.table_line.split("  # ")
    assert comment == f"calibrated on {RELEASE}"
    assert f"        {line}\n" in Path(offsets.__file__).read_text(encoding="utf-8")


NOT_HONOURED = [verdict for verdict in Verdict if verdict is not Verdict.HONOURED]


@pytest.mark.parametrize(
    ("verdicts", "message"),
    [
        (
            {0x300: Verdict.CRASHED, 0x400: Verdict.TIMED_OUT, 0x500: Verdict.CUDA_ERROR},
            rf"driver {RELEASE} .* but found none \(385 tried; (?=.*1 crashed)(?=.*382 did not honour)"
            r"(?=.*1 timed out)(?=.*1 failed a CUDA call)",
        ),
        ({0x600: Verdict.HONOURED, OFFSET: Verdict.HONOURED}, r"exactly one .* but found 0x51c, 0x600 \("),
        # An offset that cannot be tried may be the second one.
        ({OFFSET: Verdict.HONOURED, 0x600: Verdict.NOT_TRIED}, r"to be tried, but 0x600 was not \(what it"),
        *(
            ({OFFSET: [Verdict.HONOURED] * (1 + proofs_held) + [verdict]}, f"0x51c must .* {verdict} .what it said.")
            for verdict in NOT_HONOURED
            for proofs_held in (0, 1)
        ),
    ],
)
def test_no_offset_is_proven(verdicts: Mapping[int, Verdict | list[Verdict]], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        calibrated_with(FakeChildren(verdicts))


@pytest.mark.parametrize("verdict", [Verdict.CUDA_ERROR, Verdict.NOT_TRIED])
def test_what_may_be_another_childs_fault_is_tried_again(verdict: Verdict) -> None:
    assert calibrated_with(FakeChildren({OFFSET: [verdict] + [Verdict.HONOURED] * 3})).offset == OFFSET


@pytest.mark.parametrize("verdict", NOT_HONOURED)
def test_nothing_is_tried_where_a_child_cannot_work(verdict: Verdict) -> None:
    run = Mock(return_value=Outcome(verdict, "no GPU"))
    with pytest.raises(PartitionError, match=rf"reach all SMs .* {verdict} \(no GPU\)"):
        calibrated_with(run)
    run.assert_called_once_with(*AROUND)


def test_an_error_of_our_own_ends_the_search() -> None:
    run = Mock(side_effect=chain([Outcome(Verdict.HONOURED)], repeat(OSError("cannot start a process"))))
    with pytest.raises(OSError, match="cannot start"):
        calibrated_with(run)


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
        ("import json, sys; print(json.dumps(['crashed', sys.argv[2]]))", Verdict.CRASHED, "[1308, [1, 2]]"),
        ("""print('["honoured the masks", ""]')""", Verdict.HONOURED, ""),
    ],
)
def test_how_a_child_ends(program: str, verdict: Verdict, detail: str) -> None:
    outcome = run_child(1308, (1, 2), bootstrap=program)
    assert outcome.verdict == verdict
    assert detail in outcome.detail


def test_a_child_that_hangs_is_killed() -> None:
    outcome = run_child(*AROUND, timeout_s=0.2, bootstrap="import time; time.sleep(60)")
    assert outcome == Outcome(Verdict.TIMED_OUT, "killed after 0.2 s")


def test_the_real_child_does_without_torch_and_reports() -> None:
    start, _ = BOOTSTRAP.split("child_main(sys.argv[2])")
    program = f"{start}import json; print(json.dumps(['crashed', str('torch' in sys.modules)]))"
    assert run_child(*AROUND, bootstrap=program).detail == "False"
    # Without a seed it writes nothing, so this is harmless where there is a GPU.
    outcome = run_child(*AROUND)
    assert outcome.verdict in (Verdict.NOT_TRIED, Verdict.HONOURED), outcome
    assert outcome.verdict is Verdict.HONOURED or "cuda" in outcome.detail.lower()


# One try


@pytest.fixture(scope="module")
def probe(libcuda: FakeLibcuda) -> SmidProbe:
    return fake_probe(FakeDriver(libcuda=libcuda, mask_offset=OFFSET))


@pytest.fixture(scope="module")
def stream(probe: SmidProbe) -> Iterator[int]:
    stream = probe.driver.create_stream()
    register(stream)
    yield stream
    _smctrl.forget_stream(stream)


@pytest.mark.parametrize("seeds", [SEARCH_SEEDS, PROOF_SEEDS[0]])
def test_of_all_offsets_only_the_right_one_is_honoured(probe: SmidProbe, stream: int, seeds: tuple[int, ...]) -> None:
    assert [offset for offset in CANDIDATES if honours(offset, seeds, probe, stream)] == [OFFSET]


@given(offset=st.sampled_from(CANDIDATES), fill=st.integers(0, 255))
def test_the_memory_is_left_as_it_was(probe: SmidProbe, stream: int, offset: int, fill: int) -> None:
    ctypes.memset(object_address(stream), fill, OBJECT_BYTES)
    before = object_bytes(stream)
    with suppress(PartitionError):  # a mask may leave the stream no SM
        honours(offset, SEARCH_SEEDS, probe, stream)
    assert object_bytes(stream) == before


@given(seed=st.integers(0, 1000), num_tpcs=st.integers(1, 128))
def test_trial_masks_are_masks_and_the_proof_has_its_own(seed: int, num_tpcs: int) -> None:
    assert len({trial_mask(seed, 66).bits for seeds in (SEARCH_SEEDS, *PROOF_SEEDS) for seed in seeds}) == 8
    mask = trial_mask(seed, num_tpcs)
    assert mask.num_tpcs == num_tpcs
    assert mask.bits.bit_count() == max(1, num_tpcs // 3)
    assert mask == trial_mask(seed, num_tpcs)


EXACT: list[tuple[list[set[int]], int]] = [([{0, 1}], 1), ([{0}, {1}], 2), ([{0}, {0}, {0, 1}], 3)]
OTHERS = [([{0}, {0}, {0}, {1}], 3), ([{0, 1, 2}], 1), ([{0, 2}, {1}], 2), ([set(), set(), set()], 3)]


@pytest.mark.parametrize(("exactly", "seen", "runs"), [(of is EXACT, *case) for of in (EXACT, OTHERS) for case in of])
def test_an_sm_may_be_missed_but_not_added(seen: list[set[int]], exactly: bool, runs: int) -> None:
    script = iter(map(frozenset, seen))
    assert uses_exactly(frozenset({0, 1}), cast(SmidProbe, SimpleNamespace(run=lambda _: next(script))), 0) is exactly
    assert len(list(script)) == len(seen) - runs


FAILED = PartitionError("cuLaunchKernel failed")


@pytest.mark.parametrize(
    ("offset", "runs", "verdict", "detail"),
    [
        (OFFSET, None, Verdict.HONOURED, ""),
        (OFFSET + 4, None, Verdict.NO_EFFECT, ""),
        (OFFSET, [FAILED], Verdict.NOT_TRIED, "cuLaunchKernel failed"),
        (OFFSET, [DEFAULT, FAILED], Verdict.CUDA_ERROR, "cuLaunchKernel failed"),
        (
            OFFSET,
            [frozenset(range(100))] * 9,
            Verdict.NOT_TRIED,
            "a stream without a mask does not reach all of the 132 SMs",
        ),
    ],
    ids=["right", "wrong", "no first launch", "a launch fails", "a GPU that others use"],
)
def test_verdicts(
    probe: SmidProbe,
    monkeypatch: pytest.MonkeyPatch,
    offset: int,
    runs: list[object] | None,
    verdict: Verdict,
    detail: str,
) -> None:
    monkeypatch.setattr(calibrate_module, "SmidProbe", lambda: probe)
    monkeypatch.setattr(probe, "run", Mock(wraps=probe.run, side_effect=runs))
    assert judge(offset, SEARCH_SEEDS) == Outcome(verdict, detail)
    assert not any(object_bytes(list(probe.driver.api.streams)[-1]))


def test_the_child_prints_its_verdict_and_leaves(
    probe: SmidProbe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate_module, "SmidProbe", lambda: probe)
    monkeypatch.setattr(calibrate_module.resource, "setrlimit", limit := Mock())
    monkeypatch.setattr(calibrate_module.os, "_exit", leave := Mock())
    calibrate_module.child_main(json.dumps([OFFSET, SEARCH_SEEDS]))
    assert json.loads(capsys.readouterr().out) == ["honoured the masks", ""]
    limit.assert_called_once_with(calibrate_module.resource.RLIMIT_CORE, (0, 0))
    leave.assert_called_once_with(0)


# ---- the table of known offsets, and the file of those proven on this machine ----


KNOWN_DRIVER = DriverId(13000, "580.159.04", "x86_64")
KNOWN = 0x51C
ENTRY = asdict(KNOWN_DRIVER) | {"offset": KNOWN}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "partition_offsets.json"


def test_the_table() -> None:
    for cuda_version, machine, offset in (
        *((12000, "x86_64", 0x4CC), (12040, "x86_64", 0x4AC), (13000, "x86_64", KNOWN)),
        *((13010, "x86_64", None), (13000, "aarch64", None)),
    ):
        assert lookup(DriverId(cuda_version, "any", machine)) == offset
    assert set(KNOWN_OFFSETS.values()) <= set(CANDIDATES), "a calibration could find them"


def test_an_offset_is_remembered_for_exactly_its_driver(path: Path) -> None:
    assert remembered(KNOWN_DRIVER, path) is None
    remember(KNOWN_DRIVER, 0x600, path)
    assert remember(KNOWN_DRIVER, KNOWN, path) == path
    assert remembered(KNOWN_DRIVER, path) == KNOWN, "a newer calibration replaces the older"
    for change in ({"cuda_version": 13010}, {"release": "580.159.05"}, {"machine": "aarch64"}):
        assert remembered(replace(KNOWN_DRIVER, **change), path) is None  # type: ignore[arg-type]
    assert os.listdir(path.parent) == [path.name]


@given(
    entries=st.dictionaries(
        st.builds(DriverId, st.integers(11000, 99990), st.text(max_size=9), st.text(max_size=9)),
        st.integers(0, 1000).map(lambda words: 4 * words),
        max_size=4,
    )
)
def test_every_driver_has_its_own_entry(tmp_path_factory: pytest.TempPathFactory, entries: dict[DriverId, int]) -> None:
    path = tmp_path_factory.mktemp("cache") / "offsets.json"
    for driver, known in entries.items():
        remember(driver, known, path)
    assert {driver: remembered(driver, path) for driver in entries} == entries
    assert remembered(DriverId(1, "none", "none"), path) is None


def test_the_file_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file() == tmp_path / "bullet_graph" / "partition_offsets.json"
    assert remember(KNOWN_DRIVER, KNOWN) == cache_file()
    assert remembered(KNOWN_DRIVER) == KNOWN


WRONG_FIELDS = [{"cuda_version": "13000"}, {"release": 580}, {"machine": None}]
WRONG_FIELDS += [{"offset": offset} for offset in ("0x51c", 1308.0, True, 0x51D, -4)]


@pytest.mark.parametrize(
    "text",
    [
        *("", b"\xff\xfe\x00", '[{"cuda_ver', "{}", "null", "[5]"),
        *(json.dumps([{k: v for k, v in ENTRY.items() if k != name}]) for name in ENTRY),
        *(json.dumps([ENTRY | wrong]) for wrong in WRONG_FIELDS),
    ],
)
def test_a_corrupt_file_is_never_trusted(path: Path, text: str | bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = path.read_bytes()
    for access in (lambda: remembered(KNOWN_DRIVER, path), lambda: remember(KNOWN_DRIVER, KNOWN, path)):
        with pytest.raises(PartitionError, match="delete it and run `bullet-graph doctor --calibrate`") as error:
            access()
        assert str(path) in str(error.value)
    assert path.read_bytes() == before


def test_files_of_earlier_releases_have_a_layout(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(json.dumps([ENTRY | {"layout": 128}]), encoding="utf-8")
    assert remembered(KNOWN_DRIVER, path) == KNOWN


def test_files_that_cannot_be_read_or_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir(parents=True)
    with pytest.raises(PartitionError, match="cannot be used"):
        remembered(KNOWN_DRIVER, path)
    path.rmdir()
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(PartitionError, match=rf"{path}.*No space left.*make the folder writable"):
        remember(KNOWN_DRIVER, KNOWN, path)
    assert os.listdir(path.parent) == []
