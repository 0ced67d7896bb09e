"""Tools as real clients use them, with chat templates in the formats of Llama 3.1, Hermes and Qwen, and Mistral."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest
import tokenizers
from checkpoints import EOS_TOKEN_ID, write_checkpoint
from servers import MODEL, Served, serving

from bullet_graph.models.tokenizer import Tokenizer
from bullet_graph.runtime.cpu import CpuExecutor
from bullet_graph.runtime.step import StepResult

CHATS = "/v1/chat/completions"
TEMPLATES = {
    "llama3_json": """{{- bos_token }}
{%- if tools %}
    {{- '(system) Answer with {"name": function name, "parameters": its arguments}. ' }}
    {%- for tool in tools %}{{- tool.function | tojson }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if "tool_calls" in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '(assistant) {"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + "}" }}
    {%- elif message.role == "tool" %}
        {{- "(ipython) " + message.content }}
    {%- else %}
        {{- "(" + message.role + ") " + message.content }}
    {%- endif %}
{%- endfor %}""",
    "hermes": """{%- if tools %}
    {{- "(system) <tools>" }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- "</tools> <tool_call>" }}
{%- endif %}
{%- for message in messages %}
    {{- "(" + message.role + ") " + message.content }}
    {%- for call in message.tool_calls or [] %}
        {%- set called = {"name": call.function.name, "arguments": call.function.arguments} %}
        {{- "<tool_call>" + called | tojson + "</tool_call>" }}
    {%- endfor %}
{%- endfor %}""",
    "mistral": """{{- bos_token }}
{%- if tools %}{{- "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception("ids have 9 characters") }}{%- endif %}
            {{- {"name": call.function.name, "arguments": call.function.arguments, "id": call.id} | tojson }}
        {%- endfor %}
        {{- "]" }}
    {%- elif message.role == "tool" %}
        {{- "[TOOL_RESULTS] " + message.content + message.tool_call_id + "[/TOOL_RESULTS]" }}
    {%- else %}
        {{- "(" + message.role + ") " + message.content }}
    {%- endif %}
{%- endfor %}""",
}
WEATHER, CLOCK = '{"city": "Rome", "days": 2}', "{}"
TWO_CALLS = {
    "llama3_json": f'{{"name": "weather", "parameters": {WEATHER}}}; {{"name": "clock", "parameters": {CLOCK}}}',
    "hermes": f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "clock", "arguments": {CLOCK}}}\n</tool_call>',
    "mistral": f'Let me see.[TOOL_CALLS] [{{"name": "weather", "arguments": {WEATHER}}}, '
    f'{{"name": "clock", "arguments": {CLOCK}}}]',
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "…", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "clock"}},
]
SIDES = {
    "type": "object",
    "properties": {"side": {"enum": ["left", "right"]}, "then": {"$ref": "#/properties/side"}},
    "required": ["side", "then"],
    "additionalProperties": False,
}
FEW: list[Any] = [
    {"type": "function", "function": {"name": "turn", "parameters": SIDES}},
    {"type": "function", "function": {"name": "stop", "parameters": SIDES | {"required": []}}},
]
ASK = {"role": "user", "content": "How is the weather?"}


class Speaker:
    """What the model says next, whatever it computes."""

    def __init__(self, served: Served) -> None:
        self.served = served
        tokenizer = served.engine.engine.tokenizer
        assert tokenizer is not None
        self.tokenizer: Tokenizer = tokenizer
        self.ids: list[int] = []

    def says(self, text: str) -> None:
        self.ids = [*self.tokenizer.encode(text, False), EOS_TOKEN_ID]

    def prompt(self, **body: Any) -> str:
        ids = self.served.post("/tokenize", **body).json()["tokens"]
        return str(self.served.post("/detokenize", tokens=ids).json()["prompt"])


@pytest.fixture(scope="module", params=TEMPLATES)
def speaker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaker]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(folder, "llama", num_layers=1)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATES[request.param])
    with pytest.MonkeyPatch.context() as patch, serving(folder, max_model_len=1024) as served:
        speaker, wait = Speaker(served), CpuExecutor.wait
        speaker.name = request.param  # type: ignore[attr-defined]

        def scripted(executor: CpuExecutor, ticket: int) -> StepResult:
            result = wait(executor, ticket)
            if len(result.token_ids) == 1 and speaker.ids:
                result = replace(result, token_ids=np.array([speaker.ids.pop(0)], np.int32))
            return result

        patch.setattr(CpuExecutor, "wait", scripted)
        yield speaker


@pytest.fixture
def client(speaker: Speaker) -> Iterator[openai.OpenAI]:
    with speaker.served.client() as client:
        yield client


def test_calls_and_their_results_go_to_and_fro(speaker: Speaker, client: openai.OpenAI) -> None:
    form = speaker.name  # type: ignore[attr-defined]
    speaker.says(TWO_CALLS[form])
    answer = client.chat.completions.create(model=MODEL, messages=[ASK], tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == (None if form == "llama3_json" else "Let me see.")
    calls = choice.message.tool_calls
    assert calls is not None
    assert [(call.function.name, call.function.arguments) for call in calls] == [("weather", WEATHER), ("clock", CLOCK)]
    assert len({call.id for call in calls}) == 2
    # The client sends its own object back, with all fields that are null.
    message = choice.message.model_dump() | {"tool_calls": [calls[0].model_dump()]}
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": "Rain."}
    prompt = speaker.prompt(messages=[ASK, message, result], tools=TOOLS)
    for part in ("How is the weather?", '"city": "Rome"', "Rain.", '"days": {"type": "integer"}'):
        assert part in prompt
    speaker.says("It rains.")
    answer = client.chat.completions.create(model=MODEL, messages=[ASK, message, result], tools=TOOLS)
    assert answer.choices[0].message.content == "It rains."
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


def test_calls_stream_their_name_first_and_their_arguments_in_pieces(speaker: Speaker, client: openai.OpenAI) -> None:
    form = speaker.name  # type: ignore[attr-defined]
    speaker.says(TWO_CALLS[form])
    words, calls, reasons = "", list[list[str]](), list[str]()
    for chunk in client.chat.completions.create(model=MODEL, messages=[ASK], tools=TOOLS, stream=True):
        (choice,) = chunk.choices
        words += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for delta in choice.delta.tool_calls or []:
            assert delta.function is not None
            if delta.id is not None:
                calls.append([delta.function.name or ""])
            assert delta.index == len(calls) - 1
            calls[-1].append(delta.function.arguments or "")
    assert words == ("" if form == "llama3_json" else "Let me see.")
    assert [(name, "".join(pieces)) for name, *pieces in calls] == [("weather", WEATHER), ("clock", CLOCK)]
    assert sum(map(bool, calls[0])) > 5
    assert reasons == ["tool_calls"]


def test_what_is_no_call_and_calls_that_nobody_wants(speaker: Speaker, client: openai.OpenAI) -> None:
    form = speaker.name  # type: ignore[attr-defined]
    speaker.says('{"city": "Rome"} ')
    answer = client.chat.completions.create(model=MODEL, messages=[ASK], tools=TOOLS)
    assert answer.choices[0].message.content == '{"city": "Rome"} '
    speaker.says(TWO_CALLS[form])
    answer = client.chat.completions.create(model=MODEL, messages=[ASK], tools=TOOLS, parallel_tool_calls=False)
    assert [call.function.name for call in answer.choices[0].message.tool_calls or []] == ["weather"]
    # Where no tool may be called, the model sees none, and its text is told as it is.
    speaker.says(TWO_CALLS[form])
    body = {"messages": [ASK], "tools": TOOLS, "tool_choice": "none", "return_token_ids": True}
    answer = speaker.served.post(CHATS, **body).json()
    assert answer["choices"][0]["message"]["content"] == TWO_CALLS[form].replace("[TOOL_CALLS]", "")
    assert "integer" not in speaker.tokenizer.decode(answer["prompt_token_ids"])


def test_langchain_binds_tools(speaker: Speaker) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(base_url=f"{speaker.served.url}/v1", api_key="none", model=MODEL)
    bound = model.bind_tools(TOOLS)
    speaker.says(TWO_CALLS[speaker.name])  # type: ignore[attr-defined]
    answer = bound.invoke("How is the weather?")
    called = [(call["name"], call["args"]) for call in answer.tool_calls]
    assert called == [("weather", json.loads(WEATHER)), ("clock", {})]
    # Its own message of the assistant comes back with the results.
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "Fine."} for call in answer.tool_calls]
    speaker.says("All is fine.")
    assert bound.invoke([("user", "How is the weather?"), answer, *results]).content == "All is fine."
    speaker.says(TWO_CALLS[speaker.name])  # type: ignore[attr-defined]
    whole: Any = None
    for chunk in bound.stream("How is the weather?"):
        whole = chunk if whole is None else whole + chunk
    assert [call["name"] for call in whole.tool_calls] == ["weather", "clock"]


def test_a_call_can_be_required(speaker: Speaker, client: openai.OpenAI) -> None:
    """The random model says what it must: a call whose arguments follow the schema."""
    blanks = {str(token_id): -100 for blank in " \n\t\r" for token_id in speaker.tokenizer.encode(blank, False)}
    create = partial(client.chat.completions.create, model=MODEL, messages=[ASK], tools=FEW, max_tokens=300)
    create = partial(create, logit_bias=blanks)
    for seed, (choice, name) in enumerate(
        (("required", None), ({"type": "function", "function": {"name": "turn"}}, "turn"))
    ):
        answer = create(tool_choice=choice, parallel_tool_calls=False, seed=seed).choices[0]
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        (call,) = answer.message.tool_calls or []
        assert call.function.name in ((name,) if name else ("turn", "stop"))
        jsonschema.validate(json.loads(call.function.arguments), SIDES if call.function.name == "turn" else {})
        pieces = [
            delta
            for chunk in create(tool_choice=choice, parallel_tool_calls=False, seed=seed, stream=True)
            for delta in chunk.choices[0].delta.tool_calls or []
        ]
        assert pieces[0].function.name == call.function.name
        assert "".join(piece.function.arguments or "" for piece in pieces) == call.function.arguments
    # A structure would keep the model from calls, or a call from the structure.
    body = {"messages": [ASK], "tools": FEW, "response_format": {"type": "json_object"}, "max_tokens": 5}
    for choices in ({}, {"tool_choice": "auto"}, {"tool_choice": "required"}):
        error = speaker.served.post(CHATS, **body, **choices).json()["error"]
        assert "an answer of another form cannot be asked for" in error["message"]
        assert error["param"] == "tools"
    answer = speaker.served.post(CHATS, **body, tool_choice="none").json()["choices"][0]
    assert answer["message"]["content"].startswith("{")


def test_a_template_without_calls_needs_a_parser_by_name() -> None:
    with serving(max_model_len=512) as served:
        response = served.post(CHATS, messages=[ASK], tools=TOOLS)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"
        assert "hermes, llama3_json, mistral" in response.json()["error"]["message"]
        asks_for_nothing = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "max_tokens": 1}
        assert served.post(CHATS, messages=[ASK], **asks_for_nothing).is_success
    with serving(max_model_len=512, tool_call_parser="hermes") as served:
        assert served.post(CHATS, messages=[ASK], tools=TOOLS, max_tokens=1).is_success
