"""Tool calls in a model's text: the formats of chat templates, parsed while the text comes."""

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic_core import from_json

from bullet_graph.errors import SamplingParamsError
from bullet_graph.sampling_params import MAX_GRAMMAR_CHARACTERS

_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""Mistral's templates ask for ids of exactly this length, and others take any."""

_MOST_HEAD = 2000
"""A call whose arguments have not begun after so many characters is told only when it is complete."""
_MOST_BETWEEN = 300
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*'
    r'("(?:[^"\\]|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}))*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_BARE_NAME = re.compile(r"\s*([A-Za-z_][\w.-]*)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*")
_OUTSIDE_TEXT = re.compile(r'["{}\[\]]')
_INSIDE_TEXT = re.compile(r'["\\]')


class ToolFormat(NamedTuple):
    """How a model writes calls.

    ``begin`` comes before calls; it is empty where a text that begins with a call is nothing but calls. ``end`` comes
    after a call, where other text may follow. Calls begin with one of the ``openers``. With ``bare_names`` a name may
    stand before its arguments, as in ``[TOOL_CALLS]name{…}``.
    """

    begin: str
    end: str
    openers: str
    bare_names: bool


FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>", "{", False),
    "llama3_json": ToolFormat("", "", "{", False),
    "mistral": ToolFormat("[TOOL_CALLS]", "", "[{", True),
}
"""By vLLM's names of their parsers."""

FORCED = ToolFormat("", "", "[", False)
"""The list of calls that :func:`forced_calls` describes."""


def format_of(template: str) -> ToolFormat | None:
    """The format of calls that a chat template asks for; None for none, or another."""
    if "<tool_call>" in template and "<function=" not in template:
        return FORMATS["hermes"]
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    is_llama = "<|python_tag|>" in template or re.search(r'name\\?": function name', template)
    return FORMATS["llama3_json"] if is_llama and "tools" in template else None


def forced_calls(tools: Mapping[str, Mapping[str, Any]], *, parallel: bool) -> dict[str, Any]:
    """The JSON schema of a list of calls, at least one, of tools whose parameters have these schemas.

    Raises SamplingParamsError where they are too long together.
    """
    call = {"type": "object", "required": ["name", "parameters"], "additionalProperties": False}
    found: dict[str, dict[str, Any]] = {}
    for number, (name, schema) in enumerate(tools.items()):
        # References such as "#" count from the nearest $id, so each tool needs one of its own.
        own_id = str(schema.get("$id"))
        base = own_id if own_id.startswith("http") and own_id not in found else f"tool:/{number}"
        properties = {"name": {"const": name}, "parameters": {"type": "object", **schema, "$id": base}}
        found[base] = call | {"properties": properties}
    most = {} if parallel else {"maxItems": 1}
    forced = {"type": "array", "minItems": 1, **most, "items": {"anyOf": [*found.values()]}}
    if (size := len(json.dumps(forced))) > MAX_GRAMMAR_CHARACTERS:
        limit = f"a forced call can follow at most {MAX_GRAMMAR_CHARACTERS} characters of schemas, found {size}"
        raise SamplingParamsError(f"`tools`: {limit}: shorten them, or name one tool in `tool_choice`")
    return forced


class CallDelta(NamedTuple):
    """What is new of a call: first its id and name, then pieces of its arguments as JSON."""

    number: int
    call_id: str | None
    name: str | None
    arguments: str


class ToolCallParser:
    """Splits a text that comes in pieces into words and calls; where it is cut makes no difference.

    What looks like a call and is none stays text. White space before a call is dropped, and so is what follows one
    where the format has no end of calls. ``most_calls`` drops further calls.
    """

    def __init__(self, form: ToolFormat, *, most_calls: int | None = None) -> None:
        self._form = form
        self._most_calls = most_calls
        self._mode: Callable[[], bool] = self._text if form.begin else self._between
        self._rest = ""
        self._lead = ""
        self._is_first = True
        self._space = ""
        self._after_call = False
        self._words: list[str] = []
        self._deltas: list[CallDelta] = []
        self.num_calls = 0
        # Of an object of JSON.
        self._held: list[str] = []
        self._held_size = 0
        self._scan = _Scan()
        self._stops = re.compile("|".join((r"\{", *(re.escape(mark) for mark in (form.begin, form.end) if mark))))

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """The words and what is new of calls by the next piece of text."""
        self._rest += text
        while self._rest and self._mode():
            pass
        return self._told()

    def finish(self) -> tuple[str, list[CallDelta]]:
        """The same at the text's end. What has no name yet of a call after a mark, or of a forced one, is dropped."""
        if self._mode == self._text or (self._is_first and not self._form.begin and self._form is not FORCED):
            self._say(self._lead + "".join(self._held) + self._rest)
        if not self.num_calls and self._form is not FORCED:
            self._words.append(self._space)
        return self._told()

    @property
    def ends_with_call(self) -> bool:
        """Whether there was a call, and the last one is whole."""
        return self.num_calls > 0 and self._mode != self._arguments

    def _told(self) -> tuple[str, list[CallDelta]]:
        words, self._words = "".join(self._words), []
        deltas, self._deltas = self._deltas, []
        return words, deltas

    # ---- modes: each takes from the rest, and returns whether to go on ----

    def _text(self) -> bool:
        words, mark, rest = self._rest.partition(self._form.begin) if self._form.begin else (self._rest, "", "")
        if mark:
            self._enter_calls(mark)
        else:
            kept = next((n for n in range(len(self._form.begin) - 1, 0, -1) if words.endswith(self._form.begin[:n])), 0)
            words, rest = words[: len(words) - kept], words[len(words) - kept :]
        self._say(words)
        self._rest = rest
        return bool(mark)

    def _between(self) -> bool:
        begun = self._rest.lstrip()
        if self._is_first:
            limit = len(self._rest) - len(begun) + _MOST_BETWEEN
            is_name = self._form.bare_names and begun[:1].isalpha()
            stop = self._stops.search(self._rest, 0, limit)
            if (begun and begun[0] not in self._form.openers and not is_name) or limit > 2 * _MOST_BETWEEN:
                return self._no_call()
            if stop is None:
                return len(self._rest) >= limit and self._no_call()
        else:
            stop = self._stops.search(self._rest)
            if stop is None:
                # More than this is no beginning of a mark.
                self._rest = self._rest[-_MOST_BETWEEN:]
                return False
        before, mark, self._rest = self._rest[: stop.start()], stop.group(), self._rest[stop.start() :]
        if mark == "{":
            name = _BARE_NAME.fullmatch(before) if self._form.bare_names and self._is_first else None
            if name is not None:
                self._begin_call(name[1])
            else:
                self._lead += before
                self._held_size, self._scan, self._mode = 0, _Scan(), self._head
            return True
        self._rest = self._rest[len(mark) :]
        if mark == self._form.end:
            self._mode = self._text
        else:
            self._enter_calls(mark)
        return True

    def _head(self) -> bool:
        new, self._rest = self._rest, ""
        self._held.append(new)
        if self._held_size < _MOST_HEAD:
            held = "".join(self._held)
            head = _HEAD.match(held, 0, _MOST_HEAD)
            if head is not None:
                self._rest = held[head.end() :]
                self._begin_call(json.loads(head[1], strict=False))
                return True
        self._held_size += len(new)
        end = self._scan.end(new)
        if end is None:
            return False
        self._held[-1], self._rest = new[:end], new[end:]
        self._complete("".join(self._held))
        return True

    def _arguments(self) -> bool:
        end = self._scan.end(self._rest)
        self._tell(None, None, self._rest[:end])
        self._rest = "" if end is None else self._rest[end:]
        if end is not None:
            self._mode, self._after_call = self._between, True
        return end is not None

    # ----

    def _enter_calls(self, mark: str) -> None:
        self._mode, self._lead, self._is_first = self._between, mark, True

    def _no_call(self) -> bool:
        """What has come since the mark is text, and so is all that follows up to the next mark."""
        self._say(self._lead + "".join(self._held))
        self._lead, self._held, self._mode = "", [], self._text
        return True

    def _begin_call(self, name: str) -> None:
        self._space, self._lead, self._held, self._is_first = "", "", [], False
        self._scan, self._mode = _Scan(), self._arguments
        self.num_calls += 1
        self._tell("".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH)), name, "")

    def _complete(self, held: str) -> None:
        """Tell a whole object whose head is not the usual one, if it is a call."""
        try:
            call = from_json(held)
        except ValueError:
            call = {}
        arguments = next((call[key] for key in ("arguments", "parameters") if key in call), None)
        name = call.get("name")
        # Other answers in JSON may have a name as well.
        if not isinstance(name, str) or (arguments is None and not self._form.begin):
            if self._is_first:
                self._no_call()
            else:  # dropped, as all that follows a call
                self._lead, self._held, self._mode = "", [], self._between
            return
        self._begin_call(name)
        self._tell(None, None, arguments if isinstance(arguments, str) else json.dumps(arguments or {}))
        self._mode, self._after_call = self._between, True

    def _tell(self, call_id: str | None, name: str | None, arguments: str) -> None:
        if self._most_calls is None or self.num_calls <= self._most_calls:
            self._deltas.append(CallDelta(self.num_calls - 1, call_id, name, arguments))

    def _say(self, words: str) -> None:
        """Pass words on, but hold white space back until it is known not to stand before a call."""
        words = self._space + words
        if self._after_call:
            words = words.lstrip()
            self._after_call = not words
        held = min(len(words) - len(words.rstrip()), _MOST_BETWEEN)
        self._space = words[len(words) - held :]
        self._words.append(words[: len(words) - held])


class _Scan:
    """Finds the end of a JSON object whose text comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._inside = self._escaped = False

    def end(self, text: str) -> int | None:
        """Where in the next piece the object ends; None if it does not."""
        at = 0
        if self._escaped and text:
            at, self._escaped = 1, False
        while True:
            found = (_INSIDE_TEXT if self._inside else _OUTSIDE_TEXT).search(text, at)
            if found is None:
                return None
            at, mark = found.end(), found.group()
            if mark == "\\":
                self._escaped = at == len(text)
                at += 1
            elif mark == '"':
                self._inside = not self._inside
            else:
                self._depth += 1 if mark in "{[" else -1
                if not self._depth:
                    return at


def tool_calls(deltas: Sequence[CallDelta], *, streamed: bool) -> list[dict[str, Any]]:
    """Calls in the form of OpenAI's answers, what is new of each call together."""
    merged: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        call = merged.setdefault(delta.number, {"index": delta.number} if streamed else {})
        if delta.name is not None:
            call |= {"id": delta.call_id, "type": "function"}
        function = call.setdefault("function", {} if delta.name is None else {"name": delta.name})
        function["arguments"] = function.get("arguments", "") + delta.arguments
    return list(merged.values())
