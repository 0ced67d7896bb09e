"""What both kinds of answer are made of: usage, log-probabilities, and JSON put together from prepared pieces."""

import json
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol

from bullet_graph.engine.output import CompletionOutput, RequestOutput, TokenLogprobs
from bullet_graph.models.tokenizer import Tokenizer

to_json_text = encode_basestring_ascii
"""A text as JSON, quotes included; quicker than ``json.dumps``, and asked for every token of every stream."""

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def to_json(value: object) -> str:
    """Compact JSON in ASCII."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def usage_of(prompt_tokens: int, completion_tokens: int) -> str:
    """The usage of a request as JSON."""
    return (
        f'{{"prompt_tokens":{prompt_tokens},"completion_tokens":{completion_tokens},'
        f'"total_tokens":{prompt_tokens + completion_tokens}}}'
    )


class AnswerFormat(Protocol):
    """How one kind of request is answered."""

    def opening(self, choice: int, usage: str | None) -> bytes:
        """The first event of a choice, before its first token; empty for none."""

    def event(self, choice: int, delta: CompletionOutput, usage: str | None) -> bytes:
        """An event that brings what is new of a choice.

        Args:
            choice: its index.
            delta: what is new.
            usage: as JSON; None leaves the field out.
        """

    def usage_event(self, usage: str) -> bytes:
        """The event at the end that tells the usage."""

    def body(self, outputs: Sequence[RequestOutput], usage: str) -> bytes:
        """The whole answer.

        Args:
            outputs: of each prompt.
            usage: as JSON.
        """


class TokenTexts:
    """Texts of single tokens, for log-probabilities.

    Args:
        tokenizer: of the model; None writes token 5 as ``token_id:5``.
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


def finite(logprob: float) -> float:
    """A log-probability that JSON can say."""
    return max(logprob, _LEAST_LOGPROB)


def chat_logprobs(entries: Sequence[TokenLogprobs], texts: TokenTexts) -> dict[str, Any]:
    """Log-probabilities as chats have them."""

    def told(token_id: int, logprob: float) -> dict[str, Any]:
        text = texts[token_id]
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}

    return {
        "content": [
            told(entry.token_id, entry.logprob)
            | {"top_logprobs": [told(token_id, logprob) for token_id, logprob in entry.top]}
            for entry in entries
        ]
    }


def completion_logprobs(
    entries: Sequence[TokenLogprobs], texts: TokenTexts, offset: int
) -> tuple[dict[str, Any], int]:
    """Log-probabilities as completions have them, and the offset after them.

    Args:
        entries: of each token.
        texts: of tokens.
        offset: characters of the output before the first.
    """
    tokens = [texts[entry.token_id] for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    # Tokens of the same text share a key: the likeliest is told.
    tops = [
        {texts[i]: finite(p) for i, p in ((entry.token_id, entry.logprob), *reversed(entry.top))}
        for entry in entries
    ]
    fields = {
        "tokens": tokens,
        "token_logprobs": [finite(entry.logprob) for entry in entries],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
    return fields, offset
