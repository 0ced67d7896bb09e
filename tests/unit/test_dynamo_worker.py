"""The parts of the Dynamo worker that know no Dynamo: requests, chunks, events, files, and the refusal without it."""

import importlib.metadata
import json
import queue
import re
import shlex
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from cli_runner import refused
from click.testing import CliRunner

from bullet_graph.dynamo import __main__ as command
from bullet_graph.dynamo.messages import CacheEvents, Message, event_of, hash_of, read_request, write_chunk
from bullet_graph.engine.block_pool import BlocksRemoved, BlocksStored
from bullet_graph.engine.output import CompletionOutput, RequestOutput, TokenLogprobs
from bullet_graph.errors import ConfigError, ModelError, RequestError, SamplingParamsError
from bullet_graph.models.tokenizer import Tokenizer
from bullet_graph.perf.metrics import RequestMetrics
from bullet_graph.sampling_params import SamplingParams, StructuredOutputs
from bullet_graph.serve.protocol import CompletionRequest

STOPS = (
    *("max_tokens", "stop", "stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden", "min_tokens"),
    *("ignore_eos", "max_thinking_tokens"),
)
SAMPLING = (
    *("n", "best_of", "temperature", "top_p", "top_k", "min_p", "use_beam_search", "length_penalty", "seed"),
    *("include_stop_str_in_output", "guided_decoding"),
)
# As the frontend of ai-dynamo 1.6.1 sends it: with all keys, most of which say nothing.
REQUEST: dict[str, Any] = {
    "model": "tiny",
    "token_ids": [1, 2, 3],
    "stop_conditions": dict.fromkeys(STOPS) | {"stop_token_ids_hidden": [257]},
    "sampling_options": dict.fromkeys(SAMPLING),
    "output_options": dict.fromkeys(("logprobs", "prompt_logprobs", "skip_special_tokens")),
    "eos_token_ids": [257],
    "annotations": [],
    "routing": {"dp_rank": 0},
}


def with_fields(**groups: dict[str, Any]) -> dict[str, Any]:
    return REQUEST | {name: REQUEST.get(name, {}) | fields for name, fields in groups.items()}


def read(request: dict[str, Any], **defaults: Any) -> SamplingParams:
    prompt, params = read_request(request, max_model_len=100, defaults=defaults)
    assert prompt == [1, 2, 3]
    return params


# ---- requests ----


def test_what_a_request_leaves_open_comes_from_the_model() -> None:
    assert read(REQUEST) == SamplingParams(max_tokens=97, stop_token_ids=(257,))
    assert read(REQUEST, top_k=3, max_tokens=9) == SamplingParams(top_k=3, max_tokens=9, stop_token_ids=(257,))
    assert read(with_fields(stop_conditions={"min_tokens": 20}), max_tokens=9).max_tokens == 20
    params = read(with_fields(sampling_options={"temperature": 0.0}, stop_conditions={"max_tokens": 5}), temperature=2)
    assert (params.temperature, params.max_tokens) == (0, 5)


def test_each_field_is_read() -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 4, "n": 1}
    sampling |= {"presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
    stops = {"max_tokens": 9, "min_tokens": 2, "stop": ["end"], "ignore_eos": True}
    params = read(
        with_fields(
            sampling_options=sampling,
            stop_conditions=stops | {"stop_token_ids": [5], "stop_token_ids_hidden": [5, 257]},
            output_options={"logprobs": 2, "prompt_logprobs": 0},
            routing={"cache_salt": "a"},
        )
    )
    assert params == SamplingParams(
        **(sampling | stops), stop_token_ids=(5, 257), logprobs=2, prompt_logprobs=0, cache_salt="a"
    )


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"json": {"type": "object"}, "regex": None}, {"json": '{"type": "object"}'}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"grammar": "root ::= 'a'"}, {"grammar": "root ::= 'a'"}),
        ({"json": None}, None),
    ],
    ids=str,
)
def test_structured_outputs(wanted: dict[str, Any], found: dict[str, Any] | None) -> None:
    params = read(with_fields(sampling_options={"guided_decoding": wanted}))
    assert params.structured_outputs == (None if found is None else StructuredOutputs(**found))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"sampling_options": {"n": 2}}, "`n` is not supported by this worker, found 2"),
        ({"sampling_options": {"best_of": 3}}, "`best_of`"),
        ({"sampling_options": {"use_beam_search": True}}, "`use_beam_search`"),
        ({"sampling_options": {"length_penalty": 0.5}}, "`length_penalty`"),
        ({"sampling_options": {"guided_decoding": {"json": {}, "whitespace_pattern": " "}}}, "`whitespace_pattern`"),
        ({"stop_conditions": {"max_thinking_tokens": 9}}, "`max_thinking_tokens`"),
        ({"stop_conditions": {"max_thinking_tokens": 1}}, "`max_thinking_tokens`"),
        ({"stop_conditions": {"max_thinking_tokens": 0}}, "`max_thinking_tokens`"),
        ({"multi_modal_data": {"image_url": ["x"]}}, "`multi_modal_data`"),
        ({"prefill_result": {"x": 1}}, "`prefill_result`"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused(groups: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read(with_fields(**groups))


def test_what_asks_for_nothing_is_served() -> None:
    fields = {"n": 1, "best_of": 1, "length_penalty": 1.0, "use_beam_search": False}
    assert read(with_fields(sampling_options=fields)) == read(REQUEST)


def test_a_seed_is_the_servers() -> None:
    for seed in (-5, -(2**63), 2**63 - 1):
        server = CompletionRequest(prompt="a", seed=seed).sampling_params(1, {})
        assert read(with_fields(sampling_options={"seed": seed})).seed == server.seed


def test_a_wrong_value_is_an_error_of_the_request() -> None:
    with pytest.raises(SamplingParamsError, match="top_p must be"):
        read(with_fields(sampling_options={"top_p": 2}))
    with pytest.raises(SamplingParamsError, match="exactly one"):
        read(with_fields(sampling_options={"guided_decoding": {"regex": "a", "choice": ["a"]}}))


# ---- chunks ----


def output(sample: CompletionOutput, **fields: Any) -> RequestOutput:
    metrics = RequestMetrics(0.0, None, ())
    return RequestOutput("id", (1, 2, 3), (sample,), sample.finish_reason is not None, metrics, **fields)


def test_chunks() -> None:
    assert write_chunk(output(CompletionOutput(0, "ab", (7, 8), None, None)), 2) == {"token_ids": [7, 8], "index": 0}
    last = output(CompletionOutput(0, "c", (9,), None, "length"), num_cached_tokens=2)
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    usage["prompt_tokens_details"] = {"cached_tokens": 2}  # type: ignore[assignment]
    assert write_chunk(last, 3) == {"token_ids": [9], "index": 0, "finish_reason": "length", "completion_usage": usage}


def test_log_probabilities() -> None:
    scored = TokenLogprobs(7, -2.0, ((5, -1.0), (7, -2.0)))
    chunk = write_chunk(output(CompletionOutput(0, "a", (7,), (scored,), None)), 1)
    assert chunk["log_probs"] == [-2.0]
    (entries,) = chunk["top_logprobs"]
    assert [(entry["rank"], entry["token_id"], entry["logprob"]) for entry in entries] == [(1, 5, -1.0), (2, 7, -2.0)]
    ended = output(CompletionOutput(0, "", (), None, "stop"), prompt_logprobs=(None, scored))
    assert write_chunk(ended, 1)["engine_data"] == {
        "prompt_logprobs": [None, {"7": {"logprob": -2.0, "rank": 2}, "5": {"logprob": -1.0, "rank": 1}}]
    }


# ---- events of the prefix cache ----

KEYS = (b"\xff" * 32, b"\x01" + b"\0" * 31, b"\x02" + b"\0" * 31)


def test_events_name_blocks_by_the_beginnings_of_their_keys() -> None:
    assert [hash_of(key) for key in KEYS] == [-1, 1, 2]
    tokens = np.arange(32, dtype=np.int32)
    stored = {"type": "stored", "token_ids": list(range(32)), "num_block_tokens": [16, 16], "block_hashes": [1, 2]}
    assert event_of(BlocksStored(None, KEYS[1:], tokens, None)) == stored | {"parent_hash": None}
    assert event_of(BlocksStored(KEYS[0], KEYS[1:], tokens, "a")) == stored | {"parent_hash": -1, "cache_salt": "a"}
    assert event_of(BlocksRemoved(KEYS)) == {"type": "removed", "block_hashes": [-1, 1, 2]}


class Published:
    """A publisher; the first batch fails."""

    def __init__(self) -> None:
        self.batches: list[list[Message]] = []
        self.loads: queue.SimpleQueue[float] = queue.SimpleQueue()

    def publish_batch(self, events: Sequence[Message]) -> None:
        self.batches.append([*events])
        if len(self.batches) == 1:
            raise RuntimeError("the event plane is gone")


def test_events_are_published_in_order_and_a_failure_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    published = Published()
    events = CacheEvents(lambda: published.loads.put(time.monotonic()))
    events.put(BlocksRemoved(KEYS[:1]))
    events.start(published)
    times = [published.loads.get(timeout=10) for _ in range(3)]
    assert all(later - sooner >= 0.09 for sooner, later in pairwise(times))
    for key in KEYS * 200:
        events.put(BlocksRemoved((key,)))
    events.stop()
    assert "1 events of the prefix cache, or the load, could not be published" in caplog.text
    assert [event["block_hashes"] for batch in published.batches[1:] for event in batch] == [[-1], [1], [2]] * 200
    assert max(map(len, published.batches)) <= 256


def test_without_a_publisher_the_load_alone_is_told() -> None:
    loads: queue.SimpleQueue[None] = queue.SimpleQueue()
    events = CacheEvents(lambda: loads.put(None))
    events.start(None)
    events.put(BlocksRemoved(KEYS))
    loads.get(timeout=10)
    events.stop()
    events.stop()


# ---- files and the command ----


def test_documented_commands_are_accepted() -> None:
    page = (Path(command.__file__).parent / "README.md").read_text(encoding="utf-8")
    text = f"{page}{command.main.help}".replace("\\\n", "")
    lines = re.findall(r"^ *(python -m bullet_graph\.dynamo .*)$", text, re.MULTILINE)
    assert len(lines) == 4
    for line in lines:
        context = command.main.make_context("dynamo", shlex.split(line.removesuffix("&"))[3:])
        assert set(context.args) <= {"--discovery-backend", "file", "--dyn-tool-call-parser", "hermes"}


def test_a_preset_of_bytes_gets_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "user_cache_path", lambda _: tmp_path)
    folder = command.model_folder("tiny", None)
    assert folder == command.model_folder("tiny", None) == tmp_path / "dynamo" / "tiny"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("text")) == "text"
    assert "<|im_start|>user\nhi" in tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 512


def test_a_folder_is_taken_as_it_is_if_it_has_a_tokenizer(tmp_path: Path) -> None:
    shape = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 64, "vocab_size": 300}
    shape |= {"num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with pytest.raises(ModelError, match=r"give a folder or a hub id with tokenizer\.json"):
        command.model_folder(str(tmp_path), None)
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    assert command.model_folder(str(tmp_path), None) == tmp_path.resolve()


def test_models_that_the_frontend_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="the model's tokenizer, and qwen3-8b has none"):
        command.model_folder("qwen3-8b", None)
    (tmp_path / "dynamo").write_text("")
    monkeypatch.setattr(command, "user_cache_path", lambda _: tmp_path)
    with pytest.raises(ConfigError, match="must take the tokenizer of tiny"):
        command.model_folder("tiny", None)


@pytest.mark.parametrize("found", [None, "1.5.9"])
def test_without_dynamo_the_command_says_what_to_install(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def other(name: str) -> str:
        if name != "ai-dynamo":
            return version(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", other)
    message = refused(CliRunner().invoke(command.main, ["--model", "tiny"]))
    assert f"needs ai-dynamo 1.6, found {found or 'none'}: pip install 'bullet-graph[dynamo]'" in message
    help_text = CliRunner().invoke(command.main, ["--help"])
    assert help_text.exit_code == 0
    assert "--max-queue-len" in help_text.output
    assert "Dynamo Runtime Options: not known here" in help_text.output
