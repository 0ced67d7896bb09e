"""Every field of SamplingParams: what it takes, and what it says when it does not."""

import math
from typing import Any

import pytest

from bullet_graph.errors import BulletGraphError, RequestError, SamplingParamsError
from bullet_graph.sampling_params import MAX_LOGPROBS, SamplingParams, StructuredOutputs

GOOD = [
    ("temperature", (0, 0.0, 1, 0.7, 1e6)),
    ("top_p", (1, 1.0, 0.5, 1e-60)),
    ("top_k", (-1, 0, 1, 2**40)),
    ("min_p", (0, 0.0, 0.3, 1)),
    ("seed", (None, 0, 2**63 - 1)),
    ("max_tokens", (0, 1, 2**40)),
    ("min_tokens", (0, 16)),
    ("stop", ((), "a", ["a", "bc"], ("a",))),
    ("stop_token_ids", ((), [0, 5], (7,))),
    ("ignore_eos", (True, False)),
    ("logprobs", (None, 0, MAX_LOGPROBS)),
    ("prompt_logprobs", (None, 0, MAX_LOGPROBS)),
    ("repetition_penalty", (1, 0.5, 1e3)),
    ("frequency_penalty", (0, -2, 1.5)),
    ("presence_penalty", (0, 2, -0.5)),
    ("logit_bias", ({}, {5: 1, 0: -100.0}, ((3, 0.5),), dict.fromkeys(range(1023), 1))),
    ("cache_salt", (None, "a")),
    ("bad_words", ((), ["a", "bc"])),
    ("n", (1, 3, 16384)),
]

BAD = [
    ("temperature", (-0.1, math.nan, math.inf, 1e7, "1", None, True)),
    ("top_p", (0, -0.5, 1.5, math.nan, "1", None)),
    ("top_k", (-2, 1.5, math.nan, "5", None, True)),
    ("min_p", (-0.1, 1.1, math.nan, None)),
    ("seed", (-1, 2**63, 1.5, "1", True)),
    ("max_tokens", (-1, 1.5, math.nan, "5", None, True)),
    ("min_tokens", (-1, 17, 1.5, None)),
    ("stop", ("", ["a", ""], [1], 5, None, b"x")),
    ("stop_token_ids", ([-1], [1.5], ["1"], [True], 5, None, "12")),
    ("ignore_eos", (None, "no", 2)),
    ("logprobs", (-1, MAX_LOGPROBS + 1, 1.5, True, "1")),
    ("prompt_logprobs", (-1, MAX_LOGPROBS + 1, 1.5, True, "1")),
    ("repetition_penalty", (0, -1, math.nan, math.inf, None, "1")),
    ("frequency_penalty", (-2.1, 3, math.nan, None)),
    ("presence_penalty", (2.1, True, "1")),
    ("logit_bias", ({5: 101}, {-1: 0}, {"5": 1}, {5: math.nan}, {5: None}, dict.fromkeys(range(1024), 1), 5, "x")),
    ("logit_bias", (((5, 1), (5, 2)),)),
    ("cache_salt", ("", 1)),
    ("bad_words", ("", "abc", [""], [1], None)),
    ("n", (0, -1, 16385, 1.5, None, True)),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD for value in values])
def test_good_values_are_taken(name: str, value: object) -> None:
    params = SamplingParams(**{name: value})  # type: ignore[arg-type]
    if name in ("stop", "stop_token_ids", "bad_words"):
        assert getattr(params, name) == ((value,) if isinstance(value, str) else tuple(value))  # type: ignore[arg-type]
    elif name == "logit_bias":
        assert dict(params.biases) == dict(value)  # type: ignore[call-overload]
    else:
        assert getattr(params, name) == value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD for value in values])
def test_bad_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(SamplingParamsError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"{name} must be ")
    assert message.endswith(f"got {value!r}")
    assert isinstance(caught.value, (RequestError, ValueError, BulletGraphError))


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    assert SamplingParams(max_tokens=20, min_tokens=20).min_tokens == 20
    with pytest.raises(SamplingParamsError, match=r"between 0 and max_tokens \(20\), got 21"):
        SamplingParams(max_tokens=20, min_tokens=21)


def test_lists_are_copied_so_that_they_cannot_change_under_the_engine() -> None:
    stop, ids = ["a"], [1]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("b")
    ids.append(2)
    assert (params.stop, params.stop_token_ids) == (("a",), (1,))
    assert hash(params) == hash(SamplingParams(stop="a", stop_token_ids=(1,)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, structural_tag; got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"json": 3}, "json must be a JSON object, or its text"),
        ({"json": {"default": {1, 2}}}, "json must be a JSON object, or its text"),
        ({"regex": ""}, "regex must be a non-empty string"),
        ({"choice": "yes"}, "choice must be a non-empty sequence of non-empty strings"),
        ({"choice": []}, "choice must be a non-empty sequence"),
        ({"choice": ["a", 1]}, "choice must be a non-empty sequence"),
        ({"json_object": "yes"}, "json_object must be true or false"),
        ({"grammar": "x" * 131073}, "grammar may have at most 131072 characters, got 131073"),
    ],
)
def test_structured_outputs_that_say_nothing_clear_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingParamsError, match=message):
        StructuredOutputs(**fields)


def test_structured_outputs_are_frozen_values() -> None:
    schema, choice = {"type": "object"}, ["a", "b"]
    by_schema, by_choice = StructuredOutputs(json=schema), StructuredOutputs(choice=choice)
    schema["type"], choice[0] = "array", "c"
    assert (by_schema.kind, by_schema.json) == ("json", '{"type": "object"}')
    assert (by_choice.kind, by_choice.choice) == ("choice", ("a", "b"))
    assert hash(by_schema) == hash(StructuredOutputs(json='{"type": "object"}'))
    with pytest.raises(SamplingParamsError, match="structured_outputs must be None or StructuredOutputs"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
def test_each_penalty_adjusts_logits(name: str) -> None:
    assert SamplingParams(**{name: 1.5}).adjusts_logits  # type: ignore[arg-type]
