"""One try of a calibration, over a fake libcuda."""

import json
from collections.abc import Callable, Iterator
from typing import cast

import pytest
from fakes.fake_streams import FakeDriver, FakeLibcuda, FakeProbe, object_bytes
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph.errors import PartitionError
from bullet_graph.partition import calibrate_child
from bullet_graph.partition.calibrate import CANDIDATES, PROOF_SEEDS, SEARCH_SEEDS
from bullet_graph.partition.calibrate_child import Attempt, Verdict, honours, judge, trial_mask, uses_exactly
from bullet_graph.partition.probe import SmidProbe

OFFSET = 0x51C


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> FakeLibcuda:
    return FakeLibcuda(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture
def probe(libcuda: FakeLibcuda) -> FakeProbe:
    return FakeProbe(FakeDriver(libcuda), offset=OFFSET)


def honoured_at(offset: int, probe: FakeProbe, stream: int, seeds: tuple[int, ...] = SEARCH_SEEDS) -> bool:
    return honours(Attempt(offset, seeds), cast(SmidProbe, probe), stream)


def test_of_all_offsets_only_the_right_one_is_honoured(libcuda: FakeLibcuda, probe: FakeProbe) -> None:
    stream = libcuda.stream()
    assert [offset for offset in CANDIDATES if honoured_at(offset, probe, stream)] == [OFFSET]
    assert [offset for offset in CANDIDATES if honoured_at(offset, probe, stream, PROOF_SEEDS[0])] == [OFFSET]


@given(offset=st.sampled_from(CANDIDATES), fill=st.integers(0, 255))
def test_the_memory_is_left_as_it_was(libcuda: FakeLibcuda, offset: int, fill: int) -> None:
    probe = FakeProbe(FakeDriver(libcuda), offset=OFFSET)
    stream = libcuda.stream(fill=fill)
    before = object_bytes(stream)
    honoured_at(offset, probe, stream)
    assert object_bytes(stream) == before


@given(seed=st.integers(0, 1000), num_tpcs=st.integers(1, 128))
def test_trial_masks_are_masks(seed: int, num_tpcs: int) -> None:
    mask = trial_mask(seed, num_tpcs)
    assert mask.num_tpcs == num_tpcs
    assert mask.bits.bit_count() == max(1, num_tpcs // 3)
    assert mask == trial_mask(seed, num_tpcs)


class ScriptedProbe:
    """Sees what the script says, then fails."""

    def __init__(self, seen: Iterator[frozenset[int]]) -> None:
        self._seen = seen
        self.runs = 0

    def run(self, stream: int) -> frozenset[int]:  # noqa: ARG002
        self.runs += 1
        return next(self._seen)


@pytest.mark.parametrize(
    ("seen", "exactly", "runs"),
    [
        ([{0, 1}], True, 1),
        ([{0}, {1}], True, 2),
        ([{0}, {0}, {0, 1}], True, 3),
        ([{0}, {0}, {0}, {1}], False, 3),
        ([{0, 1, 2}], False, 1),
        ([{0, 2}, {1}], False, 2),
        ([set(), set(), set()], False, 3),
    ],
)
def test_an_sm_may_be_missed_but_not_added(seen: list[set[int]], exactly: bool, runs: int) -> None:
    probe = ScriptedProbe(frozenset(sms) for sms in seen)
    assert uses_exactly(frozenset({0, 1}), cast(SmidProbe, probe), 0) is exactly
    assert probe.runs == runs


@pytest.mark.parametrize(("offset", "verdict"), [(OFFSET, Verdict.HONOURED), (OFFSET + 4, Verdict.NO_EFFECT)])
def test_verdicts(probe: FakeProbe, monkeypatch: pytest.MonkeyPatch, offset: int, verdict: Verdict) -> None:
    monkeypatch.setattr(calibrate_child, "SmidProbe", lambda: probe)
    assert judge(Attempt(offset, SEARCH_SEEDS)) == (verdict, "")


def test_a_gpu_that_others_use_is_not_tried(probe: FakeProbe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_child, "SmidProbe", lambda: probe)
    monkeypatch.setattr(probe, "run", lambda _: frozenset(range(100)))
    verdict, detail = judge(Attempt(OFFSET, SEARCH_SEEDS))
    assert verdict is Verdict.NOT_TRIED
    assert "132 SMs" in detail


def failing_after(runs: int, probe: FakeProbe) -> Callable[[int], frozenset[int]]:
    remaining = iter(range(runs))

    def run(stream: int) -> frozenset[int]:
        if next(remaining, None) is None:
            raise PartitionError("cuLaunchKernel returned CUDA_ERROR_LAUNCH_FAILED")
        return FakeProbe.run(probe, stream)

    return run


@pytest.mark.parametrize(("runs", "verdict"), [(0, Verdict.NOT_TRIED), (1, Verdict.CUDA_ERROR)])
def test_a_cuda_call_fails(
    probe: FakeProbe, monkeypatch: pytest.MonkeyPatch, runs: int, verdict: Verdict
) -> None:
    monkeypatch.setattr(calibrate_child, "SmidProbe", lambda: probe)
    monkeypatch.setattr(probe, "run", failing_after(runs, probe))
    assert judge(Attempt(OFFSET, SEARCH_SEEDS)) == (
        verdict,
        "cuLaunchKernel returned CUDA_ERROR_LAUNCH_FAILED",
    )
    (stream,) = probe.driver.streams
    assert not any(object_bytes(stream))


def test_the_child_prints_its_verdict_and_leaves(
    probe: FakeProbe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: list[object] = []
    statuses: list[int] = []
    monkeypatch.setattr(calibrate_child, "SmidProbe", lambda: probe)
    monkeypatch.setattr(calibrate_child.resource, "setrlimit", lambda *limit: limits.append(limit))
    monkeypatch.setattr(calibrate_child.os, "_exit", statuses.append)
    calibrate_child.main(Attempt(OFFSET, SEARCH_SEEDS).to_json())
    assert json.loads(capsys.readouterr().out) == ["honoured the masks", ""]
    assert limits == [(calibrate_child.resource.RLIMIT_CORE, (0, 0))]
    assert statuses == [0]
