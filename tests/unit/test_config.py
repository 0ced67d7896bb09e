"""The engine's settings, its policies and its latency targets."""

import math
import re
from pathlib import PurePosixPath
from typing import Any

import pytest

from bullet_graph.config import SETTINGS, EngineConfig, Policy
from bullet_graph.errors import ConfigError
from bullet_graph.slo import Slo


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("serial", Policy("serial")),
        ("mixed", Policy("mixed")),
        ("mixed:1", Policy("mixed", 1)),
        ("mixed:2048", Policy("mixed", 2048)),
        ("serial:64", Policy("serial", 64)),
        ("split", Policy("split")),
        ("split:48", Policy("split", decode_sms=48)),
        ("auto", Policy("auto")),
    ],
)
def test_policies_are_read_and_written(text: str, policy: Policy) -> None:
    assert Policy.parse(text) == policy
    assert str(policy) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "sliced", "auto:1", "split:x", "solo", "Mixed"),
        *("mixed:", "mixed:0", "mixed:-1", "mixed:1.5", "mixed:x", "mixed:²", " mixed"),
    ],
)
def test_other_policies_are_refused_with_the_forms_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match="serial, mixed, split or auto") as caught:
        Policy.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *((("mixed", chunk), "chunk_tokens") for chunk in (0, -1, 1.5, "8", True)),
        (("solo",), "serial, mixed, split, auto, got 'solo'"),
        (("split", 8), "chunk_tokens goes with serial or mixed, not with split"),
        (("mixed", None, 48), "decode_sms goes with split, not with mixed"),
    ],
)
def test_a_policy_is_checked_however_it_is_made(values: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Policy(*values)


NO_COUNTS = (0, -1, 1.5, "8", True)


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        *((name, NO_COUNTS, "an integer of at least 1") for name in ("max_model_len", "kv_cache_bytes")),
        *((f"max_num_{what}", (*NO_COUNTS, None), "an integer of at least 1") for what in ("seqs", "batched_tokens")),
        ("max_num_seqs", (2**16 + 1, 10**30), "at most 65536"),
        ("max_num_batched_tokens", (2**24 + 1, 10**30), "at most 16777216"),
        ("seed", (-1, None), "an integer of at least 0"),
        ("cpu_threads", (1025, 100_000), "at most 1024"),
        ("gpu_memory_utilization", (0.0, -0.1, 1.01, math.nan, math.inf, "0.9", None), r"in \(0, 1\]"),
        ("reject_late", (0, "2", True), "a number above 0"),
        ("prefix_caching", ("no", 1, None), "of type bool"),
        ("policy", ("auto", 3), "of type bullet_graph.config.Policy"),
        ("slo", ("ttft=1", None), "of type bullet_graph.slo.Slo"),
        ("decode_sms", (5, (32, "48")), r"of type tuple\[int, \.\.\.\]"),
        ("perf_table", ("", 5), "a file's name, roofline or None"),
        ("capture_plan", ("", 3), "a file's name, a shipped plan's or None"),
        ("capture_cache", ("",), "a folder, auto or None"),
        ("self_check", ("some",), "one of off, sample, all"),
        ("load_format", ("gguf", None), "one of auto, safetensors, dummy"),
        ("dtype", ("int8",), "one of auto, bfloat16, float16, float32"),
        ("device", ("tpu",), "one of auto, cuda, cpu"),
        ("quantization", ("int8",), "one of fp8"),
        ("kv_cache_dtype", ("int8",), "one of auto, fp8"),
        ("prompt_order", ("shortest",), "one of arrival, longest-output"),
        ("ready", ("soon",), "one of hot, all"),
    ],
)
def test_bad_values_are_refused_by_name(name: str, values: tuple[object, ...], allowed: str) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"^{name} must be {allowed}, got {re.escape(repr(value))}$"):
            EngineConfig(model="tiny", **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [{"decode_sms": (32,)}, {"cuda_graphs": False}])
def test_a_capture_plan_leaves_no_choice_of_graphs(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="leave out decode_sms and cuda_graphs=False"):
        EngineConfig(model="tiny", capture_plan="p.toml", **other)


@pytest.mark.parametrize(
    ("policy", "batched", "chunk"),
    [("mixed", 100, 100), ("mixed:64", 100, 64), ("serial:300", 100, 100), ("serial", 7, 7)],
)
def test_the_chunk_is_the_smaller_of_the_policy_s_and_the_engine_s(policy: str, batched: int, chunk: int) -> None:
    config = EngineConfig(model="tiny", policy=Policy.parse(policy), max_num_batched_tokens=batched)
    assert (config.chunk_tokens, config.max_forward_rows) == (chunk, max(chunk, 16) + config.max_num_seqs)


# ---- as users give them ----


def test_texts_are_read_as_on_the_command_line() -> None:
    texts = {"policy": "mixed:64", "slo": "ttft:500, tpot:15", "kv_cache_bytes": "2MiB", "decode_sms": "32,48"}
    config = EngineConfig.of("tiny", **texts, capture_cache=PurePosixPath("/somewhere"))
    own: dict[str, Any] = {"policy": Policy("mixed", 64), "slo": Slo(ttft_ms=500, tpot_ms=15), "decode_sms": (32, 48)}
    assert config == EngineConfig(model="tiny", **own, kv_cache_bytes=2 * 1024**2, capture_cache="/somewhere")
    assert EngineConfig.of(**config.values()) == config


def test_an_unknown_setting_names_the_nearest_or_the_current_one() -> None:
    with pytest.raises(ConfigError, match="no setting 'canary': did you mean self_check"):
        EngineConfig.of("tiny", canary="off")
    with pytest.raises(ConfigError, match="no setting 'max_seqs': did you mean max_num_seqs"):
        EngineConfig.of("tiny", max_seqs=3)
    with pytest.raises(ConfigError, match="no setting 'zzz': choose among model, revision, load_format"):
        EngineConfig.of("tiny", zzz=3)
    with pytest.raises(ConfigError, match="slo: 'ttft:x' is no latency target: write"):
        EngineConfig.of("tiny", slo="ttft:x")


def test_every_setting_is_described() -> None:
    for name, setting in SETTINGS.items():
        assert setting.help.endswith(".")
        assert setting.help in (EngineConfig.__doc__ or ""), name


# ---- latency targets: what may be written, and what it means ----


@pytest.mark.parametrize(
    ("texts", "slo"),
    [
        ([], Slo()),
        (["ttft:500"], Slo(ttft_ms=500)),
        (["ttft:500ms", "tpot:15"], Slo(ttft_ms=500, tpot_ms=15)),
        (["tpot:7.5ms", "ttft:0.25ms/token"], Slo(ttft_ms_per_token=0.25, tpot_ms=7.5)),
        (["ttft:200", "ttft:0.1ms/token"], Slo(ttft_ms=200, ttft_ms_per_token=0.1)),
        (["ttft:1000000", "tpot:1234567.5"], Slo(ttft_ms=1e6, tpot_ms=1234567.5)),
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
