"""The engine behind Dynamo's unified back-end interface. Its ``Worker`` registers it, calls it and stops it."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from http import HTTPStatus
from typing import Any

from dynamo.common.backend import EngineConfig as Registration
from dynamo.common.backend import LLMEngine, LlmRegistration
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot, PushSource
from dynamo.llm.exceptions import EngineShutdown, HttpError, InvalidArgument
from prometheus_client import CollectorRegistry

from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.dynamo.messages import CANCELLED, CacheEvents, read_request, write_chunk
from bullet_graph.engine.async_engine import AsyncEngine
from bullet_graph.engine.engine import Engine
from bullet_graph.engine.output import OutputKind
from bullet_graph.errors import EngineDeadError, LateError, RequestError
from bullet_graph.perf.energy import open_probe
from bullet_graph.serve.app import watch
from bullet_graph.serve.errors import ApiError
from bullet_graph.serve.lifecycle import ENGINE_STOP_S, LAST_WORDS_S, warm_up
from bullet_graph.serve.limits import Gate
from bullet_graph.serve.metrics import RequestMeter, ServerMetrics
from bullet_graph.serve.settings import ServeSettings

_PROBE_TOKEN = 1
"""The prompt of Dynamo's health checks."""


class BulletGraphEngine(LLMEngine):  # type: ignore[misc]
    """One engine; ``open_engine`` makes it when Dynamo's worker starts.

    Of the server's ``settings``, it takes the name, and those of the queue, the drain and the watchdog. The frontend
    reads the folder ``model_path``.

    Attributes:
        failure: why it could not start, or why it stopped by itself; None otherwise.
        stuck: its thread has not ended, and never will.
    """

    def __init__(
        self, open_engine: Callable[[], Engine], settings: ServeSettings, *, model_path: str, warmup: bool
    ) -> None:
        self.failure: Exception | None = None
        self.stuck = False
        self._open_engine = open_engine
        self._settings = settings
        self._model_path = model_path
        self._warmup = warmup
        self._engine: AsyncEngine | None = None
        self._events = CacheEvents(self._publish_load)
        self._load: Any = None
        self._watchdog: asyncio.Task[None] | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        """A part of the interface that is not used: ``__main__`` reads the command line, and makes the engine."""
        raise TypeError(f"make a {cls.__name__} with its settings: it reads no command line such as {argv}")

    # ---- the life of the worker, in the order of the calls ----

    async def start(self, worker_id: int) -> Registration:
        del worker_id
        try:
            engine = self._open_engine()
            if engine.caches_prefixes:
                engine.listen_to_prefix_cache(self._events.put)
            self._engine = AsyncEngine(engine)
            if self._warmup:
                await warm_up(self._engine)
        except Exception as error:
            self.failure = error
            raise
        self._gate = Gate(self._engine, self._settings.max_queue_len)
        self._probe = open_probe(engine.device, engine.config.tensor_parallel_size)
        self._metrics = ServerMetrics(self._settings.served_model_name, self._engine, self._gate, self._probe)
        self._watchdog = asyncio.create_task(self._watch(self._engine))
        return Registration(
            model=self._model_path,
            served_model_name=self._settings.served_model_name,
            llm=LlmRegistration(
                context_length=engine.max_model_len,
                kv_cache_block_size=KV_BLOCK_TOKENS,
                total_kv_blocks=self._engine.stats.kv_blocks_total,
                max_num_seqs=engine.config.max_num_seqs,
                max_num_batched_tokens=engine.config.max_num_batched_tokens,
            ),
        )

    async def register_prometheus(self, metrics: Any) -> None:
        registry = CollectorRegistry()
        registry.register(self._metrics)
        register_engine_registry(metrics, registry)

    async def kv_event_sources(self) -> list[Any]:
        assert self._engine is not None
        if self._engine.engine.caches_prefixes:
            return [PushSource(on_ready=self._events.start)]
        self._events.start(None)
        return []

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._load = publisher

    async def health_check_payload(self) -> dict[str, Any]:
        payload: dict[str, Any] = build_health_check_payload(_PROBE_TOKEN)
        return payload

    async def cleanup(self) -> None:
        """Let requests under way end, for a while; abort the others, which Dynamo may move; free the memory."""
        engine = self._engine
        if engine is None:
            return
        if self._watchdog is not None:  # it has served requests
            self._gate.closed = True
            if not await _in_time(self._gate.empty.wait(), self._settings.shutdown_timeout_s):
                engine.fail("the worker was shut down before the request had ended (--shutdown-timeout)")
                await _in_time(self._gate.empty.wait(), LAST_WORDS_S)
            self._watchdog.cancel()
            if self._probe is not None:
                self._probe.close()
        self._events.stop()
        self._engine = None
        self.stuck = not await asyncio.to_thread(engine.shutdown, ENGINE_STOP_S)

    # ---- requests ----

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        engine, meter, num_tokens = self._engine, RequestMeter(self._metrics), 0
        try:
            if engine is None:
                raise EngineDeadError("the worker shuts down: ask another")
            prompt, params = read_request(
                request, max_model_len=engine.engine.max_model_len, defaults=engine.engine.default_sampling_params
            )
            if context.is_stopped():  # `abort` came too early to find the request
                return
            with self._gate.enter(1) as hand_over:
                hand_over(1)
                outputs = engine.generate(prompt, params, context.id(), output_kind=OutputKind.DELTA)
                async with aclosing(outputs) as stream:  # type: ignore[type-var]
                    async for output in stream:
                        meter.observe(output)
                        if output.error is not None:
                            raise output.error
                        num_tokens += len(output.outputs[0].token_ids)
                        yield write_chunk(output, num_tokens)
                        if output.finished:
                            return
            # A generator that waits here for a client who has left would stay in memory.
            if not context.is_killed():
                yield {**CANCELLED}
        except Exception as error:
            is_cut = isinstance(error.__cause__, EngineDeadError)  # in a drain, the gate tells that as an ApiError
            meter.end(None if isinstance(error, RequestError | LateError | ApiError) and not is_cut else "error")
            raise _as_dynamo_error(error) from error
        finally:
            meter.end("abort")

    async def abort(self, context: Any) -> None:
        if self._engine is not None:
            self._engine.abort(context.id())

    # ---- beside the requests ----

    def _publish_load(self) -> None:
        engine = self._engine
        if engine is None or self._load is None:
            return
        stats = engine.stats
        queries = stats.prefix_cache_queries
        snapshot = ComponentSnapshot(
            kv_used_blocks=stats.kv_blocks_used,
            kv_total_blocks=stats.kv_blocks_total,
            gpu_cache_usage=stats.kv_blocks_used / stats.kv_blocks_total,
            kv_cache_hit_rate=stats.prefix_cache_hits / queries if queries else None,
            dp_rank=0,
        )
        self._load.publish(0, snapshot)

    async def _watch(self, engine: AsyncEngine) -> None:
        """Stop the worker once the engine has failed: others take its requests, and it is started anew."""
        await watch(engine, self._gate, self._settings.watchdog_timeout_s)
        if not self._gate.closed:
            self.failure = engine.failure
            os.kill(os.getpid(), signal.SIGTERM)


async def _in_time(awaitable: Awaitable[object], limit_s: float) -> bool:
    with suppress(TimeoutError):
        await asyncio.wait_for(awaitable, limit_s)
        return True
    return False


def _as_dynamo_error(error: Exception) -> Exception:
    """The error that tells Dynamo's frontend what to answer."""
    told = ApiError.of(error)
    meant: Callable[..., Exception] = InvalidArgument
    if told.status == HTTPStatus.SERVICE_UNAVAILABLE:
        # The frontend then stops asking this worker. A full queue (429) must not do that.
        meant = EngineShutdown
    elif told.status >= HTTPStatus.TOO_MANY_REQUESTS:
        meant = partial(HttpError, told.status)
    return meant(told.body["error"]["message"])
