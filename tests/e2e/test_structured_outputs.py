"""Structured outputs of the engine: every output follows its schema or grammar, and the others are as before."""

import asyncio
import dataclasses
import json
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import numpy as np
import openai
import pydantic
import pytest
import tokenizers
from engines import GREEDY, PROMPTS, Launches, Model, block_bytes, collect, make, make_engine, run_to_end, tokens_of
from json_schemas import random_schema
from servers import MODEL, Served, serving

from bullet_graph import AsyncEngine, Engine, RequestOutput, SamplingParams, StructuredOutputs
from bullet_graph.engine.structured import Grammars, Matcher
from bullet_graph.errors import SamplingParamsError
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.tokenizer import Tokenizer, byte_tokenizer

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


# ---- what is followed ----


@pytest.mark.parametrize("vocab_size", [600, 300])
def test_ids_that_the_tokenizer_or_the_model_lacks_may_not_come_next(vocab_size: int) -> None:
    """Models often pad their embeddings; Gemma 3 1B lacks the tokenizer's last token."""
    model = dataclasses.replace(PRESETS["tiny"], vocab_size=vocab_size, eos_token_ids=(257,))
    words = Matcher.bitmasks([Grammars(model, byte_tokenizer(512)).matcher(StructuredOutputs(regex=".*"))])
    allowed = np.unpackbits(words.copy().view(np.uint8), bitorder="little")
    assert len(allowed) == -(-vocab_size // 32) * 32
    assert allowed[:512].any()
    assert not allowed[512:].any()


def test_each_tag_has_its_own_trigger() -> None:
    tags = [{"begin": f"<{name}=x>", "schema": {"type": "integer"}, "end": f"</{name}>"} for name in "fg"]
    of_both = StructuredOutputs(structural_tag={"triggers": ["<f", "<g"], "structures": tags})
    model, tokenizer = dataclasses.replace(PRESETS["tiny"], eos_token_ids=(257,)), byte_tokenizer(512)
    assert all(map(Grammars(model, tokenizer).matcher(of_both).accept, tokenizer.encode("a <g=x>5</g>")))


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
    (output,) = tiny.generate([[1, 2, 3]], params, use_tqdm=False)
    (sample,) = output.outputs
    assert (output.error, sample.finish_reason) == (None, "stop")
    assert re.fullmatch("[0-9]{4}", sample.text)


def test_end_of_sequence_is_sampled_only_where_the_grammar_may_end(engine: Engine) -> None:
    """The checkpoint has an end-of-sequence token, which is favoured above all."""
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


@pytest.mark.parametrize("top_p", [1, 0.9])
def test_an_output_that_cannot_go_on_ends_with_an_error(tiny: Engine, top_p: float) -> None:
    assert tiny.tokenizer is not None
    digits = [tiny.tokenizer.encode(digit)[0] for digit in "0123456789"]
    params = [
        SamplingParams(structured_outputs=StructuredOutputs(regex="a[0-9]"), bad_words=list("0123456789"), top_p=top_p),
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


@pytest.mark.parametrize(
    ("depth", "policy"), [(1, "serial"), (3, "mixed:16"), (1, "auto"), (3, "auto")], indirect=["depth"]
)
@pytest.mark.usefixtures("depth", "short_slices")
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
def test_only_free_rows_are_launched_ahead(depth: int, launches: Launches, engine: Engine) -> None:
    del depth
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


@pytest.mark.usefixtures("depth")
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
    ({"json": '{"minimum": 1e-99999999999999999999}'}, "exponent is too large"),
    ({"json": '{"type": '}, "Expecting value"),
    ({"json": "3"}, "object schema"),
    ({"json": {"type": "integer", "multipleOf": 1000003}}, "multipleOf: the least common multiple"),
    ({"json": {"allOf": [{"multipleOf": 997}, {"multipleOf": 0.991}]}}, "multipleOf: the least common multiple"),
    ({"json": {"allOf": [{"pattern": f"a{i}"} for i in range(40)]}}, "pattern: 40 were found"),
    ({"json": {"patternProperties": {f"^k{i}$": {} for i in range(999)}}}, "patternProperties: 999 were found"),
    ({"json": '{"enum":' + "[" * 60_000 + "]" * 60_000 + "}"}, "nested too deeply"),
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


# ---- over the server: with OpenAI's client, in streams, and while a grammar is compiled ----

MESSAGES: Any = [{"role": "user", "content": "Name a fish."}]


class Fish(pydantic.BaseModel):
    name: Literal["eel", "pike"]
    length_cm: int = pydantic.Field(ge=1, le=300)
    lakes: list[Literal["Como", "Garda"]] = pydantic.Field(max_length=2)


SCHEMA = {"type": "json_schema", "json_schema": {"name": "fish", "schema": Fish.model_json_schema(), "strict": True}}
SERVER = {"max_model_len": 512}


def test_the_client_parses_a_model(client: openai.OpenAI) -> None:
    answer = client.beta.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Fish, n=3, seed=1)
    assert all(isinstance(choice.message.parsed, Fish) for choice in answer.choices)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_a_stream_is_the_same_document(client: openai.OpenAI) -> None:
    ask: Any = {"model": MODEL, "messages": MESSAGES, "response_format": SCHEMA, "seed": 5}
    whole = client.chat.completions.create(**ask).choices[0].message.content
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**ask, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].finish_reason == "stop"
    assert len(chunks) > 10
    Fish.model_validate_json(whole)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_json": Fish.model_json_schema()}, r"\{.*\}"),
        ({"guided_json": json.dumps(Fish.model_json_schema())}, r"\{.*\}"),
        ({"guided_regex": "[a-f]{3}"}, "[a-f]{3}"),
        ({"guided_choice": ["yes", 'é "😀"\n']}, 'yes|é "😀"\n'),
        ({"guided_grammar": 'root ::= "x" [0-9]{2}'}, "x[0-9]{2}"),
        ({"structured_outputs": {"json": Fish.model_json_schema()}}, r"\{.*\}"),
        ({"structured_outputs": {"regex": "[a-f]{3}"}}, "[a-f]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]{2}/ ("+" start)~0..1'}}, r"x[0-9]{2}(\+x[0-9]{2})*"),
        ({"structured_outputs": {"json_object": True}, "max_tokens": 9, "min_tokens": 9}, r"\{.*"),
        ({"response_format": {"type": "json_object"}, "max_tokens": 9}, r"\{.*"),
        ({"response_format": {"type": "text"}, "max_tokens": 9}, ".*"),
        ({"response_format": SCHEMA | {}}, r"\{.*\}"),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "triggers": ["e"],
                    "structures": [{"begin": "e", "schema": {"const": 7}, "end": ";"}],
                },
                "max_tokens": 60,
            },
            "([^e]|e7;)*(e7?)?",
        ),
    ],
    ids=lambda value: str(value)[:48],
)
def test_every_spelling(served: Served, extra: dict[str, Any], pattern: str) -> None:
    found = served.complete(prompt="A", seed=2, **({"max_tokens": 300} | extra))["choices"][0]
    assert re.fullmatch(pattern, found["text"], re.DOTALL)
    if "max_tokens" not in extra:
        assert found["finish_reason"] == "stop"


def test_what_cannot_be_followed_is_a_400_that_names_it(client: openai.OpenAI, served: Served) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "string"}}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=r"response_format.*Unimplemented keys: \[.*not") as refusal:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=form, stream=stream)
        assert refusal.value.status_code == 400
    impossible = {"prompt": "A", "guided_regex": "a{1,9}[0-9]", "bad_words": list("0123456789"), "n": 4, "seed": 1}
    before = served.metrics()
    assert "could not go on" in served.post("/v1/completions", **impossible).json()["error"]["message"]
    text = served.post("/v1/completions", **impossible, stream=True).text
    assert "could not go on" in text
    assert '"finish_reason":"error"' not in text
    more = {name: value - before[name] for name, value in served.metrics().items() if "request_success_total" in name}
    assert {name: value for name, value in more.items() if value} == {
        'request_success_total{finished_reason="error"}': 2
    }


# ---- compiling ----


class SlowGrammars:
    """Lets compilations wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()
        self.threads: list[str] = []
        whole = Grammars._compile

        def slow(grammars: Grammars, structured: StructuredOutputs) -> Matcher | str:
            self.threads.append(threading.current_thread().name)
            self.begun.release()
            assert self.may_end.wait(30)
            return whole(grammars, structured)

        monkeypatch.setattr(Grammars, "_compile", slow)


def test_others_are_served_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowGrammars(monkeypatch)
    with serving() as served, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(served.complete, prompt="A", guided_regex="[w]{9}", max_tokens=20)
        assert slow.begun.acquire(timeout=30)
        assert served.complete(prompt="A", max_tokens=4)["usage"]["completion_tokens"] == 4
        assert served.http.get("/health").status_code == 200
        assert not waiting.done()
        slow.may_end.set()
        assert waiting.result(30)["choices"][0]["text"] == "w" * 9
    assert all("grammars" in name for name in slow.threads)


async def test_an_abort_while_a_grammar_is_compiled_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowGrammars(monkeypatch)
    async with AsyncEngine(make_engine()) as engine:
        params = SamplingParams(structured_outputs=StructuredOutputs(regex="[v]{9}"), n=2)
        task = asyncio.create_task(collect(engine, [1, 2], params))
        assert await asyncio.to_thread(slow.begun.acquire, True, 30)
        assert engine.num_waiting == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        slow.may_end.set()
        wrong = SamplingParams(structured_outputs=StructuredOutputs(regex="[v"))
        with pytest.raises(SamplingParamsError, match="unclosed character class"):
            await collect(engine, [1, 2], wrong)
        assert len((await collect(engine, [1, 2], GREEDY))[-1].outputs[0].token_ids) == GREEDY.max_tokens
        assert engine.num_waiting == 0
    # Each is compiled once, in a thread of its own.
    assert [("grammars" in name) for name in slow.threads] == [True, True]
