"""What the report says of a work's products and attention by themselves."""

import json
from pathlib import Path
from typing import Any

import pytest
from result_files import CONV, PROVENANCE, at_load, decode, make_run, write_offline, write_sweep

from bench.reporting.bare import BareRun, bare_lines, bare_runs
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
    assert "| 256 | in turn | 14.90 | 10.3 | 690 | 1,500 | `bare_work.json` |" in text
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


def test_steps_of_the_longest_output_by_hand() -> None:
    # 10 forwards of 100 rows, 20 ms a row. 12 tokens take two steps more, of 3 s each; three rows decode in them, two
    # of the longest output and one of that with two tokens.
    run = bare_run(100, "in turn", 10, 20.0)
    assert run.with_steps_s((12, 2, 1), 3.0) == pytest.approx(20 + 2 * 3.0 - 3 * 0.02)
    # Enough forwards, no outputs, or steps that are worth their rows.
    assert run.with_steps_s((10, 2), 3.0) == 20.0
    assert run.with_steps_s((), 3.0) == 20.0
    assert run.with_steps_s((12, 2), 0.01) == 20.0


@pytest.mark.parametrize(
    ("limit_s", "verdict"),
    [
        (
            20.0,
            "**Proven** for these kernels under this cap: products and attention alone, without norms, rotation or the "
            "cache's writes, take 20.50 s (in turn, 200 rows, 690 W), and the target is 20.00 s.",
        ),
        (
            21.0,
            "**Proven** for these kernels under this cap: products and attention, and the norms, rotation and cache "
            "writes between them, take 21.50 s by themselves (in turn, with passes, 200 rows, 690 W), and the target "
            "is 21.00 s. Products and attention alone, as if all between them were free, take 20.50 s (in turn, 200 "
            "rows, 690 W).",
        ),
        (
            22.0,
            "**Not proven**: products and attention alone take 20.50 s (in turn, 200 rows, 690 W), 93.2 % of the "
            "target of 22.00 s and 91.1 % of the 22.50 s measured.",
        ),
    ],
)
def test_what_is_left_out_does_not_prove_a_limit(tmp_path: Path, limit_s: float, verdict: str) -> None:
    write_bare(
        tmp_path / "bare_work.json",
        # The fewest rows have forwards for all 12 tokens; of the others, two take 1 s each.
        row("work", "in turn", 20.5, 200, repeats=12.0),
        row("work", "in turn, with passes", 21.5, 200, repeats=12.0),
        row("work", "in turn", 19.6, 240, repeats=10.0),
        row("work", "in turn, with passes", 20.6, 240, repeats=10.0),
        row("work", "products", 15.0, 240, repeats=10.0),
    )
    evidence = read_evidence(tmp_path)
    lines = list(
        bare_lines(
            evidence, "work", frozenset(), measured_s=22.5, limit_s=limit_s, outputs=(12,), weights_s=1.0
        )
    )
    assert lines[-1] == verdict
    text = "\n".join(lines)
    # 19.6 s, 2 s more for the steps, less two rows of 2,400.
    assert "| 240 | in turn | 19.60 | 13,524 | 690 | 1,500 | `bare_work.json` | 21.58 |" in text
    assert "| 240 | products | 15.00 | 10,350 | 690 | 1,500 | `bare_work.json` | – |" in text
    assert "The longest output has 12 tokens" in text
