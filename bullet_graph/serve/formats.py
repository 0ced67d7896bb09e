"""The two answer formats: JSON text of whole answers and of stream events.

The JSON is assembled by hand because a stream has one event per token.
"""

import functools
import json
import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from json.encoder import encode_basestring_ascii
from typing import Any, ClassVar

from bullet_graph.engine.output import CompletionOutput, RequestOutput, TokenLogprobs
from bullet_graph.models.tokenizer import Tokenizer
from bullet_graph.serve.tools import ToolCallParser, tool_calls

to_json_text = encode_basestring_ascii
"""A text as JSON with its quotes; faster than ``json.dumps``."""

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""

TokenTexts = Callable[[int], str]


def token_texts(tokenizer: Tokenizer | None) -> TokenTexts:
    """The text of single tokens, for log-probabilities; without a tokenizer, token 5 is ``token_id:5``."""
    if tokenizer is None:
        return "token_id:{}".format
    return functools.cache(lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False))


def to_json(value: object) -> str:
    """Compact ASCII JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def usage_of(prompt_tokens: int, completion_tokens: int) -> str:
    """The usage of a request as JSON."""
    return (
        f'{{"prompt_tokens":{prompt_tokens},"completion_tokens":{completion_tokens},'
        f'"total_tokens":{prompt_tokens + completion_tokens}}}'
    )


class AnswerFormat(ABC):
    """Writes the answer to one request; ``usage`` is JSON, or None to leave it out.

    ``texts`` gives the texts of single tokens. ``with_token_ids`` also writes the ids of prompts and outputs.
    ``request_id`` is the end of the answer's id. ``echo`` are the prompts' texts, to be written before the outputs';
    ``num_logprobs`` and ``num_prompt_logprobs`` are the alternatives that were asked for.
    """

    id_prefix: ClassVar[str]
    whole_type: ClassVar[str]
    event_type: ClassVar[str]
    new_text: ClassVar[str]
    whole_text: ClassVar[str]
    prompt_ids_in_choices: ClassVar[bool]

    def __init__(
        self,
        model: str,
        texts: TokenTexts,
        *,
        with_token_ids: bool,
        request_id: str,
        echo: Sequence[str] | None = None,
        num_logprobs: int | None = None,
        num_prompt_logprobs: int | None = None,
    ) -> None:
        self._texts = texts
        self._echo = echo
        self._num_logprobs = num_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs
        self._offsets: dict[int, int] = {}
        self._with_token_ids = with_token_ids
        head = f'{{"id":"{self.id_prefix}-{request_id}","created":{int(time.time())}'
        head += f',"model":{to_json_text(model)},"object":'
        self._whole = f'{head}"{self.whole_type}","choices":['
        self._event_head = f'data: {head}"{self.event_type}","choices":['

    def opening(self, choice: int, prompt: int, usage: str | None) -> bytes:
        """The event before the first token of a choice for a prompt; empty if the format has none."""
        del choice, prompt, usage
        return b""

    def event(self, choice: int, delta: CompletionOutput, usage: str | None) -> bytes:
        """The event of new tokens of a choice."""
        return self._event(self._choice(choice, delta, self.new_text), usage)

    def usage_event(self, usage: str) -> bytes:
        """The last event."""
        return self._event("", usage)

    def body(self, outputs: Sequence[RequestOutput], usage: str) -> bytes:
        """The whole answer: one output per prompt."""
        choices, of_prompt = [], ""
        for index, output in enumerate(outputs):
            of_prompt = (
                f',"prompt_token_ids":{to_json(output.prompt_token_ids)}' if self._with_token_ids else ""
            )
            if self._num_prompt_logprobs is not None:
                of_prompt += (
                    f',"prompt_logprobs":{to_json(self._prompt_logprobs(output, self._num_prompt_logprobs))}'
                )
            for sample in output.outputs:
                choice = index * len(output.outputs) + sample.index
                more = of_prompt if self.prompt_ids_in_choices else ""
                if self._echo is not None:
                    sample = self._after_prompt(output, sample, self._echo[index])
                choices.append(self._choice(choice, sample, self.whole_text, more))
        tail = "" if self.prompt_ids_in_choices else of_prompt
        return f'{self._whole}{",".join(choices)}],"usage":{usage}{tail}}}'.encode()

    def _prompt_logprobs(self, output: RequestOutput, count: int) -> list[dict[str, Any] | None]:
        """Those of the prompt's tokens, in vLLM's form; only alternatives have a rank."""
        return [
            None
            if entry is None
            else {
                str(i): {"logprob": _finite(p), "rank": rank, "decoded_token": self._texts(i)}
                for rank, (i, p) in (
                    (None, (entry.token_id, entry.logprob)),
                    *enumerate(entry.top[:count], 1),
                )
            }
            for entry in output.prompt_logprobs or ()
        ]

    def _after_prompt(self, output: RequestOutput, sample: CompletionOutput, text: str) -> CompletionOutput:
        """The sample with its prompt before it."""
        logprobs = sample.logprobs
        if logprobs is not None:
            _, *scored = output.prompt_logprobs or (None,)
            first = TokenLogprobs(output.prompt_token_ids[0], math.nan, ())
            entries = (replace(entry, top=entry.top[: self._num_logprobs]) for entry in scored if entry)
            logprobs = (first, *entries, *logprobs)
        return replace(sample, text=text + sample.text, logprobs=logprobs)

    def _event(self, choice: str, usage: str | None) -> bytes:
        tail = "" if usage is None else f',"usage":{usage}'
        return f"{self._event_head}{choice}]{tail}}}\n\n".encode()

    def _choice(self, choice: int, output: CompletionOutput, text_form: str, more: str = "") -> str:
        text, finish_reason = self._said(choice, output, text_form)
        logprobs = "null" if output.logprobs is None else to_json(self._logprobs(choice, output.logprobs))
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        ids = f',"token_ids":{to_json(output.token_ids)}' if self._with_token_ids else ""
        return f'{{"index":{choice},{text},"logprobs":{logprobs},"finish_reason":{reason}{ids}{more}}}'

    def _said(self, choice: int, output: CompletionOutput, text_form: str) -> tuple[str, str | None]:
        """The fields of an output's text, and why it ended."""
        del choice
        return text_form % to_json_text(output.text), output.finish_reason

    @abstractmethod
    def _logprobs(self, choice: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Log-probabilities of a choice's next tokens."""


class CompletionFormat(AnswerFormat):
    """Answers of ``/v1/completions``."""

    id_prefix = "cmpl"
    whole_type = event_type = "text_completion"
    new_text = whole_text = '"text":%s'
    prompt_ids_in_choices = True

    def opening(self, choice: int, prompt: int, usage: str | None) -> bytes:
        """The event of the prompt, if it is to be written."""
        if self._echo is None:
            return b""
        return self.event(choice, CompletionOutput(choice, self._echo[prompt], (), None, None), usage)

    def _logprobs(self, choice: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        texts, offset = self._texts, self._offsets.get(choice, 0)
        tokens = [texts(entry.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[choice] = offset
        logprobs = [None if math.isnan(entry.logprob) else _finite(entry.logprob) for entry in entries]
        # Tokens with the same text share a key: the most probable one wins.
        tops = [
            None
            if logprob is None
            else {texts(i): _finite(p) for i, p in ((entry.token_id, logprob), *reversed(entry.top))}
            for entry, logprob in zip(entries, logprobs, strict=True)
        ]
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


class ChatFormat(AnswerFormat):
    """Answers of ``/v1/chat/completions``."""

    id_prefix = "chatcmpl"
    whole_type = "chat.completion"
    event_type = "chat.completion.chunk"
    new_text = '"delta":{"content":%s}'
    whole_text = '"message":{"role":"assistant","content":%s}'
    prompt_ids_in_choices = False

    def __init__(
        self, *args: Any, call_parser: Callable[[], ToolCallParser] | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._parsers = None if call_parser is None else defaultdict[int, ToolCallParser](call_parser)

    def opening(self, choice: int, prompt: int, usage: str | None) -> bytes:
        """The event that names the speaker."""
        del prompt
        delta = '"delta":{"role":"assistant","content":""}'
        return self._event(f'{{"index":{choice},{delta},"logprobs":null,"finish_reason":null}}', usage)

    def _said(self, choice: int, output: CompletionOutput, text_form: str) -> tuple[str, str | None]:
        reason: str | None = output.finish_reason
        if self._parsers is None:
            return super()._said(choice, output, text_form)
        parser = self._parsers[choice]
        words, deltas = parser.push(output.text)
        if reason is not None:
            last_words, last_deltas = parser.finish()
            words, deltas = words + last_words, deltas + last_deltas
        if reason == "stop" and parser.num_calls:
            reason = "tool_calls"
        streamed = text_form == self.new_text
        calls = to_json(tool_calls(deltas, streamed=streamed)) if deltas else ""
        if streamed:
            fields = [f'"content":{to_json_text(words)}'] * bool(words) + [f'"tool_calls":{calls}'] * bool(
                calls
            )
            return f'"delta":{{{",".join(fields)}}}', reason
        content = to_json_text(words) if words or not calls else "null"
        return self.whole_text % (content + (f',"tool_calls":{calls}' if calls else "")), reason

    def _logprobs(self, choice: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        del choice

        def field(token_id: int, logprob: float) -> dict[str, Any]:
            text = self._texts(token_id)
            return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

        content = [
            field(entry.token_id, entry.logprob) | {"top_logprobs": [field(*top) for top in entry.top]}
            for entry in entries
        ]
        return {"content": content}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
