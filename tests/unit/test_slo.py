"""Latency targets: what may be written, and what it means."""

import math

import pytest

from bullet_graph import ConfigError, Slo


@pytest.mark.parametrize(
    ("texts", "slo"),
    [
        ([], Slo()),
        (["ttft:500"], Slo(ttft_ms=500)),
        (["ttft:500ms", "tpot:15"], Slo(ttft_ms=500, tpot_ms=15)),
        (["tpot:7.5ms", "ttft:0.25ms/token"], Slo(ttft_ms_per_token=0.25, tpot_ms=7.5)),
        (["ttft:200", "ttft:0.1ms/token"], Slo(ttft_ms=200, ttft_ms_per_token=0.1)),
    ],
)
def test_targets_are_read_as_written(texts: list[str], slo: Slo) -> None:
    assert Slo.parse(texts) == slo
    assert Slo.parse(str(slo).split() if texts else []) == slo


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:", "ttft:-1", "ttft:x", "ttft:500s", "ttft:1/token", "TTFT:1", "itl:5", "tpot:1ms/token"]
)
def test_other_texts_are_refused_with_the_forms_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match="ttft:500, ttft:500ms"):
        Slo.parse([text])


def test_a_target_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="ttft_ms is given twice"):
        Slo.parse(["ttft:500", "ttft:600"])


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, "5", True])
def test_targets_are_positive_numbers(value: object) -> None:
    with pytest.raises(ConfigError, match="tpot_ms must be a positive number"):
        Slo(tpot_ms=value)  # type: ignore[arg-type]


def test_the_limit_of_a_prompt_adds_both_parts() -> None:
    assert Slo(ttft_ms=100, ttft_ms_per_token=0.5).ttft_limit_ms(400) == 300
    assert Slo(ttft_ms_per_token=0.5).ttft_limit_ms(400) == 200
    assert Slo(tpot_ms=5).ttft_limit_ms(400) == math.inf


def test_a_request_s_targets_go_before_the_engine_s_phase_by_phase() -> None:
    engine = Slo(ttft_ms=500, ttft_ms_per_token=1, tpot_ms=15)
    assert Slo(tpot_ms=8).or_else(engine) == Slo(ttft_ms=500, ttft_ms_per_token=1, tpot_ms=8)
    # The two parts of a TTFT target go together: half of the engine's would be nobody's target.
    assert Slo(ttft_ms=100).or_else(engine) == Slo(ttft_ms=100, tpot_ms=15)
    assert Slo().or_else(engine) == engine
