"""Answers a request, as a stream or as a whole, in the format of its kind."""

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial

from bullet_graph.engine.output import OutputKind, RequestOutput
from bullet_graph.serve.chat import ChatFormat
from bullet_graph.serve.completions import CompletionFormat
from bullet_graph.serve.formats import AnswerFormat, TokenTexts, usage_of
from bullet_graph.serve.generation import Generation, Job
from bullet_graph.serve.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from bullet_graph.serve.sse import Answer

_NO_USAGE_YET = "null"


class Answers:
    """Answers requests.

    Args:
        generation: runs them.
        model_name: what answers call the model.
        texts: of single tokens.
        timeout_s: most seconds of a request.
    """

    def __init__(
        self, generation: Generation, *, model_name: str, texts: TokenTexts, timeout_s: float
    ) -> None:
        self._generation = generation
        self._model_name = model_name
        self._texts = texts
        self._timeout_s = timeout_s

    def completion(self, request: CompletionRequest) -> Answer:
        """Answer ``/v1/completions``."""
        written = CompletionFormat(
            *self._head("cmpl"), self._texts, with_token_ids=bool(request.return_token_ids)
        )
        return self._answer(
            request, len(request.prompts), partial(self._generation.completion_job, request), written
        )

    def chat(self, request: ChatCompletionRequest) -> Answer:
        """Answer ``/v1/chat/completions``."""
        written = ChatFormat(
            *self._head("chatcmpl"), self._texts, with_token_ids=bool(request.return_token_ids)
        )
        return self._answer(request, 1, partial(self._generation.chat_job, request), written)

    def _head(self, kind: str) -> tuple[str, int, str]:
        return f"{kind}-{uuid.uuid4().hex}", int(time.time()), self._model_name

    def _answer(
        self,
        request: GenerationRequest,
        num_prompts: int,
        prepare: Callable[[], Awaitable[Job]],
        written: AnswerFormat,
    ) -> Answer:
        self._generation.check_model(request)
        arguments = request, num_prompts, prepare, written
        if request.stream:
            return Answer(timeout_s=self._timeout_s, events=partial(self._events, *arguments))
        return Answer(timeout_s=self._timeout_s, whole=partial(self._whole, *arguments))

    async def _whole(
        self,
        request: GenerationRequest,
        num_prompts: int,
        prepare: Callable[[], Awaitable[Job]],
        written: AnswerFormat,
    ) -> bytes:
        with self._generation.gate.enter((request.n or 1) * num_prompts):
            job = await prepare()
            finals: dict[int, RequestOutput] = {}
            async with aclosing(self._generation.outputs(job, OutputKind.FINAL_ONLY)) as outputs:
                async for index, output in outputs:
                    finals[index] = output
        in_order = [finals[index] for index in range(num_prompts)]
        generated = sum(len(c.token_ids) for output in in_order for c in output.outputs)
        return written.body(in_order, usage_of(job.prompt_tokens, generated))

    async def _events(
        self,
        request: GenerationRequest,
        num_prompts: int,
        prepare: Callable[[], Awaitable[Job]],
        written: AnswerFormat,
    ) -> AsyncGenerator[bytes, None]:
        options = request.stream_options
        with_usage = options is not None and bool(options.include_usage)
        always = with_usage and options is not None and bool(options.continuous_usage_stats)
        usage = _NO_USAGE_YET if with_usage else None
        generated = 0
        ended: set[int] = set()
        opened: set[int] = set()
        num_samples = request.n or 1
        with self._generation.gate.enter(num_samples * num_prompts):
            job = await prepare()
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
