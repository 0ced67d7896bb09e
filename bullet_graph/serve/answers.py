"""Answers of requests, sent as server-sent events or as a whole while the client is there."""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bullet_graph.engine.output import OutputKind, RequestOutput
from bullet_graph.serve.errors import ApiError
from bullet_graph.serve.formats import AnswerFormat, ChatFormat, CompletionFormat, TokenTexts, usage_of
from bullet_graph.serve.generation import Generation, Job
from bullet_graph.serve.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest

DONE = b"data: [DONE]\n\n"
_NO_USAGE_YET = "null"
_LAST_WORDS_S = 5.0
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Task:
    """One request and how it is answered."""

    request: GenerationRequest
    num_prompts: int
    prepare: Callable[[], Awaitable[Job]]
    written: AnswerFormat

    @property
    def num_samples(self) -> int:
        return self.request.n or 1


class Answers:
    """Answers requests.

    Args:
        generation: runs them.
        model_name: the model's name in answers.
        texts: texts of single tokens.
        timeout_s: time limit of a request.
    """

    def __init__(
        self, generation: Generation, *, model_name: str, texts: TokenTexts, timeout_s: float
    ) -> None:
        self._generation = generation
        self._model_name = model_name
        self._texts = texts
        self._timeout_s = timeout_s

    def completion(self, request: CompletionRequest) -> "Answer":
        """Answer ``/v1/completions``."""
        prepare = partial(self._generation.completion_job, request)
        return self._answer(request, len(request.prompts), prepare, CompletionFormat, "cmpl")

    def chat(self, request: ChatCompletionRequest) -> "Answer":
        """Answer ``/v1/chat/completions``."""
        prepare = partial(self._generation.chat_job, request)
        return self._answer(request, 1, prepare, ChatFormat, "chatcmpl")

    def _answer(
        self,
        request: GenerationRequest,
        num_prompts: int,
        prepare: Callable[[], Awaitable[Job]],
        kind: type[CompletionFormat | ChatFormat],
        prefix: str,
    ) -> "Answer":
        self._generation.check_model(request)
        written = kind(
            f"{prefix}-{uuid.uuid4().hex}",
            int(time.time()),
            self._model_name,
            self._texts,
            with_token_ids=bool(request.return_token_ids),
        )
        task = _Task(request, num_prompts, prepare, written)
        if request.stream:
            return Answer(timeout_s=self._timeout_s, events=partial(self._events, task))
        return Answer(timeout_s=self._timeout_s, whole=partial(self._whole, task))

    async def _whole(self, task: _Task) -> bytes:
        with self._generation.gate.enter(task.num_samples * task.num_prompts):
            job = await task.prepare()
            finals: dict[int, RequestOutput] = {}
            async with aclosing(self._generation.outputs(job, OutputKind.FINAL_ONLY)) as outputs:
                async for index, output in outputs:
                    finals[index] = output
        in_order = [finals[index] for index in range(task.num_prompts)]
        generated = sum(len(c.token_ids) for output in in_order for c in output.outputs)
        return task.written.body(in_order, usage_of(job.prompt_tokens, generated))

    async def _events(self, task: _Task) -> AsyncGenerator[bytes, None]:
        options = task.request.stream_options
        with_usage = options is not None and bool(options.include_usage)
        always = with_usage and options is not None and bool(options.continuous_usage_stats)
        usage = _NO_USAGE_YET if with_usage else None
        generated = 0
        ended: set[int] = set()
        opened: set[int] = set()
        num_samples, written = task.num_samples, task.written
        with self._generation.gate.enter(num_samples * task.num_prompts):
            job = await task.prepare()
            async with aclosing(self._generation.outputs(job, OutputKind.DELTA)) as outputs:
                async for index, output in outputs:
                    for delta in output.outputs:
                        choice = index * num_samples + delta.index
                        if choice in ended or not (delta.token_ids or delta.finish_reason):
                            continue
                        generated += len(delta.token_ids)
                        if always:
                            usage = usage_of(job.prompt_tokens, generated)
                        if choice not in opened:
                            opened.add(choice)
                            opening = written.opening(choice, usage)
                            if opening:
                                yield opening
                        if delta.finish_reason:
                            ended.add(choice)
                        yield written.event(choice, delta, usage)
        if with_usage:
            yield written.usage_event(usage_of(job.prompt_tokens, generated))


class Answer(Response):
    """A response that is produced while it is sent; it has a time limit and is cancelled when the client leaves.

    An error before the first event is an ordinary error response. A later error is an event.

    Args:
        timeout_s: time limit for the whole response.
        events: the events of a stream, each with its ``data:`` and empty line.
        whole: the JSON body, if the response is no stream.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        events: Callable[[], AsyncGenerator[bytes, None]] | None = None,
        whole: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._events = events
        self._whole = whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        client = asyncio.create_task(_until_gone(receive))
        answered = gone = False

        def give_up(_: asyncio.Task[None]) -> None:
            nonlocal gone
            if not answered:
                gone = True
                task.cancel()

        client.add_done_callback(give_up)
        try:
            await self._answer(scope, receive, send)
        except asyncio.CancelledError:
            # Swallow the cancellation only if the client's leaving is its only cause.
            if not gone or task.uncancel():
                raise
        finally:
            answered = True
            client.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with asyncio.timeout(self._timeout_s if math.isfinite(self._timeout_s) else None):
                if self._whole is not None:
                    body = await self._whole()
                    await Response(body, media_type="application/json")(scope, receive, send)
                elif self._events is not None:
                    async with aclosing(self._events()) as events:
                        async for event in events:
                            if not started:
                                started = True
                                await send(
                                    {
                                        "type": "http.response.start",
                                        "status": 200,
                                        "headers": _STREAM_HEADERS,
                                    }
                                )
                            await send({"type": "http.response.body", "body": event, "more_body": True})
                    await send({"type": "http.response.body", "body": DONE, "more_body": False})
        except Exception as error:
            told = ApiError.of(error)
            if told.status == 500:
                logger.exception("a request failed")
            # A client that reads nothing would block this for ever.
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    if not started:
                        await told.response()(scope, receive, send)
                        return
                    event = b"data: " + told.json() + b"\n\n" + DONE
                    await send({"type": "http.response.body", "body": event, "more_body": False})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
