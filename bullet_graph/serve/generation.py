"""Serves requests on the engine: tokenizes, applies token limits, merges several prompts, and measures."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TypeVar

from bullet_graph.engine.async_engine import AsyncEngine
from bullet_graph.engine.output import OutputKind, RequestOutput
from bullet_graph.errors import ModelError, RequestError
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.serve.answers import Answer
from bullet_graph.serve.errors import ApiError
from bullet_graph.serve.formats import AnswerFormat, ChatFormat, CompletionFormat, token_texts, usage_of
from bullet_graph.serve.limits import Gate
from bullet_graph.serve.metrics import RequestMeter, ServerMetrics
from bullet_graph.serve.protocol import ChatCompletionRequest, CompletionRequest, StreamOptions
from bullet_graph.serve.settings import ServeSettings
from bullet_graph.slo import Slo

_LONG_TEXT = 2000
"""Longer texts (in characters) are tokenized in a thread, as they would block the event loop."""

T = TypeVar("T")
Request = CompletionRequest | ChatCompletionRequest
Indexed = tuple[int, RequestOutput]
"""An output and the index of its prompt."""


class Generation:
    """Serves requests on the engine, each inside the gate."""

    def __init__(
        self, engine: AsyncEngine, settings: ServeSettings, gate: Gate, metrics: ServerMetrics
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._gate = gate
        self._metrics = metrics
        self._tokenizer = engine.engine.tokenizer
        self._texts = token_texts(self._tokenizer)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="bullet-graph-tokenizer")

    def check_model(self, model: str | None) -> None:
        """Raise ApiError 404 if a request names another model."""
        served = self._settings.served_model_name
        if model is not None and model != served:
            raise ApiError(
                404,
                f"the model {model!r:.200} is not served here: ask for {served!r}, which /v1/models lists",
                code="model_not_found",
                param="model",
            )

    def answer(self, request: Request) -> Answer:
        """Answer a request; ApiError 404 if it names another model."""
        self.check_model(request.model)
        kind = ChatFormat if isinstance(request, ChatCompletionRequest) else CompletionFormat
        written = kind(
            self._settings.served_model_name, self._texts, with_token_ids=bool(request.return_token_ids)
        )
        timeout_s = self._settings.request_timeout_s
        if request.stream:
            return Answer(timeout_s=timeout_s, events=partial(self._events, request, written))
        return Answer(timeout_s=timeout_s, whole=partial(self._whole, request, written))

    async def _whole(self, request: Request, written: AnswerFormat) -> bytes:
        finals: dict[int, RequestOutput] = {}
        async with self._serve(request, OutputKind.FINAL_ONLY) as (prompt_tokens, outputs):
            async for index, output in outputs:
                finals[index] = output
        in_order = [finals[index] for index in range(len(finals))]
        generated = sum(len(sample.token_ids) for output in in_order for sample in output.outputs)
        return written.body(in_order, usage_of(prompt_tokens, generated))

    async def _events(self, request: Request, written: AnswerFormat) -> AsyncGenerator[bytes, None]:
        options = request.stream_options or StreamOptions()
        always = options.include_usage and options.continuous_usage_stats
        usage = "null" if options.include_usage else None
        num_samples, generated = request.n or 1, 0
        opened: set[int] = set()
        ended: set[int] = set()
        async with self._serve(request, OutputKind.DELTA) as (prompt_tokens, outputs):
            async for index, output in outputs:
                for delta in output.outputs:
                    choice = index * num_samples + delta.index
                    if choice in ended or not (delta.token_ids or delta.finish_reason):
                        continue
                    generated += len(delta.token_ids)
                    if always:
                        usage = usage_of(prompt_tokens, generated)
                    if choice not in opened:
                        opened.add(choice)
                        opening = written.opening(choice, usage)
                        if opening:
                            yield opening
                    if delta.finish_reason:
                        ended.add(choice)
                    yield written.event(choice, delta, usage)
        if options.include_usage:
            yield written.usage_event(usage_of(prompt_tokens, generated))

    @asynccontextmanager
    async def _serve(
        self, request: Request, kind: OutputKind
    ) -> AsyncIterator[tuple[int, AsyncGenerator[Indexed, None]]]:
        """Tokens of the prompts, and the outputs as they come; leaving early aborts all prompts."""
        with self._gate.enter(request.num_outputs) as hand_over:
            prompts = await self._prompts(request)
            slo = None if request.slo is None else Slo(**request.slo.model_dump())
            streams = []
            for prompt in prompts:
                params = request.sampling_params(self._max_tokens(request, len(prompt)))
                streams.append(partial(self._one, prompt, params, slo, kind, hand_over))
            async with aclosing(_merged(streams)) as outputs:
                yield sum(map(len, prompts)), outputs

    async def _one(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        slo: Slo | None,
        kind: OutputKind,
        hand_over: Callable[[int], None],
    ) -> AsyncGenerator[RequestOutput, None]:
        meter = RequestMeter(self._metrics, len(prompt))
        hand_over(params.n)
        try:
            outputs = self._engine.generate(prompt, params, output_kind=kind, slo=slo)
            async with aclosing(outputs) as stream:  # type: ignore[type-var]
                async for output in stream:
                    meter.observe(output)
                    yield output
        except RequestError:
            meter.end(None)
            raise
        except Exception:
            meter.end("error")
            raise
        finally:
            meter.end("abort")

    async def _prompts(self, request: Request) -> list[list[int]]:
        if isinstance(request, CompletionRequest):
            return [await self._tokens(p) if isinstance(p, str) else p for p in request.prompts]
        messages = [message.for_template() for message in request.messages]
        if self._tokenizer is None:
            raise ModelError(
                "the model has no tokenizer, which a chat needs: use /v1/completions with token ids, or serve a folder "
                "with tokenizer.json"
            )
        if len(messages) > self._longest_prompt:
            raise self._too_long(f"and a conversation as many messages, found {len(messages)} messages")
        self._check_characters(sum(len(message["content"]) for message in messages))
        render = partial(self._tokenizer.apply_chat_template, messages)
        text = await self._in_thread(partial(render, template_kwargs=request.chat_template_kwargs))
        return [await self._tokens(text, special=False)]

    async def _tokens(self, text: str, *, special: bool = True) -> list[int]:
        if self._tokenizer is None:
            raise ApiError(
                400, "a text prompt needs a tokenizer, but the model has none: pass token ids", param="prompt"
            )
        self._check_characters(len(text))
        encode = partial(self._tokenizer.encode, text, special)
        return encode() if len(text) <= _LONG_TEXT else await self._in_thread(encode)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    @property
    def _longest_prompt(self) -> int:
        limit = self._engine.engine.max_model_len - 1
        return min(self._settings.max_prompt_tokens or limit, limit)

    def _check_characters(self, characters: int) -> None:
        """Refuse a text that is too long whatever its tokens, before time is spent on it."""
        assert self._tokenizer is not None
        most = self._longest_prompt * self._tokenizer.max_token_characters
        if characters > most:
            raise self._too_long(
                f"and no text of more than {most} characters fits, found {characters} characters"
            )

    def _too_long(self, found: str) -> ApiError:
        return ApiError(
            400,
            f"a prompt may have at most {self._longest_prompt} tokens here, {found}: shorten it",
            code="context_length_exceeded",
        )

    def _max_tokens(self, request: Request, prompt_tokens: int) -> int:
        """The output limit of a prompt; ApiError if the prompt, or prompt and output together, are too long."""
        limit = self._engine.engine.max_model_len
        if prompt_tokens > self._longest_prompt:
            raise self._too_long(f"found {prompt_tokens}")
        room = limit - prompt_tokens
        wanted = request.wanted_tokens
        if wanted is None:
            # min_tokens raises the default.
            return min(max(request.default_tokens or room, request.min_tokens or 1), room)
        if wanted > room:
            raise ApiError(
                400,
                f"prompt and output together may have at most {limit} tokens, found {prompt_tokens} + {wanted}: ask "
                f"for at most {room} tokens, or shorten the prompt",
                code="context_length_exceeded",
            )
        return wanted

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


async def _merged(
    streams: Sequence[Callable[[], AsyncGenerator[RequestOutput, None]]],
) -> AsyncGenerator[Indexed, None]:
    """The outputs of several streams as they come, each with its stream's index."""
    if len(streams) == 1:
        async with aclosing(streams[0]()) as outputs:
            async for output in outputs:
                yield 0, output
        return
    merged: asyncio.Queue[Indexed | Exception | None] = asyncio.Queue()

    async def pump(index: int) -> None:
        try:
            async with aclosing(streams[index]()) as outputs:
                async for output in outputs:
                    merged.put_nowait((index, output))
        except Exception as error:
            merged.put_nowait(error)
        else:
            merged.put_nowait(None)

    tasks = [asyncio.create_task(pump(index)) for index in range(len(streams))]
    try:
        left = len(tasks)
        while left:
            item = await merged.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
