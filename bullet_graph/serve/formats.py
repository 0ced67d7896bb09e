"""The two answer formats: whole answers and stream events of completions and chats, as JSON text.

The JSON is put together by hand: a format writes one event per token and stream.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

from bullet_graph.engine.output import CompletionOutput, RequestOutput, TokenLogprobs
from bullet_graph.models.tokenizer import Tokenizer

to_json_text = encode_basestring_ascii
"""A text as JSON with its quotes; faster than ``json.dumps``."""

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def to_json(value: object) -> str:
    """Compact ASCII JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def usage_of(prompt_tokens: int, completion_tokens: int) -> str:
    """The usage of a request as JSON."""
    return (
        f'{{"prompt_tokens":{prompt_tokens},"completion_tokens":{completion_tokens},'
        f'"total_tokens":{prompt_tokens + completion_tokens}}}'
    )


class TokenTexts:
    """Texts of single tokens, for log-probabilities.

    Args:
        tokenizer: the model's; without one, token 5 is written ``token_id:5``.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            if self._tokenizer is None:
                text = f"token_id:{token_id}"
            else:
                text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._texts[token_id] = text
        return text


class AnswerFormat(ABC):
    """Writes the answer to one request.

    Args:
        answer_id: the answer's id.
        created_s: time of the request, in seconds since 1970.
        model: the served model's name.
        texts: texts of single tokens, for log-probabilities.
        with_token_ids: write token ids as well.
    """

    def __init__(
        self, answer_id: str, created_s: int, model: str, texts: TokenTexts, *, with_token_ids: bool
    ) -> None:
        self._id = to_json_text(answer_id)
        self._created_s = created_s
        self._model = to_json_text(model)
        self._texts = texts
        self._with_token_ids = with_token_ids

    def opening(self, choice: int, usage: str | None) -> bytes:
        """The event before a choice's first token; empty if the format has none."""
        del choice, usage
        return b""

    @abstractmethod
    def event(self, choice: int, delta: CompletionOutput, usage: str | None) -> bytes:
        """The event of new tokens.

        Args:
            choice: index of the choice.
            delta: what is new.
            usage: JSON; None leaves the field out.
        """

    @abstractmethod
    def usage_event(self, usage: str) -> bytes:
        """The last event, which holds the usage (JSON)."""

    @abstractmethod
    def body(self, outputs: Sequence[RequestOutput], usage: str) -> bytes:
        """The whole answer: one output per prompt, and the usage (JSON)."""

    def _end_of_choice(self, delta: CompletionOutput, logprobs: dict[str, Any] | None) -> str:
        """The fields that both formats have at the end of a choice."""
        reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        ids = f',"token_ids":{to_json(delta.token_ids)}' if self._with_token_ids else ""
        return f'"logprobs":{"null" if logprobs is None else to_json(logprobs)},"finish_reason":{reason}{ids}'


class CompletionFormat(AnswerFormat):
    """Answers of ``/v1/completions``."""

    def __init__(
        self, answer_id: str, created_s: int, model: str, texts: TokenTexts, *, with_token_ids: bool
    ) -> None:
        super().__init__(answer_id, created_s, model, texts, with_token_ids=with_token_ids)
        self._head = (
            f'{{"id":{self._id},"object":"text_completion","created":{created_s},'
            f'"model":{self._model},"choices":['
        )
        self._offsets: dict[int, int] = {}

    def event(self, choice: int, delta: CompletionOutput, usage: str | None) -> bytes:
        tail = "" if usage is None else f',"usage":{usage}'
        return f"data: {self._head}{self._choice(choice, delta)}]{tail}}}\n\n".encode()

    def usage_event(self, usage: str) -> bytes:
        return f'data: {self._head}],"usage":{usage}}}\n\n'.encode()

    def body(self, outputs: Sequence[RequestOutput], usage: str) -> bytes:
        choices = [
            self._choice(index * len(output.outputs) + completion.index, completion, output.prompt_token_ids)
            for index, output in enumerate(outputs)
            for completion in output.outputs
        ]
        return f'{self._head}{",".join(choices)}],"usage":{usage}}}'.encode()

    def _choice(self, choice: int, delta: CompletionOutput, prompt: Sequence[int] | None = None) -> str:
        logprobs = None
        if delta.logprobs is not None:
            offset = self._offsets.get(choice, 0)
            logprobs, self._offsets[choice] = completion_logprobs(delta.logprobs, self._texts, offset)
        end = self._end_of_choice(delta, logprobs)
        if self._with_token_ids and prompt is not None:
            end += f',"prompt_token_ids":{to_json(prompt)}'
        return f'{{"index":{choice},"text":{to_json_text(delta.text)},{end}}}'


class ChatFormat(AnswerFormat):
    """Answers of ``/v1/chat/completions``."""

    def __init__(
        self, answer_id: str, created_s: int, model: str, texts: TokenTexts, *, with_token_ids: bool
    ) -> None:
        super().__init__(answer_id, created_s, model, texts, with_token_ids=with_token_ids)
        head = f'{{"id":{self._id},"created":{created_s},"model":{self._model},"object":'
        self._whole = f'{head}"chat.completion"'
        self._chunk = f'data: {head}"chat.completion.chunk","choices":['

    def opening(self, choice: int, usage: str | None) -> bytes:
        """The event that names the speaker."""
        delta = '"delta":{"role":"assistant","content":""}'
        return self._event(f'{{"index":{choice},{delta},"logprobs":null,"finish_reason":null}}', usage)

    def event(self, choice: int, delta: CompletionOutput, usage: str | None) -> bytes:
        content = f'"delta":{{"content":{to_json_text(delta.text)}}}'
        return self._event(f'{{"index":{choice},{content},{self._end(delta)}}}', usage)

    def usage_event(self, usage: str) -> bytes:
        return self._event("", usage)

    def body(self, outputs: Sequence[RequestOutput], usage: str) -> bytes:
        (output,) = outputs
        choices = [
            f'{{"index":{completion.index},"message":{{"role":"assistant","content":{to_json_text(completion.text)}}},'
            f"{self._end(completion)}}}"
            for completion in output.outputs
        ]
        ids = f',"prompt_token_ids":{to_json(output.prompt_token_ids)}' if self._with_token_ids else ""
        return f'{self._whole},"choices":[{",".join(choices)}],"usage":{usage}{ids}}}'.encode()

    def _event(self, choice: str, usage: str | None) -> bytes:
        tail = "" if usage is None else f',"usage":{usage}'
        return f"{self._chunk}{choice}]{tail}}}\n\n".encode()

    def _end(self, delta: CompletionOutput) -> str:
        logprobs = None if delta.logprobs is None else chat_logprobs(delta.logprobs, self._texts)
        return self._end_of_choice(delta, logprobs)


def chat_logprobs(entries: Sequence[TokenLogprobs], texts: TokenTexts) -> dict[str, Any]:
    """Log-probabilities in the format of chats."""

    def field(token_id: int, logprob: float) -> dict[str, Any]:
        text = texts[token_id]
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

    return {
        "content": [
            field(entry.token_id, entry.logprob)
            | {"top_logprobs": [field(token_id, logprob) for token_id, logprob in entry.top]}
            for entry in entries
        ]
    }


def completion_logprobs(
    entries: Sequence[TokenLogprobs], texts: TokenTexts, offset: int
) -> tuple[dict[str, Any], int]:
    """Log-probabilities in the format of completions, and the offset after the last token.

    Args:
        offset: characters of the output before the first token.
    """
    tokens = [texts[entry.token_id] for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    # Tokens with the same text share a key: the most probable one wins.
    tops = [
        {texts[i]: _finite(p) for i, p in ((entry.token_id, entry.logprob), *reversed(entry.top))}
        for entry in entries
    ]
    fields = {
        "tokens": tokens,
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
    return fields, offset


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
