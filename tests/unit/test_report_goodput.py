"""Ratios of goodputs, and the verdicts on them, from made-up searches."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from result_files import (
    AUTO,
    CONV,
    LONGDOC,
    MIXED,
    SLO,
    VLLM_512,
    VLLM_2048,
    make_run,
    search,
    searched,
    write_sweep,
)

from bench.reporting.evidence import read_evidence
from bench.reporting.tables import target_table
from bench.reporting.targets import TARGETS, Verdict, judge
from bullet_graph.cli.bench.sweep_file import CellKey, SweepCell

GOOD, BAD = 0.95, 0.6


def verdict(folder: Path, name: str = "goodput, conv") -> Verdict:
    target = next(target for target in TARGETS if target.name.startswith(name))
    return judge(read_evidence(folder), [target])[0]


def judged(folder: Path, cells: Sequence[SweepCell], **settings: Any) -> tuple[str, str]:
    """Verdict on conv, which wants 1.15, and the figure as the report shows it."""
    write_sweep(folder / "peers.json", [search(AUTO, 23.0, {23.0: GOOD, 27.0: BAD}), *cells], **settings)
    found = verdict(folder)
    return found.word, target_table([found])[3].split(" | ")[2]


@pytest.mark.parametrize(("own", "word"), [(23.0, "met"), (22.9, "missed"), (None, "missed")])
def test_a_goodput_is_compared_with_the_best_peer_setting(
    tmp_path: Path, own: float | None, word: str
) -> None:
    # The first peer is not the best, and this engine's best setting is not the one that is claimed.
    write_sweep(
        tmp_path / "peers_conv.json", searched({VLLM_512: 10.0, AUTO: own, MIXED: 99.0, VLLM_2048: 20.0})
    )
    found = verdict(tmp_path, "goodput, conv")
    assert found.word == word
    assert found.figure is not None
    assert found.figure.value == pytest.approx((own or 0.0) / 20.0)
    assert VLLM_2048 in found.figure.detail
    assert verdict(tmp_path, "goodput, code").word == "not measured"


def test_a_goodput_tells_p99_of_ttft(tmp_path: Path) -> None:
    write_sweep(tmp_path / "peers.json", searched({AUTO: 30.0, VLLM_512: 20.0}, p99_ttft_ms=4321.0))
    figure = verdict(tmp_path, "goodput, conv").figure
    assert figure is not None
    assert "p99 of TTFT there 4,321.0 against 4,321.0 ms" in figure.detail


@pytest.mark.parametrize(
    ("goodputs", "settings", "reason"),
    [
        ({AUTO: 9.0}, {}, "no peer"),
        ({VLLM_512: 9.0, MIXED: 9.0}, {}, "no bullet_graph auto"),
        ({AUTO: None, VLLM_512: None}, {}, "neither this engine nor a peer"),
        ({AUTO: 9.0, VLLM_512: 9.0}, {"attainment": 0.5}, "its attainment is 0.5"),
        ({AUTO: 9.0, VLLM_512: 9.0}, {"rates": [9.0]}, ""),
        ({AUTO: 9.0, VLLM_512: 9.0}, {"all_at_once": True}, ""),
        ({AUTO: 9.0, VLLM_512: 9.0}, {"model": "qwen3-8b"}, ""),
    ],
)
def test_no_goodput_is_made_of_other_files(
    tmp_path: Path, goodputs: dict[str, float | None], settings: dict[str, Any], reason: str
) -> None:
    write_sweep(tmp_path / "peers.json", searched(goodputs), **settings)
    found = verdict(tmp_path, "goodput, conv")
    assert found.word == "not measured"
    assert reason in "; ".join(found.reasons)
    assert bool(found.reasons) == bool(reason)


def test_an_unfinished_search_of_any_peer_is_no_evidence(tmp_path: Path) -> None:
    cells = searched({AUTO: 30.0, VLLM_512: 20.0})
    cells.append(SweepCell(CellKey(VLLM_2048, CONV, 600, SLO), None, False, (make_run(25.0),)))
    write_sweep(tmp_path / "peers.json", cells, finished=False)
    found = verdict(tmp_path, "goodput, conv")
    assert found.word == "not measured"
    assert found.reasons == (f"peers.json: the search of {VLLM_2048} is not finished",)


@pytest.mark.parametrize(
    ("own", "word", "shown"),
    [
        # 24 / 20 = 1.2 is enough, whatever the searches would find yet.
        ({24.0: GOOD}, "met", "at least 1.200× (against the next rate tried, 20/s; the search of"),
        # The limit itself, but for the last bit of a quotient; and a hair more, which is to be seen.
        ({math.nextafter(23.0, 24.0): GOOD}, "met", "at least 1.150× ("),
        ({23.002: GOOD}, "met", "at least 1.1501× ("),
        (
            {20.0: GOOD, 30.0: BAD},
            "open",
            "at least 1.000× (against the next rate tried, 20/s; the search of",
        ),
    ],
)
def test_searches_that_were_cut_give_a_bound(
    tmp_path: Path, own: dict[float, float], word: str, shown: str
) -> None:
    cut = [
        dataclasses.replace(cell, goodput=None, finished=False)
        for cell in (search(AUTO, None, own), search(VLLM_512, None, {16.0: GOOD, 20.0: BAD}))
    ]
    write_sweep(tmp_path / "peers.json", cut, finished=False)
    found = verdict(tmp_path)
    assert found.word == word
    assert found.figure is not None
    assert f"against 16/s ({VLLM_512})" in found.figure.detail
    assert target_table([found])[3].split(" | ")[2].startswith(shown)


@pytest.mark.parametrize(
    ("peer", "word", "shown"),
    [
        # 20.8 is within 5 % of 20: closed, so 23 / 20.
        ({20.0: GOOD, 20.8: BAD}, "met", "1.150×"),
        ({20.0: GOOD, 21.0: BAD}, "met", "1.150×"),
        # 21.1 is not: 23 / 21.1 = 1.090.
        ({20.0: GOOD, 21.1: BAD}, "open", "1.150× (1.090× against the next rate tried, 21.1/s)"),
        # 23 / 16 = 1.4375; 23 / 20 is the limit itself; 23 / 20.1 = 1.144.
        ({16.0: GOOD, 20.0: BAD}, "met", "1.438× (1.150× against the next rate tried, 20/s)"),
        ({16.0: GOOD, 20.1: BAD}, "open", "1.438× (1.144× against the next rate tried, 20.1/s)"),
        # 23 / 21 = 1.095 already misses.
        ({21.0: GOOD, 25.0: BAD}, "missed", "1.095× (0.920× against the next rate tried, 25/s)"),
        # The lowest bad rate above the goodput counts, not one below it.
        (
            {12.0: BAD, 16.0: GOOD, 30.0: BAD, 20.0: BAD},
            "met",
            "1.438× (1.150× against the next rate tried, 20/s)",
        ),
        # No rate was too fast.
        ({16.0: GOOD}, "open", f"1.438× (no bound: the search of {VLLM_512} is open above)"),
        ({21.0: GOOD}, "missed", f"1.095× (no bound: the search of {VLLM_512} is open above)"),
        # At no rate enough: 23 / 20 at least.
        (
            {30.0: BAD, 20.0: BAD},
            "met",
            "at least 1.150× (no peer setting served enough at any rate tried, down to 20/s)",
        ),
        (
            {30.0: BAD, 23.0: BAD},
            "open",
            "at least 1.000× (no peer setting served enough at any rate tried, down to 23/s)",
        ),
    ],
)
def test_a_peer_is_judged_by_what_its_search_ruled_out(
    tmp_path: Path, peer: dict[float, float], word: str, shown: str
) -> None:
    goodput = max((rate for rate, share in peer.items() if share == GOOD), default=None)
    assert judged(tmp_path, [search(VLLM_512, goodput, peer)]) == (word, shown)


def test_the_highest_upper_end_of_all_settings_counts(tmp_path: Path) -> None:
    # 512 has the higher goodput, 2,048 the wider bracket; it was given up at a rate where 512 served enough.
    best = search(VLLM_512, 16.0, {16.0: GOOD, 18.0: BAD})
    wide = search(VLLM_2048, 12.0, {12.0: GOOD, 20.0: BAD})
    shown = f"1.438× (1.150× against the next rate tried, 20/s by {VLLM_2048})"
    assert judged(tmp_path, [best, wide], best_peer_only=True) == ("met", shown)
    given_up = search(VLLM_2048, None, {16.0: BAD})
    assert judged(tmp_path, [best, given_up], best_peer_only=True) == (
        "met",
        "1.438× (1.278× against the next rate tried, 18/s)",
    )
    # With no goodput at all, the highest of the lowest rates tried.
    none = [search(VLLM_512, None, {20.0: BAD, 17.0: BAD}), search(VLLM_2048, None, {18.4: BAD, 30.0: BAD})]
    assert judged(tmp_path, none)[1].startswith("at least 1.250× ")
    open_above = search(VLLM_2048, 12.0, {12.0: GOOD})
    assert judged(tmp_path, [best, open_above]) == (
        "open",
        f"1.438× (no bound: the search of {VLLM_2048} is open above)",
    )


def test_the_tolerance_is_the_searches(tmp_path: Path) -> None:
    peer = search(VLLM_512, 20.0, {20.0: GOOD, 22.0: BAD})
    assert judged(tmp_path, [peer], tolerance=0.11) == ("met", "1.150×")
    assert judged(tmp_path, [peer], tolerance=0.09)[0] == "open"
    assert judged(tmp_path, [peer], tolerance=None)[0] == "open"


def test_an_engine_that_serves_enough_at_no_rate_misses(tmp_path: Path) -> None:
    mine = search(AUTO, None, {5.0: BAD})
    write_sweep(tmp_path / "peers.json", [mine, search(VLLM_512, 16.0, {16.0: GOOD, 30.0: BAD})])
    found = verdict(tmp_path)
    assert (found.word, found.figure and found.figure.value) == ("missed", 0.0)
    write_sweep(tmp_path / "peers.json", [mine, search(VLLM_512, None, {16.0: BAD})])
    assert verdict(tmp_path).reasons == (
        "peers.json: neither this engine nor a peer served enough at any rate",
    )


def test_a_ratio_that_has_no_upper_end_is_infinite_at_best(tmp_path: Path) -> None:
    cells = [search(AUTO, 23.0, {23.0: GOOD}), search(VLLM_512, None, {20.0: BAD})]
    write_sweep(tmp_path / "peers.json", cells)
    figure = verdict(tmp_path).figure
    assert figure is not None
    assert (figure.value, figure.at_best) == (pytest.approx(1.15), math.inf)


def test_the_first_rate_of_a_search_is_a_load_of_its_own(tmp_path: Path) -> None:
    """Each search of ``synthetic:longdoc=60~3.5`` begins at 3.5/s: these runs tell p99 of ITL."""
    figures = {AUTO: {3.5: 12.0, 4.2: 90.0}, VLLM_512: {3.5: 40.0, 2.9: 1.0}, VLLM_2048: {3.5: 20.0}}
    cells = [
        SweepCell(
            CellKey(system, LONGDOC, 60, "ttft:2000ms tpot:20ms"),
            3.5,
            True,
            tuple(make_run(rate, p99_itl_ms=itl) for rate, itl in of.items()),
        )
        for system, of in figures.items()
    ]
    write_sweep(
        tmp_path / "peers_llama-3.1-8b_conv.json",
        cells,
        workloads=["synthetic:longdoc=60~3.5"],
        first_rate=3.5,
    )
    # A file of other workloads, and one of another model, have nothing to say.
    write_sweep(tmp_path / "peers_llama-3.1-8b_code.json", searched({AUTO: 3.5, VLLM_512: 3.5}))
    write_sweep(tmp_path / "peers_qwen3-8b.json", cells, model="qwen3-8b", date="2027-01-01T00:00:00+00:00")
    found = verdict(tmp_path, "p99 ITL")
    assert found.figure is not None
    assert (found.word, found.figure.value) == ("met", pytest.approx(12 / 20))
    assert found.figure.file == "peers_llama-3.1-8b_conv.json"
