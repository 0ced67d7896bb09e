"""The two answer formats: whole answers and stream events, as JSON."""

import functools
import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pydantic_core

from bullet_graph.engine.output import CompletionOutput, RequestOutput, TokenLogprobs
from bullet_graph.models.tokenizer import Tokenizer
from bullet_graph.serve.tools import CallDelta, ToolCallParser, tool_calls

to_json = functools.partial(pydantic_core.to_json, ensure_ascii=True)
"""Compact ASCII JSON, as bytes; many readers of streams take other characters for ends of lines."""

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""

Fields = Mapping[str, Any]
TokenTexts = Callable[[int], str]


def token_texts(tokenizer: Tokenizer | None) -> TokenTexts:
    """The text of single tokens, for log-probabilities; without a tokenizer, token 5 is ``token_id:5``."""
    if tokenizer is None:
        return "token_id:{}".format
    return functools.cache(lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False))


@dataclass(eq=False)
class AnswerFormat(ABC):
    """Writes the answer to one request.

    ``texts`` gives the texts of single tokens; ``adding`` makes a function for a choice: the text that each
    of its tokens adds, by default the token's own. ``with_token_ids`` also writes the ids of prompts and outputs.
    ``request_id`` is the end of the answer's id. ``echo`` are the prompts' texts, to be written before the outputs';
    ``num_logprobs`` and ``num_prompt_logprobs`` are the alternatives asked for, ``more`` an event's usage, if any.
    """

    id_prefix: ClassVar[str]
    whole_type: ClassVar[str]
    event_type: ClassVar[str]
    prompt_ids_in_choices: ClassVar[bool]

    model: str
    texts: TokenTexts
    request_id: str
    with_token_ids: bool = False
    echo: Sequence[str] | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    adding: Callable[[], TokenTexts] | None = None

    def __post_init__(self) -> None:
        self._head = {"id": f"{self.id_prefix}-{self.request_id}", "created": int(time.time()), "model": self.model}
        self._offsets, self._added = dict[int, int](), defaultdict[int, TokenTexts](self.adding or (lambda: self.texts))

    @abstractmethod
    def opening(self, choice: int, delta: CompletionOutput, prompt: int, output: RequestOutput, more: Fields) -> bytes:
        """The event of a choice's first tokens, after any that comes before them; one of them tells of the prompt."""

    def event(self, choice: int, delta: CompletionOutput, more: Fields) -> bytes:
        """The event of new tokens of a choice."""
        return self._event([self._choice(choice, delta, streamed=True)], more)

    def usage_event(self, more: Fields) -> bytes:
        """The last event."""
        return self._event([], more)

    def body(self, outputs: Sequence[RequestOutput], usage: Fields) -> bytes:
        """The whole answer: one output per prompt."""
        choices, of_prompt = [], dict[str, Any]()
        for index, output in enumerate(outputs):
            of_prompt = self._of_prompt(output)
            for sample in output.outputs:
                if self.echo is not None:
                    sample = self._after_prompt(output, sample, self.echo[index])
                fields = self._choice(index * len(output.outputs) + sample.index, sample, streamed=False)
                choices.append(fields | of_prompt if self.prompt_ids_in_choices else fields)
        tail = {} if self.prompt_ids_in_choices else of_prompt
        return to_json(self._head | {"object": self.whole_type, "choices": choices, "usage": usage} | tail)

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """What was asked of the prompt; log-probabilities in vLLM's form, where only alternatives have a rank."""
        fields: dict[str, Any] = {"prompt_token_ids": output.prompt_token_ids} if self.with_token_ids else {}
        if (count := self.num_prompt_logprobs) is not None:
            fields["prompt_logprobs"] = [
                None
                if entry is None
                else {
                    str(i): {"logprob": _finite(p), "rank": rank, "decoded_token": self.texts(i)}
                    for rank, (i, p) in ((None, (entry.token_id, entry.logprob)), *enumerate(entry.top[:count], 1))
                }
                for entry in output.prompt_logprobs or ()
            ]
        return fields

    def _after_prompt(self, output: RequestOutput, sample: CompletionOutput, text: str) -> CompletionOutput:
        logprobs = sample.logprobs
        if logprobs is not None:
            _, *scored = output.prompt_logprobs or (None,)
            first = TokenLogprobs(output.prompt_token_ids[0], math.nan, ())
            entries = (replace(entry, top=entry.top[: self.num_logprobs]) for entry in scored if entry)
            logprobs = (first, *entries, *logprobs)
        return replace(sample, text=text + sample.text, logprobs=logprobs)

    def _event(self, choices: Sequence[Fields], more: Fields) -> bytes:
        return b"data: " + to_json({**self._head, "object": self.event_type, "choices": choices, **more}) + b"\n\n"

    def _choice(self, choice: int, output: CompletionOutput, *, streamed: bool) -> dict[str, Any]:
        text, finish_reason = self._said(choice, output, streamed=streamed)
        logprobs = None if output.logprobs is None else self._logprobs(choice, output)
        fields = {"index": choice, **text, "logprobs": logprobs, "finish_reason": finish_reason}
        return fields | {"token_ids": output.token_ids} if self.with_token_ids else fields

    @abstractmethod
    def _said(self, choice: int, output: CompletionOutput, *, streamed: bool) -> tuple[Fields, str | None]:
        """The fields of an output's text, and why it ended."""

    @abstractmethod
    def _logprobs(self, choice: int, output: CompletionOutput) -> dict[str, Any]:
        """Log-probabilities of a choice's next tokens."""


class CompletionFormat(AnswerFormat):
    """Answers of ``/v1/completions``."""

    id_prefix = "cmpl"
    whole_type = event_type = "text_completion"
    prompt_ids_in_choices = True

    def opening(self, choice: int, delta: CompletionOutput, prompt: int, output: RequestOutput, more: Fields) -> bytes:
        """The event of a choice's first tokens, after that of the prompt, if it is to be written."""
        fields, of_prompt = self._choice(choice, delta, streamed=True), self._of_prompt(output)
        if self.echo is None:
            return self._event([fields | of_prompt], more)
        echo = self._choice(choice, CompletionOutput(choice, self.echo[prompt], (), None, None), streamed=True)
        return self._event([echo | of_prompt], more) + self._event([fields], more)

    def _said(self, choice: int, output: CompletionOutput, *, streamed: bool) -> tuple[Fields, str | None]:
        del choice, streamed
        return {"text": output.text}, output.finish_reason

    def _logprobs(self, choice: int, output: CompletionOutput) -> dict[str, Any]:
        entries, texts, added = output.logprobs or (), self.texts, self._added[choice]
        tokens, offsets, at = [texts(entry.token_id) for entry in entries], list[int](), self._offsets.get(choice, 0)
        for entry, text in zip(entries, tokens, strict=True):
            size = len(added(entry.token_id))
            # A prompt's text may hold special tokens.
            if self.echo is not None and not size and "\ufffd" not in text and output.text.startswith(text, at):
                size = len(text)
            # A character that stays incomplete comes out with the token after it.
            offsets.append(at + max(size - len(text), 0))
            at += size
        self._offsets[choice] = at
        logprobs = [None if math.isnan(entry.logprob) else _finite(entry.logprob) for entry in entries]
        # Tokens with the same text share a key: the most probable one wins.
        tops = [
            None
            if logprob is None
            else {texts(i): _finite(p) for i, p in ((entry.token_id, logprob), *reversed(entry.top))}
            for entry, logprob in zip(entries, logprobs, strict=True)
        ]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


@dataclass(eq=False)
class ChatFormat(AnswerFormat):
    """Answers of ``/v1/chat/completions``; ``call_parser`` makes what finds calls, where the model may make any."""

    id_prefix = "chatcmpl"
    whole_type = "chat.completion"
    event_type = "chat.completion.chunk"
    prompt_ids_in_choices = False

    call_parser: Callable[[], ToolCallParser] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parsers = None if self.call_parser is None else defaultdict[int, ToolCallParser](self.call_parser)

    def opening(self, choice: int, delta: CompletionOutput, prompt: int, output: RequestOutput, more: Fields) -> bytes:
        """The event of a choice's first tokens, after the one that names the speaker."""
        del prompt
        said = {"index": choice, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self._event([said], {**more, **self._of_prompt(output)}) + self.event(choice, delta, more)

    def _said(self, choice: int, output: CompletionOutput, *, streamed: bool) -> tuple[Fields, str | None]:
        reason: str | None = output.finish_reason
        words, deltas = output.text, list[CallDelta]()
        if self._parsers is not None:
            parser = self._parsers[choice]
            words, deltas = parser.push(output.text)
            if reason is not None:
                last_words, last_deltas = parser.finish()
                words, deltas = words + last_words, deltas + last_deltas
            if reason == "stop" and parser.ends_with_call:
                reason = "tool_calls"
        calls = {"tool_calls": tool_calls(deltas, streamed=streamed)} if deltas else {}
        if streamed:
            return {"delta": ({"content": words} if (words or self._parsers is None) else {}) | calls}, reason
        return {"message": {"role": "assistant", "content": words if words or not calls else None, **calls}}, reason

    def _logprobs(self, choice: int, output: CompletionOutput) -> dict[str, Any]:
        del choice

        def field(token_id: int, logprob: float) -> dict[str, Any]:
            text = self.texts(token_id)
            # The text of a token that is part of a character does not tell its bytes.
            raw = None if "\ufffd" in text else list(text.encode())
            return {"token": text, "logprob": _finite(logprob), "bytes": raw}

        content = [
            field(entry.token_id, entry.logprob) | {"top_logprobs": [field(*top) for top in entry.top]}
            for entry in output.logprobs or ()
        ]
        return {"content": content}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
