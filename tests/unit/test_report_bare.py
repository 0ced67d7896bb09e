"""What the report says of a work's products and attention by themselves."""

import json
from pathlib import Path
from typing import Any

import pytest
from result_files import CONV, PROVENANCE, at_load, decode, make_run, write_offline, write_sweep

from bench.reporting.bare import BareRun, Least, bare_lines, bare_runs, least_of
from bench.reporting.evidence import read_evidence
from bench.reporting.limits import limit_lines
from bench.reporting.targets import judge
from bullet_graph.errors import ConfigError


def row(part: str, name: str, seconds: float, rows: int = 2048, **changes: Any) -> dict[str, Any]:
    told = {"part": part, "name": name, "rows": rows, "seconds": seconds, "joules": 690 * seconds}
    return told | {"repeats": 800.0, "watts": 690, "mhz": 1500, "decode_rows": 100} | changes


def write_bare(path: Path, *rows: dict[str, Any], **provenance: str) -> None:
    path.write_text(json.dumps({"rows": list(rows), "provenance": PROVENANCE | provenance}))


def section(folder: Path) -> str:
    evidence = read_evidence(folder)
    return "\n".join(limit_lines(judge(evidence), evidence))


def test_a_decode_step_that_the_cap_does_not_allow(tmp_path: Path) -> None:
    write_offline(tmp_path / "offline.json", decode(256, 15.2))
    write_bare(
        tmp_path / "bare_work.json",
        # Neither alone is the whole of it.
        row("decode=256x1000", "products", 7.4e-3, 256),
        row("decode=256x1000", "side by side", 15.3e-3, 256),
        row("decode=256x1000", "in turn", 14.9e-3, 256),
        row("decode=64x1000", "in turn", 1e-3, 64),
        {"part": "warm-up", "name": "layers", "rows": 2048, "watts": 700},
    )
    text = section(tmp_path)
    assert "| 256 | 800 | in turn | 14.90 | 10.3 | 690 | 1,500 | `bare_work.json` |" in text
    assert (
        "**Proven** for these kernels under this cap: products and attention alone, without norms, rotation or the "
        "cache's writes, take 14.90 ms (in turn, 256 rows, 690 W), and the target is 14.50 ms." in text
    )


def test_a_workload_that_it_leaves_room_for(tmp_path: Path) -> None:
    runs = {"bullet_graph auto/longest-output": [make_run(1e4, all_at_once=True, duration=25.0)]}
    write_sweep(tmp_path / "peers_offline.json", at_load(runs), all_at_once=True)
    write_bare(
        tmp_path / "bare_rows.json",
        row(f"{CONV}=600", "in turn, with passes", 20.0, 1024),
        row(f"{CONV}=600", "in turn, with passes", 21.0, 4096),
    )
    text = section(tmp_path)
    assert "attention to earlier chunks is left out" in text
    # 20 of 22, and of 25.
    assert (
        "**Not proven**: products and attention alone take 20.00 s (in turn, with passes, 1,024 rows, 690 W), 90.9 % "
        "of the target of 22.00 s and 80.0 % of the 25.00 s measured." in text
    )
    write_bare(
        tmp_path / "bare_rows.json",
        row(f"{CONV}=600", "in turn", 21.5, continued_tokens=500),
        row(f"{CONV}=600", "products", 15.0, decode_rows=2048),
    )
    text = section(tmp_path)
    assert "take 21.50 s" in text
    assert "left out" not in text


def test_runs_of_the_same_card_go_before_others(tmp_path: Path) -> None:
    write_bare(tmp_path / "bare_a.json", row("work", "in turn", 2.0), device_uuid="a")
    write_bare(tmp_path / "bare_b.json", row("work", "in turn", 1.0), device_uuid="b")
    write_bare(tmp_path / "bare_c.json", row("work", "in turn", 0.5), device_name="NVIDIA H100")
    evidence = read_evidence(tmp_path)
    assert [run.seconds for run in bare_runs(evidence, "work", {"a"})] == [2.0]
    assert [run.source for run in bare_runs(evidence, "work", {"a"})] == ["`bare_a.json`, the same card"]
    # Of another card, or of one that is not known, all there are.
    assert [run.seconds for run in bare_runs(evidence, "work", {"z"})] == [1.0, 2.0]
    assert [run.seconds for run in bare_runs(evidence, "work", frozenset())] == [1.0, 2.0]
    assert bare_runs(evidence, "other", {"a"}) == []


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    write_bare(tmp_path / "bare_work.json", row("work", "in turn", 1.0, watts=None))
    with pytest.raises(ConfigError, match=r"bare_work\.json is damaged"):
        bare_runs(read_evidence(tmp_path), "work", frozenset())


def bare_run(rows: int, way: str, forwards: float, seconds: float) -> BareRun:
    return BareRun(rows, way, forwards, seconds, 690 * seconds, 690, 1500, "`bare_work.json`", True)


def test_forwards_for_the_longest_output_by_hand() -> None:
    large, middle, small = (
        bare_run(rows, "in turn", 1000 / rows, seconds) for rows, seconds in ((100, 20), (50, 22), (25, 27))
    )
    # 10, 20 and 40 forwards. Enough of them, or no outputs: the quickest.
    assert least_of([large, middle, small]) == Least(20.0, (large,))
    assert least_of([large, middle, small], 10) == Least(20.0, (large,))
    # 15 forwards: half of the work in large ones and half in middle ones would be 21 s.
    assert least_of([large, middle, small], 15) == Least(21.0, (middle, large))
    assert least_of([large, small], 15) == Least(pytest.approx(20 + 7 / 6), (small, large))
    # Of another way, forwards that are enough say nothing of this one, and where none are enough the quickest counts.
    other = bare_run(50, "side by side", 20, 30.0)
    assert least_of([large, other], 15) == Least(20.0, (large,))
    assert least_of([large, middle], 50) == Least(20.0, (large,))
    assert str(least_of([middle, large], 15)) == "in turn, 50 and 100 rows, 690 and 690 W"


@pytest.mark.parametrize(
    ("limit_s", "verdict"),
    [
        (
            20.0,
            "**Proven** for these kernels under this cap: products and attention alone, without norms, rotation or the "
            "cache's writes, take 20.50 s (in turn, 180 and 252 rows, 690 and 690 W), and the target is 20.00 s.",
        ),
        (
            21.0,
            "**Proven** for these kernels under this cap: products and attention, and the norms, rotation and cache "
            "writes between them, take 21.50 s by themselves (in turn, with passes, 180 and 252 rows, 690 and 690 W), "
            "and the target is 21.00 s. Products and attention alone, as if all between them were free, take 20.50 s "
            "(in turn, 180 and 252 rows, 690 and 690 W).",
        ),
        (
            22.0,
            "**Not proven**: products and attention alone take 20.50 s (in turn, 180 and 252 rows, 690 and 690 W), "
            "93.2 % of the target of 22.00 s and 91.1 % of the 22.50 s measured.",
        ),
    ],
)
def test_what_is_left_out_does_not_prove_a_limit(tmp_path: Path, limit_s: float, verdict: str) -> None:
    write_bare(
        tmp_path / "bare_work.json",
        # The smaller forwards come to more than the 12 tokens of the longest output, the larger ones to fewer.
        row("work", "in turn", 21.0, 180, repeats=14.0),
        row("work", "in turn", 20.0, 252, repeats=10.0),
        row("work", "in turn, with passes", 22.0, 180, repeats=14.0),
        row("work", "in turn, with passes", 21.0, 252, repeats=10.0),
        row("work", "products", 15.0, 252, repeats=10.0),
    )
    lines = list(
        bare_lines(
            read_evidence(tmp_path), "work", frozenset(), measured_s=22.5, limit_s=limit_s, num_forwards=12
        )
    )
    assert lines[-1] == verdict
    text = "\n".join(lines)
    assert "| 252 | 10 | in turn | 20.00 | 13,800 | 690 | 1,500 | `bare_work.json` |" in text
    assert "The longest output has 12 tokens" in text
