"""Tool calls in texts: each format, however the text is cut."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from bullet_graph import SamplingParamsError
from bullet_graph.serve.tools import FORCED, FORMATS, ToolCallParser, ToolFormat, forced_calls, format_of, tool_calls

Parsed = tuple[str, list[tuple[str, str]]]


def parse(form: ToolFormat, *pieces: str, most_calls: int | None = None) -> Parsed:
    """Words and calls, from what is told piece by piece."""
    parser = ToolCallParser(form, most_calls=most_calls)
    words, calls = "", list[list[str]]()
    for new, deltas in [*map(parser.push, pieces), parser.finish()]:
        words += new
        for delta in deltas:
            if delta.name is not None:
                assert len(delta.call_id or "") == 9
                assert delta.number == len(calls)
                calls.append([delta.name, ""])
            assert delta.number == len(calls) - 1
            calls[-1][1] += delta.arguments
    return words, [(name, arguments) for name, arguments in calls]


HERMES, LLAMA, MISTRAL = (FORMATS[name] for name in ("hermes", "llama3_json", "mistral"))
ADD, NOW = '{"a": 1, "b": "}\\"{"}', "{}"
CASES: list[tuple[ToolFormat, str, Parsed]] = [
    (HERMES, "Just  words. ", ("Just  words. ", [])),
    (
        HERMES,
        f'One moment.\n<tool_call>\n{{"name": "add", "arguments": {ADD}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "now", "arguments": {NOW}}}\n</tool_call>',
        ("One moment.", [("add", ADD), ("now", NOW)]),
    ),
    (HERMES, f'<tool_call>{{"arguments": {NOW}, "name": "now"}}</tool_call> Done.', ("Done.", [("now", NOW)])),
    (HERMES, '<tool_call>{"name": "now"}</tool_call>', ("", [("now", NOW)])),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')])),
    # A brace too few, as models write it.
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>Yes', ("Yes", [("f", '{"a": 1}')])),
    (HERMES, "The tag <tool_call> begins a call.", ("The tag <tool_call> begins a call.", [])),
    (HERMES, "<tool_call>\n{oops}\n</tool_call>", ("<tool_call>\n{oops}\n</tool_call>", [])),
    (HERMES, 'Wait <tool_call>{"name": "f", "argum', ("Wait ", [])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', ("", [("f", '{"a": 1')])),
    (HERMES, "a < b <tool", ("a < b <tool", [])),
    (LLAMA, f'{{"name": "add", "parameters": {ADD}}}', ("", [("add", ADD)])),
    (LLAMA, '{"name": "now", "parameters": {}}' + " " * 400 + '{"x": 1}', ("", [("now", NOW)])),
    (HERMES, '<tool_call>{"name": "now", "arguments": {}} {"x": 1}</tool_call> bye', ("bye", [("now", NOW)])),
    (FORCED, '[\n\n{\n "name": "add", "param', ("", [])),
    (FORCED, "[ ", ("", [])),
    (
        LLAMA,
        f'\n{{"type": "function", "name": "add", "parameters": {ADD}}}; {{"name": "now", "parameters": {NOW}}}\n',
        ("", [("add", ADD), ("now", NOW)]),
    ),
    (LLAMA, 'It is {"name": "f", "parameters": {}}', ('It is {"name": "f", "parameters": {}}', [])),
    (LLAMA, ' {"name": "Ann", "age": 5} is it', (' {"name": "Ann", "age": 5} is it', [])),
    (LLAMA, '{"answer": 4', ('{"answer": 4', [])),
    (LLAMA, " ", (" ", [])),
    (LLAMA, '{"name": "\\ud83d", "parameters": {}}', ('{"name": "\\ud83d", "parameters": {}}', [])),
    (LLAMA, " " * 400 + '{"name": "f", "parameters": {}}', (" " * 400 + '{"name": "f", "parameters": {}}', [])),
    (LLAMA, '{"name": "' + "x" * 3000 + '", "parameters": {}}', ("", [("x" * 3000, NOW)])),
    (
        MISTRAL,
        f'Well. [TOOL_CALLS] [{{"name": "add", "arguments": {ADD}, "id": "x"}}, {{"name": "now", "arguments": {NOW}}}]',
        ("Well.", [("add", ADD), ("now", NOW)]),
    ),
    (MISTRAL, f"[TOOL_CALLS]add{ADD}[TOOL_CALLS]now{NOW}", ("", [("add", ADD), ("now", NOW)])),
    (MISTRAL, f"[TOOL_CALLS]add[CALL_ID]a1[ARGS]{ADD}", ("", [("add", ADD)])),
    (MISTRAL, "[TOOL_CALLS]" + "x" * 400 + "{}", ("[TOOL_CALLS]" + "x" * 400 + "{}", [])),
    (FORCED, f'[{{"name": "add", "parameters": {ADD}}},\n{{"name": "now", "parameters": {NOW}}}]',
     ("", [("add", ADD), ("now", NOW)])),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "expected"), CASES, ids=lambda value: str(value)[:40])
def test_words_and_calls_of_a_text(form: ToolFormat, text: str, expected: Parsed) -> None:
    assert parse(form, text) == parse(form, *text) == expected


PIECES = st.text() | st.sampled_from(
    [
        *'{}[]",:; \n\\x<',
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "name", "\\u00e9", "x" * 301, " " * 301),
        *('"name": "f", ', '"arguments": {', '"parameters": {', '{"name": "f", "arguments": {}}'),
    ]
)


@given(st.sampled_from([*FORMATS.values(), FORCED]), st.lists(PIECES), st.randoms())
def test_where_a_text_is_cut_makes_no_difference(form: ToolFormat, parts: list[str], random: Any) -> None:
    text = "".join(parts)
    cuts = sorted(random.randrange(len(text) + 1) for _ in range(random.randrange(6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(form, *pieces) == parse(form, *parts) == parse(form, text) == parse(form, *text)


TEXTS = st.text(max_size=9)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda items: st.lists(items, max_size=3) | st.dictionaries(TEXTS, items, max_size=3),
    max_leaves=4,
)


@settings(max_examples=40)
@given(
    st.text().filter(lambda text: "<" not in text and "[" not in text),
    st.lists(st.tuples(st.text(min_size=1), st.dictionaries(TEXTS, JSON, max_size=3)), min_size=1, max_size=3),
    st.sampled_from([None, 1]),
)
def test_calls_come_out_unchanged(words: str, calls: list[tuple[str, dict[str, Any]]], most_calls: int | None) -> None:
    for form, key in ((HERMES, "arguments"), (LLAMA, "parameters"), (MISTRAL, "arguments"), (FORCED, "parameters")):
        texts = [json.dumps({"name": name, key: arguments}) for name, arguments in calls]
        text = {
            HERMES: words + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in texts),
            LLAMA: "; ".join(texts),
            MISTRAL: f"{words}[TOOL_CALLS] [{', '.join(texts)}]",
            FORCED: f"[{', '.join(texts)}]",
        }[form]
        found, told = parse(form, text, most_calls=most_calls)
        assert found == (words.rstrip() if form.begin else "")
        assert [(name, json.loads(arguments)) for name, arguments in told] == calls[:most_calls]


def test_long_answers_take_time_in_proportion() -> None:
    """In 40,000 pieces: arguments, an object that is no call, white space, and words."""
    piece = "{[<" + " "
    for form in FORMATS.values():
        for begin in ('{"name": "f", "arguments": {"a": "', '{"a": "', "", " "):
            parser = ToolCallParser(form)
            begin_s = time.process_time()
            parser.push(form.begin + begin)
            for _ in range(40_000):
                parser.push(piece if begin.strip() else " ")
            assert time.process_time() - begin_s < 1


def test_arguments_are_told_as_they_come_and_the_name_first() -> None:
    parser = ToolCallParser(LLAMA)
    told = [parser.push(piece)[1] for piece in ('{"name": "f", ', '"parameters": ', '{"a"', ": 1", "}", "}")]
    assert [[(delta.name, delta.arguments) for delta in deltas] for deltas in told] == [
        [], [], [("f", ""), (None, '{"a"')], [(None, ": 1")], [(None, "}")], []
    ]  # fmt: skip
    (call,) = tool_calls(told[2], streamed=True)
    assert call.pop("id")
    assert call == {"index": 0, "type": "function", "function": {"name": "f", "arguments": '{"a"'}}
    assert "index" not in tool_calls(told[2], streamed=False)[0]
    assert tool_calls(told[3], streamed=True) == [{"index": 0, "function": {"arguments": ": 1"}}]


def test_a_format_is_known_by_its_template() -> None:
    for template, form in (
        ("{% for tool in tools %}{% endfor %}<tool_call>", HERMES),
        ('{% if tools %}Respond in the format {"name": function name, "parameters": …', LLAMA),
        (r'{{ "Respond in the format {\"name\": function name" + tools }}', LLAMA),
        ("{{ '<|python_tag|>' }}{{ tools }}", LLAMA),
        ("{{ '<|python_tag|>' }}", None),
        ("[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS]", MISTRAL),
        ("<tool_call>\n<function=f>{{ tools }}", None),
        ("<|im_start|>{{ messages }}", None),
    ):
        assert format_of(template) == form


def test_the_schema_of_forced_calls_follows_references() -> None:
    places = ("#/$defs/P", "#/properties/p", "#", "https://a.b/n")
    properties = {key: {"$ref": place} for key, place in zip("pqrn", places, strict=True)}
    inner = {"$id": places[3], "properties": {"s": {"$ref": "#/$defs/S"}}, "$defs": {"S": {"const": {"$ref": "#"}}}}
    own = {"$id": "https://a.b/f", "properties": properties, "$defs": {"P": {"type": "integer"}, "N": inner}}
    other = own | {"$defs": {"P": {"type": "null"}, "N": inner}}
    schema = forced_calls({"f": own, "g": {}, "h": other, "i": other | {"$id": "tool:/1"}}, parallel=False)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert "maxItems" not in forced_calls({"f": own}, parallel=True)
    assert schema["items"]["anyOf"][1]["properties"]["parameters"] == {"type": "object", "$id": "tool:/1"}
    of_f = [{"p": 1}, {"q": 1}, {"r": {"p": 1}}]
    of_all, of_none = ({"n": {"s": {"$ref": place}}} for place in ("#", "#/items"))
    for parameters, names in (*((one, ["f"]) for one in of_f), (of_all, ["f", "h", "i"]), (of_none, []), (5, [])):
        calls = [[{"name": name, "parameters": parameters}] for name in "fhi"]
        assert [call[0]["name"] for call in calls if Draft202012Validator(schema).is_valid(call)] == names
    with pytest.raises(SamplingParamsError, match=r"`tools`: .* name one tool"):
        forced_calls({"f": {"description": "a" * 2**17}}, parallel=True)
