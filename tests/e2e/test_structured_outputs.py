"""Structured outputs of the engine: every output follows its schema or grammar, and the others are as before."""

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import tokenizers
from engines import (
    GREEDY,
    PROMPTS,
    Launches,
    Model,
    at_any_depth,
    block_bytes,
    make,
    make_engine,
    run_to_end,
    short_slices,
    tokens_of,
)
from json_schemas import random_schema

from bullet_graph import Engine, RequestOutput, SamplingParams, StructuredOutputs
from bullet_graph.engine.structured import Grammars
from bullet_graph.errors import SamplingParamsError
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.tokenizer import Tokenizer

NUM_SCHEMAS = 60
MATCHES = re.compile("[a-z]{3}-[0-9]{8,12}(x|yz)")
CODE = StructuredOutputs(regex=MATCHES.pattern)


@pytest.fixture(scope="module")
def tiny() -> Iterator[Engine]:
    with make_engine(max_model_len=512, max_num_seqs=100) as engine:
        yield engine


def structured(engine: Engine, seed: int = 0, n: int = 1, **fields: Any) -> SamplingParams:
    """JSON is steered to its end: a random model would write long texts and numbers, and blanks."""
    assert engine.tokenizer is not None
    likes = {**dict.fromkeys('"}]', 6.0), ",": 3.0, **dict.fromkeys("{[ \n\t\r", -20.0)}
    return SamplingParams(
        seed=seed,
        n=n,
        max_tokens=400,
        logit_bias={engine.tokenizer.encode(character)[0]: value for character, value in likes.items()},
        structured_outputs=StructuredOutputs(**fields),
    )


def texts(engine: Engine, params: SamplingParams) -> list[str]:
    """The samples' texts, all of which have ended by themselves."""
    (output,) = engine.generate([[1, 2, 3]], params, use_tqdm=False)
    assert output.error is None
    assert {sample.finish_reason for sample in output.outputs} == {"stop"}
    return [sample.text for sample in output.outputs]


# ---- what is followed ----


def test_every_json_document_is_valid(tiny: Engine) -> None:
    schemas = [random_schema(seed) for seed in range(NUM_SCHEMAS)]
    params = [structured(tiny, seed, json=schema) for seed, schema in enumerate(schemas)]
    outputs = tiny.generate([[1, 2, 3]] * NUM_SCHEMAS, params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * NUM_SCHEMAS
    for schema, output in zip(schemas, outputs, strict=True):
        (sample,) = output.outputs
        assert sample.finish_reason == "stop", (schema, sample)
        checks = jsonschema.FormatChecker()
        jsonschema.Draft202012Validator(schema, format_checker=checks).validate(json.loads(sample.text))
    assert len({output.outputs[0].text for output in outputs}) > NUM_SCHEMAS / 2


# ---- where an output ends ----


def test_an_output_ends_where_nothing_may_follow(tiny: Engine) -> None:
    params = SamplingParams(max_tokens=50, min_tokens=40, structured_outputs=StructuredOutputs(regex="[0-9]{4}"))
    (text,) = texts(tiny, params)
    assert re.fullmatch("[0-9]{4}", text)


def test_end_of_sequence_is_sampled_only_where_the_grammar_may_end(model: Model) -> None:
    """The checkpoint has an end-of-sequence token, which is favoured above all."""
    with make_engine(model.folder) as engine:
        (eos, *_) = sorted(engine.model_config.eos_token_ids)
        params = SamplingParams(
            max_tokens=60, logit_bias={eos: 100.0}, structured_outputs=StructuredOutputs(regex="[a-z]{5,40}")
        )
        (output,) = engine.generate([[1, 2]], params, use_tqdm=False)
    (sample,) = output.outputs
    assert (sample.token_ids[-1], sample.finish_reason) == (eos, "stop")
    assert re.fullmatch("[a-z]{5,9}", sample.text)


def test_max_tokens_and_stop_strings_still_end(tiny: Engine) -> None:
    digits = SamplingParams(max_tokens=7, seed=3, structured_outputs=StructuredOutputs(regex="[0-9]{30}"))
    longer = dataclasses.replace(digits, max_tokens=99, stop="4")
    cut, stopped = tiny.generate([[1, 2]] * 2, [digits, longer], use_tqdm=False)
    assert (cut.outputs[0].finish_reason, len(cut.outputs[0].token_ids)) == ("length", 7)
    assert stopped.outputs[0].finish_reason == "stop"
    assert re.fullmatch("[0-35-9]{1,29}", stopped.outputs[0].text)


def test_an_output_that_cannot_go_on_ends_with_an_error(tiny: Engine) -> None:
    assert tiny.tokenizer is not None
    digits = [tiny.tokenizer.encode(digit)[0] for digit in "0123456789"]
    params = [
        SamplingParams(structured_outputs=StructuredOutputs(regex="a[0-9]"), bad_words=list("0123456789")),
        GREEDY,
    ]
    wrong, fine = tiny.generate([[1, 2]] * 2, params, use_tqdm=False)
    assert wrong.outputs[0].finish_reason == "error"
    assert wrong.outputs[0].text == "a"
    assert not set(wrong.outputs[0].token_ids) & set(digits)
    assert "could not go on" in str(wrong.error)
    assert fine.error is None
    assert tiny.stats().kv_blocks_used == 0


# ---- among others, in every policy ----


@pytest.fixture(scope="module")
def alone(model: Model) -> list[RequestOutput]:
    """Outputs of a grammar, each prompt by itself."""
    with make_engine(model.folder) as engine:
        return [engine.generate([p], _code(i), use_tqdm=False)[0] for i, p in enumerate(PROMPTS)]


@short_slices
@pytest.mark.parametrize(
    ("depth", "policy"), [(1, "serial"), (3, "mixed:16"), (1, "auto"), (3, "auto")], indirect=["depth"]
)
@pytest.mark.usefixtures("depth")
def test_structured_outputs_among_others(
    model: Model, expected: list[tuple[int, ...]], alone: list[RequestOutput], policy: str
) -> None:
    """Tokens do not depend on what else runs, on the policy, or on steps in flight; free outputs are as before."""
    with make(model, policy) as engine:
        outputs: dict[str, RequestOutput] = {}
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(f"free {i}", prompt, GREEDY)
            engine.add_request(f"code {i}", prompt, _code(i))
            for _ in range(2):
                outputs |= {output.request_id: output for output in engine.step()}
        outputs |= {name: states[-1] for name, states in run_to_end(engine).items()}
        assert engine.stats().kv_blocks_used == 0
    assert [tokens_of(outputs[f"free {i}"])[0] for i in range(len(PROMPTS))] == expected
    assert [tokens_of(outputs[f"code {i}"]) for i in range(len(PROMPTS))] == [tokens_of(one) for one in alone]
    assert all(MATCHES.fullmatch(sample.text) for one in alone for sample in one.outputs)


def _code(seed: int) -> SamplingParams:
    return SamplingParams(seed=seed, n=2, max_tokens=60, structured_outputs=CODE)


@pytest.mark.parametrize("depth", [3], indirect=True)
def test_only_free_rows_are_launched_ahead(model: Model, depth: int, launches: Launches) -> None:
    del depth
    with make_engine(model.folder) as engine:
        for name, params in (("free", GREEDY), ("code", _code(1))):
            engine.add_request(name, [5, 17], params)
        run_to_end(engine)
    steps = [step for step, _ in launches if step.decode is not None]
    slots = [set(step.bitmasks.slots.tolist()) if step.bitmasks is not None else set() for step in steps]
    free = [set(step.decode.slots.tolist()) - own for step, own in zip(steps, slots, strict=True) if step.decode]
    # The free row is in the steps between, whose launch waits for nobody's tokens.
    between = zip(slots, slots[1:], free[1:], strict=False)
    assert any(own and not own_next and free_next for own, own_next, free_next in between)
    assert sum(len(row) for row in free) == GREEDY.max_tokens - 1


@at_any_depth
def test_a_preempted_output_goes_on(model: Model) -> None:
    prompt, digits = [5, 17, 300, 8, 17], StructuredOutputs(regex="[0-9]{35}")
    params = [dataclasses.replace(_code(i), temperature=0.1, structured_outputs=digits) for i in range(4)]
    with make_engine(model.folder, max_model_len=64) as engine:
        expected = engine.generate([prompt] * 4, params, use_tqdm=False)
    with make_engine(model.folder, max_model_len=64, kv_cache_bytes=5 * block_bytes(model)) as engine:
        outputs = engine.generate([prompt] * 4, params, use_tqdm=False)
        assert engine.stats().num_preemptions > 0
    assert [tokens_of(output) for output in outputs] == [tokens_of(output) for output in expected]
    assert all(len(sample.text) == 35 and sample.text.isdecimal() for output in outputs for sample in output.outputs)


# ---- what is refused ----

REFUSED = [
    ({"json": {"not": {"type": "string"}}}, "not"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"type": "array", "contains": {"type": "integer"}}}, "contains"),
    ({"json": {"if": {"type": "string"}, "then": {"minLength": 3}}}, "if"),
    ({"json": {"type": "object", "dependentRequired": {"a": ["b"]}}}, "dependentRequired"),
    ({"json": {"type": "object", "propertyNames": {"maxLength": 3}}}, "propertyNames"),
    ({"json": {"type": "object", "unevaluatedProperties": False}}, "unevaluatedProperties"),
    ({"json": {"uniqueItems": True, "x-guidance": {"lenient": True}}}, "uniqueItems"),
    ({"json": {"oneOf": [{"type": "string"}, {"minLength": 2}]}}, "oneOf"),
    ({"json": {"type": "string", "format": "color"}}, "format: color"),
    ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
    ({"json": {"$ref": "file:///etc/passwd"}}, "file:///etc/passwd"),
    ({"json": {"$ref": "#"}}, "structured_outputs.json"),
    ({"json": {"type": "thing"}}, "type: thing"),
    ({"json": '{"type": '}, "Expecting value"),
    ({"json": "3"}, "object schema"),
    ({"json": {"type": "integer", "multipleOf": 1000003}}, "multipleOf: the least common multiple"),
    ({"json": {"allOf": [{"multipleOf": 997}, {"multipleOf": 0.991}]}}, "multipleOf: the least common multiple"),
    ({"json": {"allOf": [{"pattern": f"a{i}"} for i in range(40)]}}, "pattern: 40 were found"),
    ({"json": {"patternProperties": {f"^k{i}$": {} for i in range(999)}}}, "patternProperties: 999 were found"),
    ({"json": '{"items":' * 5000 + "true" + "}" * 5000}, "nested too deeply"),
    ({"grammar": 'start: %json {"multipleOf": 1000003}'}, "%json"),
    ({"regex": "[a"}, "unclosed character class"),
    ({"regex": "(a?){300}" * 300}, "structured_outputs.regex"),
    ({"grammar": 'start: "a" | foo'}, "foo"),
    ({"grammar": "root ::= " + "(" * 5000}, "structured_outputs.grammar"),
    ({"structural_tag": {"triggers": ["<g"], "structures": [{"begin": "<f", "schema": {}, "end": ""}]}}, "begin"),
    ({"structural_tag": "[]"}, "triggers and structures"),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_supported_is_refused_by_name(tiny: Engine, fields: dict[str, Any], named: str) -> None:
    for _ in range(2):  # the second time from the cache
        with pytest.raises(SamplingParamsError, match=re.escape(named)) as refusal:
            tiny.generate([1], structured(tiny, **fields), use_tqdm=False)
        assert f"structured_outputs.{next(iter(fields))}" in str(refusal.value)
        assert len(str(refusal.value)) < 600


def test_structured_outputs_need_a_tokenizer_with_an_end(no_tokenizer: None, model: Model) -> None:
    del no_tokenizer
    with make_engine() as engine, pytest.raises(SamplingParamsError, match="need a tokenizer"):
        engine.generate([1], SamplingParams(structured_outputs=CODE), use_tqdm=False)
    tokenizer = Tokenizer.from_folder(model.folder)
    assert tokenizer is not None
    nameless = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer.to_json()))
    with pytest.raises(SamplingParamsError, match="names an end-of-sequence token"):
        Grammars(PRESETS["tiny"], nameless).matcher(CODE)


def test_nothing_is_imported_for_free_outputs(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    tiny.generate([1, 2], GREEDY, use_tqdm=False)
    with pytest.raises(ImportError):
        tiny.generate([1, 2], structured(tiny, regex="never seen before"), use_tqdm=False)
