"""Whatever comes, a bad request is refused with 4xx and a reason, and the server goes on."""

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import CHECKS
from servers import Served, serving

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
DESCRIBED = (COMPLETIONS, CHATS, "/tokenize", "/detokenize", "/v1/models", "/v1/models/{model}", "/health", "/version")
USER = [{"role": "user", "content": "x"}]
CALLED = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[1]"}}]}
TOOL = {"type": "function", "function": {"name": "turn"}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(max_model_len=64, max_body_bytes=20_000, max_prompt_tokens=40, request_timeout_s=20) as served:
        yield served
        assert served.complete(prompt=[1], max_tokens=2)


def refused(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    is_long = error["message"].startswith("this model's maximum context length is ")
    assert (error["code"] == "context_length_exceeded") == is_long
    return str(error["message"])


def check(response: httpx.Response, body: dict[str, Any], message: str) -> None:
    """It is refused with this message, and the field is named for programs."""
    assert message in refused(response)
    error = response.json()["error"]
    if error["code"] is None and body.keys().isdisjoint({"prompt", "half \ud800"}):
        assert error["param"] in {*body, "structured_outputs"}


# Beside a prompt of one token, unless the request gives another; and what the answer says of it.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "`prompt` must be a text, token ids"),
    ({"prompt": []}, "none of them empty"),
    ({"prompt": [[]]}, "none of them empty"),
    ({"prompt": [1, "a"]}, "`prompt` must be"),
    ({"prompt": [-1]}, "`prompt` must be"),
    ({"prompt": [True]}, "`prompt` must be"),
    ({"prompt": ["x"] * 129}, "up to 128"),
    ({"prompt": ["x"] * 65, "n": 2}, "at most 128 outputs, found 65 prompts with `n`=2"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": [512]}, "token id 512 is outside the vocabulary of 512 tokens"),
    ({"prompt": [1] * 41}, "length is 64 tokens; a prompt may have at most 40 tokens here, found 41"),
    ({"prompt": "x" * 41}, "a prompt may have at most 40 tokens here, found 41"),
    ({"prompt": "x" * 481}, "no text of more than 480 characters fits, found 481 characters"),
    ({"prompt": "half \ud800 a pair"}, "half a surrogate pair"),
    ({"max_tokens": 64}, "length is 64 tokens; found 1 of the prompt + 64 of the output: ask for at most 63"),
    ({"max_tokens": -1}, "`max_tokens`: input should be greater than or equal to 0, found -1"),
    ({"max_tokens": 0}, "`max_tokens` of 0 is for prompts alone"),
    ({"max_tokens": "5"}, "`max_tokens`: input should be a valid integer, found '5'"),
    ({"max_tokens": 10**30}, "`max_tokens`"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens must be between 0 and max_tokens"),
    ({"temperature": -0.1}, "`temperature`"),
    ({"top_p": 0}, "`top_p`"),
    ({"n": 129}, "`n`"),
    ({"n": True}, "`n`: input should be a valid integer, found True"),
    ({"seed": 2**63}, "`seed`"),
    ({"stop": ""}, "`stop` must be a text, or a list of up to 16"),
    ({"stop": ["a"] * 17}, "`stop` must be"),
    ({"stop_token_ids": [512]}, "stop_token_ids holds 512"),
    ({"logprobs": 21}, "`logprobs`"),
    ({"prompt_logprobs": 21}, "`prompt_logprobs`"),
    ({"prompt_logprobs": -1}, "`prompt_logprobs`"),
    ({"echo": True, "logprobs": 1, "stream": True}, "`stream` has no log-probabilities"),
    ({"stream": 1}, "`stream`"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "`stream_options` are for streams"),
    ({"stream": True, "stream_options": {"usage": True}}, "`stream_options.usage` is no field"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "`stream_options.include_obfuscation`"),
    ({"cache_salt": ""}, "`cache_salt`"),
    ({"slo": {"ttft_ms": 0}}, "`slo.ttft_ms`"),
    ({"slo": {"ttft": 5}}, "`slo.ttft` is no field"),
    ({"slo": "ttft:5"}, "`slo`"),
    ({"max_token": 5}, "`max_token` is no field of this request: leave it out, or correct its name"),
    ({"max-tokens": 5}, "`max-tokens` is no field of this request"),
    ({"suffix": "x"}, '`suffix` is not supported by this server: leave it out, or give ""'),
    *(({"best_of": best, "n": 2}, "`best_of` is not supported") for best in (True, 3)),
    ({"frequency_penalty": 2.5}, "`frequency_penalty`: input should be less than or equal to 2"),
    ({"logit_bias": {"5": 101}}, "`logit_bias.5`: input should be less than or equal to 100"),
    ({"logit_bias": {"sea": 1}}, "`logit_bias.sea"),
    ({"logit_bias": {"512": 1}}, "logit_bias holds 512, outside the vocabulary"),
    ({"model": 5}, "`model`"),
    ({"half \ud800": 1}, "names of fields must be valid Unicode"),
]


def shown(value: object) -> str:
    return str(value)[:50].encode("ascii", "replace").decode()


@pytest.mark.parametrize(("body", "message"), BAD, ids=shown)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_bad_completion(served: Served, body: dict[str, Any], message: str, stream: bool) -> None:
    content = json.dumps({"prompt": [1], "stream": stream} | body)
    check(served.http.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"}), body, message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": None}, "`messages` must be a list of messages"),
        ({"messages": []}, "`messages` must be a list of messages"),
        ({"messages": [*USER, 5]}, "`messages.1`: input should be a valid dictionary, found 5"),
        ({"messages": [*USER, {"content": "x"}]}, "`messages.1.role` is required"),
        ({"messages": [*USER, {"role": "user"}]}, "`messages.1`: `content` is required of role user"),
        ({"messages": [{"role": "tool", "content": None}]}, "`messages.0`: `content` is required of role tool"),
        ({"messages": [{"role": "function", "content": "x"}]}, "`messages.0.role`: input should be 'system',"),
        (
            {"messages": [*USER, {"role": "user", "content": [{"type": "image_url"}]}]},
            '`messages.1.content` must be a text, or a list of {"type": "text", "text": …} (no images, audio or '
            "files); found [{'type': 'image_url'}]",
        ),
        ({"tool_choice": "any"}, '`tool_choice` must be "none", "auto", "required", or {"type": "function", "f'),
        ({"tool_choice": "required"}, "`tools` lacks"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "`tools` lacks"),
        ({"tools": [{}]}, "`tools.0.type` is required"),
        ({"tools": [TOOL] * 2}, "`tools` must have different names"),
        ({"tools": [TOOL] * 129}, "`tools`: list should have at most 128 items"),
        ({"messages": [CALLED]}, "a JSON object's text, found '[1]'"),
        ({"stream_options": 5}, "`stream_options`: input should be a valid dictionary, found 5"),
        ({"structured_outputs": {"json": 5}}, "`structured_outputs.json`: input should be a valid string, found 5"),
        ({"chat_template_kwargs": {"messages": []}}, "`chat_template_kwargs` must name variables"),
        ({"stream": True, "prompt_logprobs": 1}, "`stream` has no log-probabilities of the prompt"),
        (
            {"guided_json": {"not": {}}},
            "structured_outputs.json (response_format, guided_json) is not supported or too",
        ),
        ({"guided_jsno": {}}, "`guided_jsno` is no field of this request"),
        (
            {"include_stop_str_in_output": True},
            "`include_stop_str_in_output` is not supported by this server: leave it out, or give false",
        ),
        ({"messages": [{"role": "user", "content": "x" * 60}]}, "a prompt may have at most 40 tokens"),
        ({"messages": [USER[0] | {"content": ""}] * 41}, "as many messages, found 41 messages"),
        ({"messages": [USER[0] | {"content": "x" * 300}] * 2}, "no text of more than 480 characters fits, found 600"),
        ({"response_format": {"type": "yaml"}}, "`response_format.type`: input should be 'text', 'json_object'"),
        ({"response_format": {"type": "json_schema"}}, "`response_format`: type json_schema needs json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "and no other type has it"),
        ({"response_format": {"type": "text", "triggers": ["a"]}}, "only structural_tag has structures and triggers"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one of json, regex, choice, grammar"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "exclude each other"),
        ({"structured_outputs": {"backend": "x"}}, "`structured_outputs.backend` is no field"),
        ({"guided_choice": []}, "structured_outputs.choice must be a non-empty sequence of non-empty strings"),
        ({"top_logprobs": 2}, "`top_logprobs` needs `logprobs`"),
        ({"logprobs": 2}, "`logprobs`"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "the old name of"),
        ({"prompt": "x"}, "`prompt` is no field"),
    ],
    ids=shown,
)
def test_a_bad_chat(served: Served, body: dict[str, Any], message: str) -> None:
    check(served.post(CHATS, **({"messages": USER} | body)), body, message)


BODIES = (
    *(b"", b"{", b"null", b"[]", b'"text"', b"5", b"\xff\xfe", b'{"prompt": "x"', b"[" * 9000),
    *(b'{"prompt": NaN}', b'{"a": 1e999}'),
)


@pytest.mark.parametrize("content", BODIES, ids=lambda content: content[:12].decode("latin-1"))
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_body_that_is_no_request(served: Served, path: str, content: bytes) -> None:
    refused(served.http.post(path, content=content, headers={"Content-Type": "application/json"}))


def test_what_a_request_needs(served: Served) -> None:
    assert "`prompt` is required" in refused(served.post(COMPLETIONS))
    assert "`messages` is required" in refused(served.post(CHATS))
    text = {"Content-Type": "text/plain"}
    message = refused(served.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=text))
    assert "Content-Type: application/json" in message
    assert refused(served.http.post(COMPLETIONS)).startswith("a JSON object is required as the body")
    for content in (b'{"prompt": "\xff"}', gzip.compress(b'{"prompt": "x"}'), b"[" * 10_000):
        message = refused(served.http.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"}))
        assert "the body cannot be read: JSON in UTF-8" in message


def test_a_huge_body_is_refused_before_it_is_read(served: Served) -> None:
    assert "at most 20,000 bytes (--max-body-size)" in refused(served.post(COMPLETIONS, prompt="x" * 30_000), 413)
    endless = (b"x" * 1000 for _ in range(100))
    assert "found more than 20,000 bytes" in refused(served.http.post(COMPLETIONS, content=endless), 413)


@pytest.mark.parametrize("path", DESCRIBED)
def test_requests_that_schemathesis_makes_up_are_answered_as_described(served: Served, path: str) -> None:
    """From the server's own OpenAPI description: good, bad and absurd ones."""
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    operations = {operation.path: operation for operation in (result.ok() for result in schema.get_all_operations())}
    assert operations.keys() == set(DESCRIBED)
    seen: Counter[int] = Counter()
    for mode in schemathesis.GenerationMode:

        @settings(
            max_examples=8,
            database=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
        )
        @given(case=operations[path].as_strategy(generation_mode=mode))
        def answer(case: schemathesis.Case) -> None:
            response = case.call()
            seen[response.status_code] += 1
            # That what fits the description is accepted cannot be told from it: a prompt may be too long.
            # A body that is too long is refused unread, which the library does not count as a refusal.
            excluded = ["positive_data_acceptance"]
            excluded += ["negative_data_rejection"] if response.status_code == 413 else []
            case.validate_response(response, excluded_checks=[CHECKS.get_one(name) for name in excluded])

        # Paths without parameters have nothing that could be wrong.
        with suppress(Unsatisfiable):
            answer()
    if path in (COMPLETIONS, CHATS):
        # How many of those that fit the description also fit the limits is a matter of luck.
        assert seen[400] > 10
    assert all(status < 500 for status in seen)
