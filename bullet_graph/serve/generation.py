"""Runs requests on the engine: tokenizes, applies token limits, merges several prompts, and measures."""

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from bullet_graph.engine.async_engine import AsyncEngine
from bullet_graph.engine.output import OutputKind, RequestOutput
from bullet_graph.errors import ModelError, RequestError
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.serve.errors import ApiError
from bullet_graph.serve.limits import Gate
from bullet_graph.serve.metrics import ServerMetrics
from bullet_graph.serve.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from bullet_graph.serve.settings import ServeSettings
from bullet_graph.slo import Slo

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for ``/v1/completions``; a chat continues to the model's limit."""

_LONG_TEXT = 2000
"""Longer texts (in characters) are tokenized in a thread, as they would block the event loop."""

P = ParamSpec("P")
T = TypeVar("T")
Indexed = tuple[int, RequestOutput]


@dataclass(frozen=True, slots=True)
class Job:
    """The engine's work for one request.

    Attributes:
        prompts: token ids of at least one prompt.
        params: settings of each prompt.
        slo: latency targets; None takes the engine's.
    """

    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    slo: Slo | None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))


class Generation:
    """Runs requests on the engine.

    Args:
        engine: the engine.
        settings: the server's settings.
        gate: a caller enters it before anything is done for a request.
        metrics: measures every output.
    """

    def __init__(
        self, engine: AsyncEngine, settings: ServeSettings, gate: Gate, metrics: ServerMetrics
    ) -> None:
        self._engine = engine
        self._settings = settings
        self.gate = gate
        self._metrics = metrics
        self._tokenizer = engine.engine.tokenizer
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="bullet-graph-tokenizer")

    def check_model(self, request: GenerationRequest) -> None:
        """Raise ApiError 404 if the request names another model."""
        served = self._settings.served_model_name
        if request.model is not None and request.model != served:
            raise ApiError(
                404,
                f"the model {request.model!r:.200} is not served here: ask for {served!r}, which /v1/models lists",
                code="model_not_found",
                param="model",
            )

    async def completion_job(self, request: CompletionRequest) -> Job:
        """Tokenize a completion's prompts; ApiError or RequestError if a prompt or a setting is wrong."""
        prompts = [await self._tokens(p) if isinstance(p, str) else p for p in request.prompts]
        return self._job(request, prompts, COMPLETION_MAX_TOKENS)

    async def chat_job(self, request: ChatCompletionRequest) -> Job:
        """Render a conversation with the model's chat template.

        Raises:
            ApiError, RequestError, ModelError: there is no template, or the template or a limit refuses the messages.
        """
        messages = [message.for_template() for message in request.messages]
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise ModelError(
                "the model has no tokenizer, which a chat needs: use /v1/completions with token ids, or serve a folder "
                "with tokenizer.json"
            )
        length = sum(len(message["content"]) for message in messages)
        text = await self._run(length, tokenizer.apply_chat_template, messages)
        return self._job(request, [await self._tokens(text, special=False)], None)

    async def outputs(self, job: Job, kind: OutputKind) -> AsyncGenerator[Indexed, None]:
        """Yield (index of the prompt, output) as outputs come; leaving early aborts all prompts.

        Raises:
            RequestError, EngineDeadError: as :meth:`AsyncEngine.generate`.
        """
        if len(job.prompts) == 1:
            async with aclosing(self._one(job, 0, kind)) as outputs:
                async for output in outputs:
                    yield 0, output
            return
        merged: asyncio.Queue[Indexed | Exception | None] = asyncio.Queue()

        async def pump(index: int) -> None:
            try:
                async with aclosing(self._one(job, index, kind)) as outputs:
                    async for output in outputs:
                        merged.put_nowait((index, output))
            except Exception as error:
                merged.put_nowait(error)
            else:
                merged.put_nowait(None)

        tasks = [asyncio.create_task(pump(index)) for index in range(len(job.prompts))]
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

    async def _one(self, job: Job, index: int, kind: OutputKind) -> AsyncGenerator[RequestOutput, None]:
        meter = self._metrics.request(len(job.prompts[index]))
        try:
            outputs = self._engine.generate(
                job.prompts[index], job.params[index], output_kind=kind, slo=job.slo
            )
            async with aclosing(outputs) as stream:  # type: ignore[type-var]
                async for output in stream:
                    meter.observe(output)
                    yield output
        except RequestError:
            meter.refuse()
            raise
        except Exception:
            meter.end("error")
            raise
        finally:
            meter.end("abort")

    async def _tokens(self, text: str, *, special: bool = True) -> list[int]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise ApiError(
                400, "a text prompt needs a tokenizer, but the model has none: pass token ids", param="prompt"
            )
        return await self._run(len(text), tokenizer.encode, text, special)

    async def _run(self, length: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function, in a thread if its text is long."""
        call = functools.partial(function, *args, **kwargs)
        if length <= _LONG_TEXT:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _job(
        self, request: GenerationRequest, prompts: Sequence[Sequence[int]], default_tokens: int | None
    ) -> Job:
        params = tuple(
            request.sampling_params(self._max_tokens(request, len(prompt), default_tokens))
            for prompt in prompts
        )
        slo = None if request.slo is None else request.slo.to_slo()
        return Job(prompts, params, slo)

    def _max_tokens(self, request: GenerationRequest, prompt_tokens: int, default: int | None) -> int:
        """The output limit of a prompt; ApiError if the prompt, or prompt and output together, are too long."""
        limit = self._engine.engine.max_model_len
        longest = min(self._settings.max_prompt_tokens or limit, limit - 1)
        if prompt_tokens > longest:
            raise ApiError(
                400,
                f"a prompt may have at most {longest} tokens here, found {prompt_tokens}: shorten it",
                code="context_length_exceeded",
            )
        room = limit - prompt_tokens
        wanted = request.wanted_tokens
        if wanted is not None and wanted > room:
            raise ApiError(
                400,
                f"prompt and output together may have at most {limit} tokens, found {prompt_tokens} + {wanted}: ask "
                f"for at most {room} tokens, or shorten the prompt",
                code="context_length_exceeded",
            )
        if wanted is None:
            wanted = room if default is None else min(default, room)
            # min_tokens raises the default.
            wanted = min(max(wanted, request.min_tokens or 1), room)
        return wanted

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
