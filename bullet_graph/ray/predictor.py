"""Answers rows of a batch on one engine: as the server would, without HTTP."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic_core import from_json

from bullet_graph.engine.async_engine import AsyncEngine
from bullet_graph.errors import BulletGraphError
from bullet_graph.ray.batch_files import CHAT, COMPLETIONS
from bullet_graph.serve.access_log import Tally
from bullet_graph.serve.errors import ApiError, read_request
from bullet_graph.serve.generation import Generation
from bullet_graph.serve.limits import Gate
from bullet_graph.serve.metrics import ServerMetrics
from bullet_graph.serve.protocol import ChatCompletionRequest, CompletionRequest
from bullet_graph.serve.settings import ServeSettings

_KINDS: Mapping[str, type[ChatCompletionRequest] | type[CompletionRequest]] = {
    CHAT: ChatCompletionRequest,
    COMPLETIONS: CompletionRequest,
}


@dataclass(frozen=True, slots=True)
class Answered:
    """A row's answer: ``body`` is the server's, or None beside an ``error``, which has OpenAI's fields."""

    request_id: str
    status: int
    body: dict[str, Any] | None
    error: dict[str, Any] | None
    prompt_tokens: int
    output_tokens: int

    def row(self, custom_id: str) -> dict[str, Any]:
        """The row of OpenAI's output format."""
        response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        named = {"id": f"batch_req_{self.request_id}", "custom_id": custom_id}
        return named | {"response": response, "error": self.error}


class RowEngine:
    """An engine, and the server's own way from a request's body to an answer's.

    ``settings`` are those of :class:`~bullet_graph.engine.engine.Engine`, whose errors it raises.
    """

    def __init__(self, model: str, *, served_model_name: str | None = None, **settings: Any) -> None:
        self.engine = AsyncEngine(model, **settings)
        named = model if served_model_name is None else served_model_name
        # Whoever sends rows decides how many wait.
        server = ServeSettings(served_model_name=named, max_queue_len=2**31 - 1)
        gate = Gate(self.engine, server.max_queue_len)
        self._generation = Generation(self.engine, server, gate, ServerMetrics(named, self.engine, gate, None))

    async def answer(self, request: Any, *, one_output: bool = False) -> Answered:
        """Answer one row: an object with ``method``, ``url`` and ``body``. What is wrong is the answer's error.

        With ``one_output``, so is a row that asks for several.
        """
        tally = Tally()
        try:
            read = self._read(request)
            if one_output and read.num_outputs > 1:
                raise ApiError(
                    400, f"a row has one output, found {read.num_outputs}: give each prompt its own row, leave out `n`"
                )
            body = from_json(await self._generation.body(read, tally))
        except Exception as error:
            told = ApiError.of(error)
            return Answered(tally.request_id, told.status, None, told.body["error"], 0, 0)
        return Answered(tally.request_id, 200, body, None, tally.prompt_tokens, tally.output_tokens)

    @staticmethod
    def _read(request: Any) -> ChatCompletionRequest | CompletionRequest:
        method, url = request["method"], request["url"]
        kind = _KINDS.get(url) if isinstance(url, str) else None
        if kind is None or method != "POST":
            raise ApiError(400, f"`url` must be one of {', '.join(_KINDS)}, by POST; found {method!r:.20} {url!r:.80}")
        read: ChatCompletionRequest | CompletionRequest = read_request(kind, request["body"])
        if read.stream:
            raise ApiError(400, "`stream`: a batch has no streams: leave it out")
        return read


class BatchPredictor:
    """An engine for ``ray.data.Dataset.map_batches``: one in each actor.

    A batch has the column ``prompt`` (text, or token ids) or ``messages`` (a conversation). It comes back with these
    columns more: ``generated_text`` (str, empty beside an error), ``finish_reason`` (str), ``prompt_tokens`` and
    ``completion_tokens`` (int64), and ``error`` (str, empty without one). A wrong row gets an error and ends nothing.
    So does one that asks for several outputs.

    Args:
        model: a folder, a hub id or a preset.
        request: fields of each request, as clients of the server send them: ``{"max_tokens": 64}``.
        settings: those of :class:`~bullet_graph.engine.engine.Engine`.

    Raises BulletGraphError where the engine cannot be built, or has died.
    """

    def __init__(self, model: str, *, request: Mapping[str, Any] | None = None, **settings: Any) -> None:
        self._engine = RowEngine(model, **settings)
        self._request = dict(request or {})

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        field, url = ("messages", CHAT) if "messages" in batch else ("prompt", COMPLETIONS)
        if field not in batch:
            raise BulletGraphError(f"a batch must have the column prompt or messages, found {', '.join(batch)}")
        rows = [{"method": "POST", "url": url, "body": self._request | {field: _plain(each)}} for each in batch[field]]
        answered = await asyncio.gather(*(self._engine.answer(row, one_output=True) for row in rows))
        if (failure := self._engine.engine.failure) is not None:
            raise failure
        return batch | _columns(answered)


def _columns(answered: Sequence[Answered]) -> dict[str, Any]:
    choices = [{} if each.body is None else each.body["choices"][0] for each in answered]
    texts = [each.get("text", each.get("message", {}).get("content")) or "" for each in choices]
    return {
        "generated_text": np.array(texts, object),
        "finish_reason": np.array([each.get("finish_reason", "") for each in choices], object),
        "prompt_tokens": np.array([each.prompt_tokens for each in answered], np.int64),
        "completion_tokens": np.array([each.output_tokens for each in answered], np.int64),
        "error": np.array([each.error["message"] if each.error else "" for each in answered], object),
    }


def _plain(value: Any) -> Any:
    """A cell of a batch as a value of JSON: numpy's arrays and numbers are none, nor are a struct's missing fields."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if each is not None}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
