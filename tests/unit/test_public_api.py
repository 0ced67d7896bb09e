"""The public names, pinned: a change here is a change for users."""

import inspect

import pytest

import bullet_graph
from bullet_graph import AsyncEngine, Engine, SamplingParams
from bullet_graph.config import SETTINGS
from bullet_graph.errors import BulletGraphError

PUBLIC_NAMES = [
    "AsyncEngine", "BulletGraphError", "CacheError", "CaptureCacheWarning", "CheckpointError",
    "CompletionOutput", "ConfigError", "DeviceError", "Engine", "EngineConfig", "EngineDeadError",
    "EngineStats", "InsufficientMemoryError", "LateError", "ModelError", "OutputKind", "PartitionError",
    "PerfTableError", "PerfTableWarning", "Policy", "PromptError", "RankError", "RequestError",
    "RequestMetrics", "RequestOutput", "SamplingParams", "SamplingParamsError", "Slo", "StructuredOutputs",
    "TokenLogprobs", "TraceError", "UnsupportedModelError", "WorkloadError", "__version__",
]  # fmt: skip


def parameters(function: object) -> list[str]:
    assert callable(function)
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_every_public_name_is_there_and_documented() -> None:
    assert bullet_graph.__all__ == PUBLIC_NAMES
    for name in PUBLIC_NAMES:
        value = getattr(bullet_graph, name)
        if inspect.isclass(value):
            assert value.__doc__
            # A dataclass without a docstring of its own gets its signature for one.
            assert not value.__doc__.startswith(f"{name}(")


def test_every_error_of_the_package_is_public_and_has_one_base() -> None:
    errors = {
        name
        for name, value in vars(bullet_graph.errors).items()
        if inspect.isclass(value) and issubclass(value, BulletGraphError)
    }
    assert errors <= set(PUBLIC_NAMES)


def test_names_that_vllm_users_know() -> None:
    assert parameters(Engine)[0] == "model"
    assert set(SETTINGS) <= set(parameters(Engine))
    engine = "dtype max_model_len max_num_seqs max_num_batched_tokens gpu_memory_utilization device load_format seed"
    assert set(engine.split()) <= set(parameters(Engine))
    assert parameters(Engine.generate) == ["prompts", "sampling_params", "use_tqdm"]
    assert " ".join(parameters(Engine.add_request)) == "request_id prompt sampling_params output_kind arrival_s slo"
    assert parameters(Engine.abort) == ["request_id"]
    assert parameters(Engine.shutdown) == []
    assert parameters(Engine.has_unfinished_requests) == []
    assert parameters(AsyncEngine.generate)[:3] == ["prompt", "sampling_params", "request_id"]
    sampling = "temperature top_p top_k min_p seed max_tokens min_tokens stop stop_token_ids ignore_eos logprobs n"
    sampling += " presence_penalty frequency_penalty repetition_penalty logit_bias bad_words"
    assert set(sampling.split()) <= set(parameters(SamplingParams))


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="nonesuch"):
        _ = bullet_graph.nonesuch
