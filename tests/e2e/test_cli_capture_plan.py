"""``bullet-graph capture plan``, end to end, in virtual time; and plans in the other commands."""

from pathlib import Path
from typing import Any

import pytest
from cli_runner import parsed, refused, run
from click.testing import Result

from bullet_graph.graphs.capture_plan import parse_plan

CONV = ("--trace", "azure:conv", "--num-prompts", "60", "--request-rate", "18", "--slo", "ttft:500 tpot:15")


def plan(*arguments: str, model: str = "llama-3.1-8b") -> Result:
    return run("capture", "plan", "--model", model, *CONV, *arguments)


@pytest.fixture(scope="module")
def proposed() -> dict[str, Any]:
    return parsed(plan("--memory-gb", "0.3", "--time-s", "2", "--json"))


def test_the_json_tells_what_was_seen_and_what_is_proposed(proposed: dict[str, Any]) -> None:
    assert sum(step["share"] for step in proposed["seen"]) == pytest.approx(1)
    assert {step["captured_for"] for step in proposed["seen"]} >= {None, "piecewise"}
    assert proposed["memory_gb"] <= 0.3
    assert proposed["time_s"] <= 2
    assert 0 < proposed["lost_percent"] < 10
    assert 0 < proposed["lost_percent_without_plan"] < 10
    assert parse_plan(proposed["toml"]).max_num_seqs == 256
    assert [list(entry["batch_sizes"]) for entry in proposed["plan"]["decode"]] == [
        list(entry.batch_sizes) for entry in parse_plan(proposed["toml"]).decode
    ]


def test_the_same_plan_goes_to_stdout_or_a_file(proposed: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "conv.toml"
    shown, written = (plan("--memory-gb", "0.3", "--time-s", "2", *more) for more in ((), ("--output", str(path))))
    assert path.read_text() == shown.stdout == proposed["toml"]
    for text in (
        "azure:conv, ttft:500ms tpot:15ms, policy auto, at 18 requests/s",
        "Padding and missing sizes cost",
        "wrote",
    ):
        assert text in written.stdout
        assert (text in shown.stdout) == (text != "wrote")
    assert "add --overwrite" in refused(plan("--output", str(path)))


def test_a_plan_made_by_the_command_can_be_simulated(proposed: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(proposed["toml"])
    simulate = ("simulate", *CONV[:-2], "--goodput", "ttft:500", "tpot:15", "--max-num-seqs", "256", "--json")
    with_plan = parsed(run(*simulate, "--capture-plan", str(path)))
    assert with_plan["capture_plan"] == str(path)
    assert with_plan["decode_sms"] == [
        entry["decode_sms"] for entry in proposed["plan"]["decode"] if entry["decode_sms"]
    ]
    wrong = run(*simulate, "--max-num-seqs", "99", "--capture-plan", str(path))
    assert "made for --max-num-seqs 256, but the engine has --max-num-seqs 99" in refused(wrong)


def test_a_forced_split_and_an_estimated_gpu() -> None:
    split = parsed(plan("--gpu", "roofline:h200", "--policy", "split:64", "--max-num-seqs", "64", "--json"))
    assert parse_plan(split["toml"]).max_num_seqs == 64
    assert {entry["decode_sms"] for entry in split["plan"]["decode"]} <= {None, 64}
    assert split["performance"] == "roofline"
    assert split["budget"] == {"memory_gb": None, "time_s": None}
