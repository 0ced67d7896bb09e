"""A short profile of a small model, end to end: complete, readable, resumable."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_runner import parsed, run
from click.testing import Result

from bullet_graph.config import EngineConfig
from bullet_graph.errors import ConfigError, PerfTableError
from bullet_graph.perf.table import Measured, PerfTable, read_table
from bullet_graph.runtime.bursts import Workbench
from bullet_graph.runtime.performance import table_model
from bullet_graph.runtime.profile import Prepared, prepare_profile, profile_model

BUDGET_S = 50.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the config of a Llama of two layers."""
    folder = tmp_path_factory.mktemp("two-layers")
    config = json.loads("""{
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "hidden_size": 512,
        "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "torch_dtype": "bfloat16"
    }""")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def prepared(model: str, seed: int = 0) -> Prepared:
    return prepare_profile(
        EngineConfig(
            model=model,
            load_format="dummy",
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            kv_cache_bytes=2**29,
            decode_sms=(32, 64),
            seed=seed,
        )
    )


def command(model: str, output: Path, *more: str) -> Result:
    options = "--load-format dummy --max-num-seqs 64 --max-num-batched-tokens 2048 --decode-sms 32,64"
    arguments = ["profile", "--model", model, *options.split(), "--time-budget-s", str(BUDGET_S)]
    return run(*arguments, "--output", str(output), *more)


def all_repeats(table: PerfTable) -> Measured:
    return {**table.points, **table.held_back}


def test_a_profile_by_the_command(model: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    output = tmp_path / "table.json"
    summary = parsed(command(model, output, "--json"))
    table = read_table(output)
    assert table.complete
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]
    points = all_repeats(table)
    assert {point.kind for point in points} == {"decode", "prefill", "mixed", "split"}
    assert {point.sms for point in points if point.kind == "decode"} == {None, 32, 64}
    assert all(len(repeats) >= 3 for repeats in points.values())
    assert summary["num_points"] + summary["num_held_back"] == len(points)
    errors = summary["held_back_errors"]
    assert 0 <= errors["overall"]["median_percent"] < 100
    # The table serves as a model.
    performance = table_model(table, 64, prepared(model).runtime.model)
    assert performance.decode(64, 64_000).ms > 0
    assert tuple(performance.decode_sms) == (32, 64)
    record_property("held_back_errors", errors["kinds"])
    record_property("seconds", sum(done["seconds"] for done in summary["passes"]))
    # There already: nothing is measured again unasked.
    again = command(model, output)
    assert again.exit_code == 2
    assert "--overwrite" in again.output


def test_an_interrupted_profile_goes_on(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, partial = tmp_path / "table.json", tmp_path / "table.partial.json"
    measure = Workbench.measure
    bursts: list[object] = []

    def interrupted(self: Workbench, point: object, _: float) -> tuple[float, ...]:
        if len(bursts) == 20:
            raise KeyboardInterrupt
        bursts.append(point)
        return measure(self, point, 0.02)  # type: ignore[arg-type]

    monkeypatch.setattr(Workbench, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        profile_model(prepared(model), time_budget_s=BUDGET_S, file=output)
    before = read_table(partial)
    assert not before.complete
    # The first burst only heats.
    assert sum(map(len, all_repeats(before).values())) == 19
    with pytest.raises(PerfTableError):
        table_model(before, 64, prepared(model).runtime.model)
    with pytest.raises(ConfigError, match="--restart"):
        profile_model(prepared(model, seed=1), time_budget_s=BUDGET_S, file=output)

    def short(self: Workbench, point: object, _: float) -> tuple[float, ...]:
        bursts.append(point)
        return measure(self, point, 0.02)  # type: ignore[arg-type]

    monkeypatch.setattr(Workbench, "measure", short)
    table = profile_model(prepared(model), time_budget_s=BUDGET_S, file=output)
    assert (output.exists(), table.complete, partial.exists()) == (True, True, False)
    measured = all_repeats(table)
    # Two bursts heated; no point was measured more often than planned.
    assert len(bursts) - 2 == sum(map(len, measured.values()))
    assert len({len(repeats) for repeats in measured.values()}) == 1
    for point, repeats in all_repeats(before).items():
        assert measured[point][: len(repeats)] == repeats
