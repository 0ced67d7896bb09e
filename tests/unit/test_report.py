"""The command that writes the report, on made-up files."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from result_files import (
    AUTO,
    SLO,
    VLLM_512,
    VLLM_2048,
    at_load,
    decode,
    make_run,
    searched,
    write_offline,
    write_sweep,
)

from bench.report import main
from bench.reporting.commands import command_for
from bench.reporting.evidence import read_evidence


def report(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    settings = {
        "systems": [AUTO, VLLM_512, VLLM_2048],
        "workloads": [f"azure:conv=600~18@{SLO}"],
        "warmup_requests": 0,
        "best_peer_only": True,
    }
    write_sweep(
        folder / "peers_conv.json", searched({AUTO: 24.0, VLLM_512: 20.0, VLLM_2048: 10.0}), **settings
    )
    runs = {
        AUTO: [make_run(1e4, all_at_once=True, duration=21.25)],
        VLLM_512: [make_run(1e4, all_at_once=True)],
    }
    write_sweep(folder / "peers_offline.json", at_load(runs), all_at_once=True, one_at_a_time=True)
    write_offline(folder / "offline.json", decode(1, 4.241), decode(64, 7.0))
    (folder / "notes.json").write_text('{"what": "something else"}')
    return folder


def test_the_report_tells_it_all(results: Path, tmp_path: Path) -> None:
    output = tmp_path / "REPORT.md"
    assert report("--results", results, "--output", output).exit_code == 0
    text = output.read_text(encoding="utf-8")
    assert "Of 20 targets: 3 met, 2 missed, 0 open, 15 not measured." in text
    assert (
        "| goodput, conv (ttft:500 tpot:15, 90 %) | ≥ 1.15 × the best peer setting | 1.200× | **met** |"
        in text
    )
    assert "| decode step, batch 64, context 1,000 | ≤ 6.9 ms | 7.000 ms | **missed** |" in text
    assert "| conv, first 600, all at once | ≤ 22 s | 21.25 s | **met** |" in text
    assert "| bullet_graph auto | 24 | 1.200 | 91.0 |" in text
    assert "| vllm 0.24.0 chunk 2048 | 10 | 0.500 | 91.0 |" in text
    assert "| 0.0200 | 650 | 1,700 |" in text
    assert "**not interleaved**" in text
    assert "- p99 ITL, longdoc at 3.5/s" in text
    assert "| `engine_args.model` | `llama` |" in text
    assert "No single command writes `notes.json`" in text
    pictures = sorted(path.name for path in (tmp_path / "report").iterdir())
    assert pictures == [
        "peers_conv_goodput.svg",
        "peers_conv_rates_azure-conv-600-ttft-500ms-tpot-15ms.svg",
        "peers_conv_throughput_azure-conv-600-ttft-500ms-tpot-15ms.svg",
    ]
    assert all(f"](report/{name})" in text for name in pictures)


def test_the_same_files_make_the_same_bytes(results: Path, tmp_path: Path) -> None:
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        assert report("--results", results, "--output", tmp_path / name / "REPORT.md").exit_code == 0
        made.append({p.relative_to(tmp_path / name): p.read_bytes() for p in (tmp_path / name).rglob("*.*")})
    assert made[0] == made[1]
    assert len(made[0]) == 4


def test_check_tells_what_differs_and_writes_nothing(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Drawing takes most of a report's time.
    drawn = {
        "peers_conv.json": {
            "peers_conv_goodput.svg": b'<svg>Matplotlib v3.9.1 <g clip-path="url(#p4c322350f3)"/></svg>'
        }
    }
    monkeypatch.setattr("bench.reporting.document.draw_all", lambda _: drawn)
    output = tmp_path / "REPORT.md"
    arguments = ("--results", results, "--output", output)
    assert report(*arguments, "--check").exit_code == 1
    assert not output.exists()
    assert report(*arguments).exit_code == 0
    assert report(*arguments, "--check").exit_code == 0
    picture = tmp_path / "report" / "peers_conv_goodput.svg"
    kept = picture.read_bytes()
    picture.write_bytes(kept + b"\n")
    assert report(*arguments, "--check").exit_code == 1
    # So does another processor, of its names alone.
    picture.write_bytes(kept.replace(b"p4c322350f3", b"pdc2d5e1d8b"))
    assert report(*arguments, "--check").exit_code == 0
    picture.write_bytes(kept.replace(b"p4c322350f3", b"p4c322350f3x"))
    assert report(*arguments, "--check").exit_code == 1
    # Another release draws other bytes of the same figures.
    picture.write_bytes(kept.replace(b"v3.9.1", b"v3.10.0") + b"\n")
    assert report(*arguments, "--check").exit_code == 0
    picture.write_bytes(kept)
    (tmp_path / "report" / "old.svg").write_text("<svg/>")
    result = report(*arguments, "--check")
    assert (result.exit_code, "old.svg is of no comparison: remove it" in result.stderr) == (1, True)
    (tmp_path / "report" / "old.svg").unlink()
    write_offline(results / "offline.json", decode(1, 4.242))
    result = report(*arguments, "--check")
    assert (result.exit_code, "REPORT.md is not what the files say" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("offline.json", "{", "cannot be read as JSON"),
        ("offline.json", '{"figure": NaN}', "NaN is no number"),
        ("peers_conv.json", "{}", "is no sweep's file"),
        ("offline.json", json.dumps([{"command": "x", "decode_step_ms": {}}]), "batch_size"),
        (
            "scaling.json",
            json.dumps({"points": [{}], "prompt": 2048, "seconds": 2, "backend": "green"}),
            "decode_sms",
        ),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    result = report("--results", tmp_path, "--output", tmp_path / "REPORT.md")
    assert result.exit_code == 2
    assert message in result.stderr
    assert name in result.stderr
    assert not (tmp_path / "REPORT.md").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"duration": "long"},
        {"p99_itl_ms": True},
        {"energy_joules": "9"},
        {"device": {"power_w": {"mean": "hot"}}},
    ],
)
def test_a_damaged_run_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_sweep(tmp_path / "peers.json", searched({AUTO: 2.0}, **changes))
    result = report("--results", tmp_path, "--output", tmp_path / "REPORT.md")
    assert (result.exit_code, "is a damaged sweep's file" in result.stderr) == (2, True)


def test_missing_folders_are_refused(tmp_path: Path) -> None:
    result = report("--results", tmp_path / "none", "--output", tmp_path / "REPORT.md")
    assert (result.exit_code, "there is no such folder" in result.stderr) == (2, True)
    result = report("--results", tmp_path, "--output", tmp_path / "none" / "REPORT.md")
    assert (result.exit_code, "make it first" in result.stderr) == (2, True)
    result = report("--results", tmp_path, "--output", tmp_path / "REPORT")
    assert (result.exit_code, "a file name with an ending" in result.stderr) == (2, True)


def test_commands_come_from_the_settings(results: Path) -> None:
    commands = {source.name: command_for(source, "r") for source in read_evidence(results).sources}
    assert commands == {
        "peers_conv.json": (
            "python -m bench.peers --model llama-3.1-8b --system own:auto --system vllm:512 --system vllm:2048 "
            "--workload 'azure:conv=600~18@ttft:500ms tpot:15ms' --tolerance 0.05 --best-peer-only --warmup-requests 0 "
            "--output-json r/peers_conv.json"
        ),
        "peers_offline.json": None,
        "offline.json": "python bench/offline.py --only latency --repeats 2 --output-json r/offline.json",
        "notes.json": None,
    }
