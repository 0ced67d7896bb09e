"""The engine for asyncio: each request is an async generator."""

import asyncio
import atexit
import itertools
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from bullet_graph.config import Policy, PromptOrder
from bullet_graph.engine.admission import Prompt
from bullet_graph.engine.engine import Engine
from bullet_graph.engine.output import EngineStats, OutputKind, RequestOutput
from bullet_graph.errors import ConfigError, EngineDeadError, RequestError
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.slo import NO_TARGETS, Slo

_Item = RequestOutput | Exception | None
"""None: the request was aborted."""
_EXIT_S = 10.0
"""A program that ends waits this long for the engine's thread."""
_IDLE_CHECK_S = 1.0
"""An idle engine looks this often whether another rank has failed."""


class _OutputStream:
    """Carries one request's outputs, or the error that ended it, from the engine's thread to the task that made it."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.items: deque[_Item] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def take(self, item: _Item) -> None:
        """Add an item, in the event loop's thread."""
        self.items.append(item)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # done: its task was cancelled
            waiter.set_result(None)

    def arrival(self) -> asyncio.Future[None]:
        """Done at the next item; the task calls this when there is none."""
        # An asyncio.Queue, which allows several producers and consumers, costs twice as much per token.
        self._waiter = self.loop.create_future()
        return self._waiter


def _send(loop: asyncio.AbstractEventLoop, *items: tuple[_OutputStream, _Item]) -> None:
    """Hand items to streams of one event loop, from another thread."""

    def take() -> None:
        for stream, item in items:
            stream.take(item)

    # RuntimeError: the loop is closed, so no task waits for the items.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(take)


class AsyncEngine:
    """Runs an :class:`Engine` in its own thread; the event loop never waits for the device.

    Its arguments are those of :class:`Engine`, or one engine. It owns the engine and shuts it down. Other threads
    may call only those methods of ``engine`` that are documented as safe in any thread. ``stats`` holds the counters
    after the last step or change of policy; a dead engine runs and holds nothing. ``failure`` says why it is dead.
    """

    def __init__(self, model: str | Engine, **settings: Any) -> None:
        if isinstance(model, Engine) and settings:
            raise ConfigError(f"an Engine already has its settings: leave out {', '.join(settings)}")
        self.engine = model if isinstance(model, Engine) else Engine(model, **settings)
        self.stats: EngineStats = self.engine.stats()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, _OutputStream] = {}
        self._open: dict[str, _OutputStream] = {}
        self._busy_since_s: float | None = None
        self._names = itertools.count()
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="bullet-graph-grammars")
        self.failure: EngineDeadError | None = None
        self._num_arriving = 0
        # Makes the check that the engine lives and the new command one step: a late request would wait for ever.
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="bullet-graph-engine", daemon=True)
        self._thread.start()
        # A daemon thread inside torch would abort the program at its end.
        atexit.register(self.shutdown, _EXIT_S)

    __signature__ = Engine.__signature__

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = OutputKind.CUMULATIVE,
        slo: Slo | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the request's outputs as they come.

        Leaving the generator early (cancelling its task, ``aclose``, ``break``) aborts the request and frees its KV
        blocks. The engine's latency targets replace those that ``slo`` lacks. Raises as :meth:`Engine.add_request`.
        """
        self.engine.require_own_process()  # first: the lock may be held for ever in a fork
        name = f"async-{next(self._names)}" if request_id is None else request_id
        num_samples = sampling_params.n if isinstance(sampling_params, SamplingParams) else 1
        stream = _OutputStream()

        def add() -> None:
            try:
                self.engine.add_request(
                    name, prompt, sampling_params, output_kind=output_kind, arrival_s=arrival_s, slo=slo
                )
            except Exception as error:
                # The error concerns this request alone: adding it has not touched the others.
                _send(stream.loop, (stream, error))
            else:
                self._streams[name] = stream
            with self._lock:
                self._num_arriving -= num_samples

        def compile_and_add() -> None:
            with suppress(Exception):  # adding the request raises it again
                self.engine.compile_structured_outputs(sampling_params)
            with self._lock:
                if self._open.get(name) is stream:
                    self._commands.put(add)
                else:  # aborted meanwhile
                    self._num_arriving -= num_samples

        def abort() -> None:
            if self._streams.get(name) is stream:
                del self._streams[name]
                self.engine.abort(name)

        with self._lock:
            self._require_alive()
            if name in self._open:
                raise RequestError(f"request id {name!r} is in use: give another")
            arrival_s = self.engine.now()
            self._open[name] = stream
            self._num_arriving += num_samples
            if isinstance(sampling_params, SamplingParams) and sampling_params.structured_outputs is not None:
                self._compilers.submit(compile_and_add)
            else:
                self._commands.put(add)
        finished = False
        try:
            while not finished:
                if not stream.items:
                    await stream.arrival()
                output = stream.items.popleft()
                if output is None:
                    return
                if isinstance(output, Exception):
                    raise output
                finished = output.finished
                yield output
        finally:
            with self._lock:
                del self._open[name]
            if not finished:
                self._commands.put(abort)

    def abort(self, request_id: str) -> None:
        """End a request now, from any thread: its generator ends without a last output. Unknown ids are ignored.

        For a caller that cannot leave the generator, as it waits there.
        """
        with self._lock:
            stream = self._open.get(request_id)
        if stream is not None:
            _send(stream.loop, (stream, None))

    async def set_policy(
        self, policy: str | Policy, slo: Slo = NO_TARGETS, prompt_order: PromptOrder | None = None
    ) -> None:
        """:meth:`Engine.set_policy`; also raises EngineDeadError if the engine was shut down or has failed."""
        self.engine.require_own_process()
        done: Future[None] = Future()

        def change() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                self.engine.set_policy(policy, slo, prompt_order)
            except Exception as error:
                # The error is the caller's alone: the engine goes on as before.
                done.set_exception(error)
            else:
                self.stats = self.engine.stats()
                done.set_result(None)

        with self._lock:
            self._require_alive()
            self._commands.put(change)
        await asyncio.wrap_future(done)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for KV blocks, or for the thread to take their request; none if the engine is dead."""
        return 0 if self.failure else self._num_arriving + self.engine.num_waiting()

    def _require_alive(self) -> None:
        if self.failure is not None:
            raise _copy(self.failure)

    def stalled(self, limit_s: float) -> str | None:
        """Describe what has made no progress for ``limit_s`` seconds, or return None. Safe in any thread."""
        if launches := self.engine.stalled_launches(limit_s):
            return "; then ".join(launches)
        busy_since_s = self._busy_since_s
        waited_s = 0.0 if busy_since_s is None else time.monotonic() - busy_since_s
        if waited_s <= limit_s:
            return None
        return f"engine loop: between two launches, nothing has happened for {waited_s:.1f} s"

    def fail(self, reason: str) -> None:
        """Give the engine up, even if its thread is stuck: all requests get an EngineDeadError with this reason.

        If the thread ever comes back from what it is stuck in, it ends and frees the memory.
        """
        self._end_streams(EngineDeadError(reason))
        self._commands.put(None)

    def shutdown(self, timeout_s: float | None = None) -> bool:
        """Stop the thread and free the engine's memory; running requests get an EngineDeadError.

        Returns whether the thread, which may be stuck, has ended after at most ``timeout_s`` seconds (None: no limit).
        """
        self._commands.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.shutdown)

    # ---- the engine's thread ----

    def _run(self) -> None:
        failure = EngineDeadError("the engine was shut down: make a new one")
        try:
            while self._take_commands():
                outputs = self.engine.step()
                # Before the outputs, since whoever gets them may read the counters.
                self.stats = self.engine.stats()
                self._deliver(outputs)
        except EngineDeadError as error:
            failure = error
        except Exception as error:
            failure = EngineDeadError(f"the engine's thread failed: {error}")
            failure.__cause__ = error
            raise
        finally:
            # First of all, as a failed device may fail again in shutdown.
            self._end_streams(failure)
            self._streams.clear()
            self._busy_since_s = None
            self._compilers.shutdown(wait=False)
            try:
                self.engine.shutdown()
            finally:
                atexit.unregister(self.shutdown)
                # Requests that came while the engine stopped are refused.
                while not self._commands.empty():
                    if (command := self._commands.get()) is not None:
                        command()

    def _end_streams(self, failure: EngineDeadError) -> None:
        """Fail all requests, including later ones and those the engine has not seen; the first failure counts."""
        idle = dict.fromkeys(self.stats.lane_sms, 0)
        self.stats = replace(self.stats, num_running=0, num_waiting=0, kv_blocks_used=0, lane_sms=idle)
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
            streams = list(self._open.values())
        for stream in streams:
            _send(stream.loop, (stream, _copy(failure)))

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Hand out a step's outputs, but of aborted requests, together for each event loop: to wake one is dear."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_OutputStream, _Item]]] = defaultdict(list)
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                if any(completion.finish_reason == "abort" for completion in output.outputs):
                    continue
                del self._streams[output.request_id]
            by_loop[stream.loop].append((stream, output))
        for loop, items in by_loop.items():
            _send(loop, *items)

    def _take_commands(self) -> bool:
        """Run the callers' commands; wait, and capture missing graphs, while the engine is idle. False means stop."""
        # After a failure from outside, _run refuses the rest.
        while self.failure is None:
            self._busy_since_s = time.monotonic()
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                if self.engine.has_unfinished_requests():
                    return True
                if self.engine.prepare_next():
                    continue
                self._busy_since_s = None
                try:
                    command = self._commands.get(timeout=_IDLE_CHECK_S)
                except queue.Empty:
                    continue
                self._busy_since_s = time.monotonic()
            if command is None:
                return False
            command()
        return False


def _copy(error: EngineDeadError) -> EngineDeadError:
    """A copy for each task, as raising an error adds to its traceback."""
    copy = EngineDeadError(*error.args)
    copy.__cause__ = error.__cause__
    return copy
