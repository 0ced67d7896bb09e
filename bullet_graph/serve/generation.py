"""Serves requests on the engine: tokenizes, applies token limits, merges several prompts, and measures."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from bullet_graph.engine.async_engine import AsyncEngine
from bullet_graph.engine.output import OutputKind, RequestOutput
from bullet_graph.errors import LateError, ModelError, PromptError, RequestError
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.serve import protocol
from bullet_graph.serve.access_log import Tally
from bullet_graph.serve.answers import Answer
from bullet_graph.serve.errors import ApiError
from bullet_graph.serve.formats import AnswerFormat, ChatFormat, CompletionFormat, Fields, to_json, token_texts
from bullet_graph.serve.limits import Gate
from bullet_graph.serve.metrics import RequestMeter, ServerMetrics
from bullet_graph.serve.settings import ServeSettings
from bullet_graph.serve.tools import FORCED, FORMATS, ToolCallParser, format_of
from bullet_graph.slo import Slo

_LONG_TEXT = 2000
"""Longer texts (in characters) are tokenized in a thread, as they would block the event loop."""

T = TypeVar("T")
Request = protocol.CompletionRequest | protocol.ChatCompletionRequest
Indexed = tuple[int, RequestOutput]
"""An output and the index of its prompt."""


class Generation:
    """Serves requests on the engine, each inside the gate."""

    def __init__(self, engine: AsyncEngine, settings: ServeSettings, gate: Gate, metrics: ServerMetrics) -> None:
        self._engine = engine
        self._settings = settings
        self._gate = gate
        self._metrics = metrics
        self._tokenizer = engine.engine.tokenizer
        self._defaults = engine.engine.default_sampling_params
        self._texts = token_texts(self._tokenizer)
        template = None if self._tokenizer is None else self._tokenizer.tool_template
        self._tool_format = FORMATS.get(settings.tool_call_parser) or format_of(template or "")
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="bullet-graph-tokenizer")

    def check_model(self, model: str | None) -> None:
        """Raise ApiError 404 if a request names another model."""
        served = self._settings.served_model_name
        if model is not None and model != served:
            raise ApiError(
                404,
                f"the model {model!r:.200} is not served here: ask for {served!r} (/v1/models lists it)",
                code="model_not_found",
                param="model",
            )

    def answer(self, request: Request, tally: Tally) -> Answer:
        """Answer a request, whose tokens are counted in the tally; ApiError 404 if it names another model."""
        written, timeout_s = self._format(request, tally), self._settings.request_timeout_s
        if request.stream:
            return Answer(timeout_s=timeout_s, events=partial(self._events, request, written, tally))
        return Answer(timeout_s=timeout_s, whole=partial(self._whole, request, written, tally))

    async def body(self, request: Request, tally: Tally) -> bytes:
        """The whole answer to a request as JSON, for callers without HTTP; raises what ``ApiError.of`` takes."""
        return await self._whole(request, self._format(request, tally), tally)

    def _format(self, request: Request, tally: Tally) -> AnswerFormat:
        self.check_model(request.model)
        kind: Callable[..., AnswerFormat] = CompletionFormat
        if isinstance(request, protocol.ChatCompletionRequest):
            kind = partial(ChatFormat, call_parser=self._call_parser(request))
        tokenizer, skips = self._tokenizer, request.skip_special_tokens is not False
        decode: Callable[[list[int], bool], str] = (lambda *_: "") if tokenizer is None else tokenizer.decode
        return kind(
            self._settings.served_model_name,
            self._texts,
            with_token_ids=bool(request.return_token_ids),
            request_id=tally.request_id,
            echo=[p if isinstance(p, str) else decode(p, skips) for p in request.prompts] if request.echo else None,
            num_logprobs=request.wanted_logprobs,
            num_prompt_logprobs=request.prompt_logprobs,
            adding=None if tokenizer is None else lambda: tokenizer.stream(None if skips else frozenset()).push,
        )

    def _call_parser(self, request: protocol.ChatCompletionRequest) -> Callable[[], ToolCallParser] | None:
        """What finds calls in an answer; None where the model may make none."""
        if not request.offered_tools:
            return None
        if self._tool_format is None:
            raise ApiError(
                400,
                f"`tools` need a chat template in one of these formats of calls: {', '.join(FORMATS)}. This model's is "
                "in none: leave them out, or start the server with --tool-call-parser",
            )
        most_calls = 1 if request.parallel_tool_calls is False else None
        form = self._tool_format if request.required_tools is None else FORCED
        return partial(ToolCallParser, form, most_calls=most_calls)

    async def tokenize(self, request: protocol.TokenizeRequest) -> bytes:
        """The token ids of a text or a conversation, as JSON; errors as for a prompt."""
        self.check_model(request.model)
        self._gate.check_open()
        text = await self._rendered(request) if request.prompt is None else request.prompt
        special = request.add_special_tokens
        ids = await self._tokens(text, special=request.prompt is not None if special is None else special)
        strs = self._tokenizer.tokens(ids) if self._tokenizer and request.return_token_strs else None
        limit = self._engine.engine.max_model_len
        return to_json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strs})

    async def detokenize(self, request: protocol.DetokenizeRequest) -> bytes:
        """The text of token ids, special tokens included, as JSON."""
        self.check_model(request.model)
        self._gate.check_open()
        limit, vocabulary = self._engine.engine.max_model_len, self._engine.engine.model_config.vocab_size
        if self._tokenizer is None:
            raise PromptError("the model has no tokenizer, so its tokens have no text: serve a folder with one")
        if len(request.tokens) > limit:
            raise PromptError(f"`tokens` may be at most {limit} here, found {len(request.tokens)}")
        if (largest := max(request.tokens, default=0)) >= vocabulary:
            raise PromptError(f"`tokens` must be of the vocabulary of {vocabulary} tokens, found {largest}")
        decode = partial(self._tokenizer.decode, request.tokens, skip_special_tokens=False)
        return to_json({"prompt": await self._in_thread(decode)})

    async def _whole(self, request: Request, written: AnswerFormat, tally: Tally) -> bytes:
        finals: dict[int, RequestOutput] = {}
        async with self._serve(request, OutputKind.FINAL_ONLY, tally) as outputs:
            async for index, output in outputs:
                finals[index] = output
                tally.cached_tokens[index] = output.num_cached_tokens
                tally.output_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        return written.body([finals[index] for index in range(len(finals))], tally.usage)

    async def _events(self, request: Request, written: AnswerFormat, tally: Tally) -> AsyncGenerator[bytes, None]:
        options = request.stream_options or protocol.StreamOptions()
        always = options.include_usage and options.continuous_usage_stats
        more: Fields = {"usage": None} if options.include_usage else {}
        opened, ended, num_samples = set[int](), set[int](), request.n or 1
        async with self._serve(request, OutputKind.DELTA, tally) as outputs:
            async for index, output in outputs:
                tally.cached_tokens[index] = output.num_cached_tokens
                for delta in output.outputs:
                    choice = index * num_samples + delta.index
                    if choice in ended or not (delta.token_ids or delta.finish_reason):
                        continue
                    tally.output_tokens += len(delta.token_ids)
                    if always:
                        more = {"usage": tally.usage}
                    if delta.finish_reason:
                        ended.add(choice)
                    if choice in opened:
                        yield written.event(choice, delta, more)
                    else:
                        opened.add(choice)
                        yield written.opening(choice, delta, index, output, more)
        if options.include_usage:
            yield written.usage_event({"usage": tally.usage})

    @asynccontextmanager
    async def _serve(
        self, request: Request, kind: OutputKind, tally: Tally
    ) -> AsyncIterator[AsyncGenerator[Indexed, None]]:
        """The outputs as they come; leaving early aborts all prompts."""
        with self._gate.enter(request.num_outputs) as hand_over:
            prompts = await self._prompts(request)
            tally.prompt_tokens = sum(map(len, prompts))
            slo = None if request.slo is None else Slo(**request.slo.model_dump())
            streams = []
            for index, prompt in enumerate(prompts):
                params = request.sampling_params(self._max_tokens(request, len(prompt)), self._defaults)
                if isinstance(request, protocol.ChatCompletionRequest) and request.offered_tools:
                    # The mark of calls is often a special token.
                    marked = self._tool_format is not None and self._tool_format.begin != ""
                    params = replace(params, skip_special_tokens=params.skip_special_tokens and not marked)
                streams.append(partial(self._one, f"{tally.request_id}-{index}", prompt, params, slo, kind, hand_over))
            async with aclosing(_merged(streams)) as outputs:
                yield outputs

    async def _one(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        slo: Slo | None,
        kind: OutputKind,
        hand_over: Callable[[int], None],
    ) -> AsyncGenerator[RequestOutput, None]:
        meter = RequestMeter(self._metrics)
        hand_over(params.n)
        try:
            outputs = self._engine.generate(prompt, params, request_id=request_id, output_kind=kind, slo=slo)
            async with aclosing(outputs) as stream:  # type: ignore[type-var]
                async for output in stream:
                    meter.observe(output)
                    if output.error is not None:
                        raise output.error
                    yield output
        except (RequestError, LateError):
            meter.end(None)
            raise
        except Exception:
            meter.end("error")
            raise
        finally:
            meter.end("abort")

    async def _prompts(self, request: Request) -> list[list[int]]:
        if isinstance(request, protocol.CompletionRequest):
            return [await self._tokens(p) if isinstance(p, str) else p for p in request.prompts]
        return [await self._tokens(await self._rendered(request), special=False)]

    async def _rendered(self, request: protocol.ChatCompletionRequest | protocol.TokenizeRequest) -> str:
        if self._tokenizer is None:
            raise ModelError(
                "the model has no tokenizer, which a chat needs: use /v1/completions with token ids, or serve a folder "
                "with tokenizer.json"
            )
        said = request.messages or ()
        if len(said) > self._longest_prompt:
            raise self._too_long(f"and a conversation as many messages, found {len(said)} messages")
        if isinstance(request, protocol.ChatCompletionRequest):
            opened, tools = True, request.offered_tools
        else:
            opened, tools = request.add_generation_prompt is not False, request.tools or []
        render = partial(self._tokenizer.apply_chat_template, add_generation_prompt=opened)

        def rendered() -> str:
            messages = [message.for_template() for message in said]
            self._check_characters(sum(len(message["content"]) for message in messages))
            functions = [tool.model_dump(exclude_unset=True) for tool in tools]
            return render(messages, template_kwargs=request.chat_template_kwargs, tools=functions or None)

        return await self._in_thread(rendered)

    async def _tokens(self, text: str, *, special: bool = True) -> list[int]:
        if self._tokenizer is None:
            raise PromptError("`prompt` as text needs a tokenizer, but the model has none: pass token ids")
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
            raise self._too_long(f"and no text of more than {most} characters fits, found {characters} characters")

    def _too_long(self, found: str) -> ApiError:
        return self._over(f"a prompt may have at most {self._longest_prompt} tokens here, {found}: shorten it")

    def _over(self, why: str) -> ApiError:
        # Clients such as LiteLLM know this error by its first words.
        limit = f"this model's maximum context length is {self._engine.engine.max_model_len} tokens"
        return ApiError(400, f"{limit}; {why}", code="context_length_exceeded")

    def _max_tokens(self, request: Request, prompt_tokens: int) -> int:
        """The output limit of a prompt; ApiError if the prompt, or prompt and output together, are too long."""
        limit = self._engine.engine.max_model_len
        if prompt_tokens > self._longest_prompt:
            raise self._too_long(f"found {prompt_tokens}")
        room = limit - prompt_tokens
        wanted = request.wanted_tokens
        if wanted is None:
            # min_tokens raises the default.
            default = request.default_tokens or self._defaults.get("max_tokens") or room
            return min(max(default, request.min_tokens or 1), room)
        if wanted > room:
            found = f"found {prompt_tokens} of the prompt + {wanted} of the output"
            raise self._over(f"{found}: ask for at most {room} tokens, or shorten the prompt")
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
