"""What an engine refuses, how it says so, and that it goes on working: models, settings and requests."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import write_checkpoint
from engines import GREEDY, make_engine, run_to_end, tokens_of

from bullet_graph import (
    BulletGraphError,
    CheckpointError,
    ConfigError,
    DeviceError,
    Engine,
    InsufficientMemoryError,
    PerfTableError,
    PromptError,
    RequestError,
    SamplingParams,
    SamplingParamsError,
)

PROMPT = [5, 17, 30, 8]

# ---- models and settings that no engine can be built of ----


def test_a_folder_without_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", shards=2)
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"found neither.*dummy"):
        make_engine(tmp_path)
    with make_engine(tmp_path, load_format="dummy") as engine:
        assert engine.generate("text", GREEDY, use_tqdm=False)[0].error is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_where_there_is_none() -> None:
    with pytest.raises(DeviceError, match=r"device=cuda was asked for.*device=cpu"):
        make_engine(device="cuda")
    with make_engine(device="auto") as engine:
        assert engine.device_name == "cpu"


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"load_format": "safetensors"}, ConfigError, r"'tiny' is a preset of shapes.*load_format=dummy"),
        ({"max_model_len": 16385}, ConfigError, "max_model_len=16385 exceeds .* limit of 16384"),
        ({"policy": "mixed:0"}, ConfigError, r"unknown policy 'mixed:0'.*mixed:CHUNK \(in tokens"),
        ({"policy": "split"}, ConfigError, "SM partitions need a GPU.*the policy split"),
        ({"perf_table": "/nowhere/table.json"}, PerfTableError, "tables are measured on GPUs"),
        ({"kv_cache_bytes": 1000}, InsufficientMemoryError, r"short by .*MiB.*Raise kv_cache_bytes"),
        ({"kv_cache_bytes": 2**60}, InsufficientMemoryError, r"short by .*GiB.*Lower kv_cache_bytes"),
        ({"gpu_memory_utilization": 1e-9}, InsufficientMemoryError, r"raise gpu_memory_utilization \(now 1e-09"),
    ],
)
def test_bad_settings(settings: dict[str, object], error: type[BulletGraphError], message: str) -> None:
    with pytest.raises(error, match=message):
        make_engine(**settings)


def test_the_ledger_is_told_and_must_fit_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def allocate(*_: object, **__: object) -> None:
        assert told
        raise RuntimeError("far enough")

    monkeypatch.setattr("bullet_graph.runtime.build.KVCache", allocate)
    monkeypatch.setattr("bullet_graph.runtime.build.zero_weights", allocate)
    with pytest.raises(RuntimeError, match="far enough"):
        make_engine(on_ledger=told.append)
    assert told[0].kv_cache_bytes > 0
    with pytest.raises(InsufficientMemoryError):
        make_engine(gpu_memory_utilization=1e-9)


# ---- requests ----


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """A model of 512 tokens without a tokenizer, 64 positions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bullet_graph.runtime.resolve.PRESETS_OF_BYTES", frozenset())
        engine = make_engine(max_model_len=64)
    with engine:
        yield engine


BAD_PROMPTS = [
    ([], "the prompt is empty"),
    (np.array([], dtype=np.int32), "the prompt is empty"),
    ([512], "token id 512 is outside the vocabulary of 512 tokens"),
    ([1, -1], "token id -1 is outside the vocabulary"),
    ([2**31], "outside the vocabulary"),
    ([2**70], "integer"),
    ([2**63, -1], "integer"),
    ([1] * 64, "64 tokens; with max_model_len=64 it may have at most 63"),
    ("some text", "needs a tokenizer"),
    ("", "needs a tokenizer"),
    ([1.0, 2.5], "integer"),
    (np.array([1.0]), "integer"),
    ([True, False], "integer"),
    (["1", "2"], "integer"),
    ([1, None], "integer"),
    ([[1, 2], [3, 4]], "flat"),
    ([[1, 2], [3]], "flat"),
    (5, "flat"),
    (None, "integer"),
    (b"12", "integer"),
]


def test_bad_requests_in_a_batch_fail_alone(engine: Engine) -> None:
    (expected,) = engine.generate(PROMPT, GREEDY, use_tqdm=False)
    prompts = [PROMPT, *(prompt for prompt, _ in BAD_PROMPTS), PROMPT]
    outputs = engine.generate(prompts, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    assert len(outputs) == len(prompts)
    for output in (outputs[0], outputs[-1]):
        assert output.error is None
        assert tokens_of(output) == tokens_of(expected)
    for output, (_, message) in zip(outputs[1:-1], BAD_PROMPTS, strict=True):
        assert isinstance(output.error, PromptError)
        assert message in str(output.error)
        assert output.finished
        assert output.outputs == ()
        assert output.metrics.token_times_s == ()
    assert engine.stats().kv_blocks_used == 0


@pytest.mark.parametrize("prompt", [[999], [1] * 100, "text"], ids=["outside", "long", "text"])
def test_a_single_bad_prompt_raises(engine: Engine, prompt: object) -> None:
    with pytest.raises(PromptError) as caught:
        engine.generate(prompt, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    assert isinstance(caught.value, (RequestError, ValueError))
    with pytest.raises(PromptError):
        engine.add_request("bad", prompt)  # type: ignore[arg-type]
    assert not engine.has_unfinished_requests()
    assert tokens_of(engine.generate(PROMPT, GREEDY, use_tqdm=False)[0])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(stop="x"), "stop strings need a tokenizer"),
        (SamplingParams(stop_token_ids=[512]), "stop_token_ids holds 512, outside the vocabulary of 512"),
        (
            SamplingParams(stop_token_ids=list(range(17)), min_tokens=1),
            "min_tokens can hold back at most 16 stop tokens, got 17",
        ),
    ],
)
def test_params_that_do_not_fit_the_model(engine: Engine, params: SamplingParams, message: str) -> None:
    with pytest.raises(SamplingParamsError, match=message):
        engine.generate(PROMPT, params, use_tqdm=False)
    good, bad = engine.generate([PROMPT] * 2, [GREEDY, params], use_tqdm=False)
    assert len(good.outputs[0].token_ids) == GREEDY.max_tokens
    assert message in str(bad.error)


def test_many_stop_tokens_are_fine_without_min_tokens(engine: Engine) -> None:
    params = SamplingParams(stop_token_ids=list(range(500)), max_tokens=3)
    assert engine.generate(PROMPT, params, use_tqdm=False)[0].error is None


@pytest.mark.parametrize("params", [{"temperature": 0}, ["a"], 3])
def test_params_and_ids_of_another_type_are_refused(engine: Engine, params: object) -> None:
    with pytest.raises(RequestError, match="SamplingParams"):
        engine.add_request("bad", PROMPT, params)  # type: ignore[arg-type]
    good, bad = engine.generate([PROMPT] * 2, [GREEDY, params], use_tqdm=False)  # type: ignore[list-item]
    assert good.error is None
    assert "SamplingParams" in str(bad.error)
    with pytest.raises(RequestError, match="request_id must be a str"):
        engine.add_request(params, PROMPT)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="slo must be targets"):
        engine.add_request("bad", PROMPT, slo=params)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="output_kind must be such as"):
        engine.add_request("bad", PROMPT, output_kind=params)  # type: ignore[arg-type]
    for arrival_s in (math.nan, str(params)):
        with pytest.raises(RequestError, match="arrival_s must be a time"):
            engine.add_request("bad", PROMPT, arrival_s=arrival_s)  # type: ignore[arg-type]
    assert not engine.has_unfinished_requests()


PROMPTS_NEEDED = "prompts must be text, token ids, or a list of either"


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([PROMPT] * 3, [GREEDY] * 2, "3 prompts need as many sampling params, or one for all; got 2"),
        (PROMPT, [GREEDY] * 2, "1 prompts need"),
        ([PROMPT] * 2, {"temperature": 0}, "sampling params"),
        ([PROMPT] * 2, "greedy", "sampling params"),
        ([PROMPT] * 2, 3, "sampling params"),
        (None, GREEDY, PROMPTS_NEEDED),
        (5, GREEDY, PROMPTS_NEEDED),
        ({"prompt_token_ids": [1]}, GREEDY, PROMPTS_NEEDED),
        (iter([[1]]), GREEDY, PROMPTS_NEEDED),
    ],
    ids=lambda value: str(value)[:20],
)
def test_prompts_and_params_must_match(engine: Engine, prompts: object, params: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]


def test_more_logprobs_than_tokens(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", vocab_size=12, tokenizer=False)
    with make_engine(tmp_path) as engine:
        bad, good = engine.generate(
            [[1], [2]], [SamplingParams(logprobs=13), SamplingParams(logprobs=12)], use_tqdm=False
        )
    assert "logprobs must be at most the vocabulary's 12 tokens, got 13" in str(bad.error)
    assert len((good.outputs[0].logprobs or ())[0].top) == 12


def test_a_request_id_in_use_is_refused(engine: Engine) -> None:
    engine.add_request("a", PROMPT, GREEDY)
    engine.step()
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add_request("a", [1], GREEDY)
    assert run_to_end(engine)["a"][-1].prompt_token_ids == tuple(PROMPT)
    # Once it has ended, its id is free.
    engine.add_request("a", [1], GREEDY)
    assert run_to_end(engine)["a"][-1].prompt_token_ids == (1,)


def test_generate_needs_the_engine_to_itself(engine: Engine) -> None:
    engine.add_request("a", PROMPT, GREEDY)
    with pytest.raises(RequestError, match="1 requests are under way"):
        engine.generate(PROMPT, GREEDY, use_tqdm=False)
    assert len(run_to_end(engine)["a"][-1].outputs[0].token_ids) == GREEDY.max_tokens
    assert tokens_of(engine.generate(PROMPT, GREEDY, use_tqdm=False)[0])
