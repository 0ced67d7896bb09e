"""The engine for asyncio: many requests at once, each an async generator."""

import asyncio
import itertools
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType

from bullet_graph.config import Policy, PromptOrder, former_names_too
from bullet_graph.engine.admission import Prompt
from bullet_graph.engine.engine import Engine
from bullet_graph.engine.output import EngineStats, OutputKind, RequestOutput
from bullet_graph.errors import EngineDeadError
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.slo import NO_TARGETS, Slo


class _OutputStream:
    """Carries one request's outputs from the engine's thread to the task that waits for them; made in that task.

    Attributes:
        loop: the task's.
        items: what it has not taken yet: outputs, or the error that ended the request.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.items: deque[RequestOutput | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: RequestOutput | Exception) -> None:
        """From another thread."""
        _put_all(self.loop, [(self, item)])

    def take(self, item: RequestOutput | Exception) -> None:
        """In the loop's own thread."""
        self.items.append(item)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # done: its task was cancelled
            waiter.set_result(None)

    def arrival(self) -> asyncio.Future[None]:
        """Done once there is an item; for the one task that takes them, when there is none."""
        # An asyncio.Queue, which may have many on both sides, costs twice as much a token.
        self._waiter = self.loop.create_future()
        return self._waiter


def _put_all(
    loop: asyncio.AbstractEventLoop, items: list[tuple[_OutputStream, RequestOutput | Exception]]
) -> None:
    """Hand items to their streams, which are all this loop's, from another thread."""

    def take() -> None:
        for stream, item in items:
            stream.take(item)

    # Raised where the loop is closed: its tasks are gone, too, so nobody waits for the items.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(take)


class AsyncEngine:
    """Runs an :class:`Engine` in a thread of its own; the event loop never waits for the device.

    Args:
        engine: the engine to drive; this object owns it from now on and shuts it down.

    Attributes:
        engine: the engine; only what its methods call safe may be asked of it from other threads.
        stats: its counters and state after the last step, or change of policy.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.stats: EngineStats = engine.stats()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, _OutputStream] = {}
        self._open: set[_OutputStream] = set()
        self._busy_since_s: float | None = None
        self._names = itertools.count()
        self._failure: EngineDeadError | None = None
        # Between the check that the engine lives and the command: else a late request would wait for ever.
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="bullet-graph-engine", daemon=True)
        self._thread.start()

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

        Leaving the generator early (cancelling its task, ``aclose``, ``break``) aborts the request and frees
        its KV blocks.

        Args:
            slo: latency targets of this request; those it leaves out, or all, are the engine's.

        Raises:
            RequestError: the request is wrong.
            EngineDeadError: the engine was shut down or has failed.
        """
        name = f"async-{next(self._names)}" if request_id is None else request_id
        stream = _OutputStream()
        with self._lock:
            if self._failure is not None:
                raise _copy(self._failure)
            arrival_s = self.engine.now()
            self._open.add(stream)
            self._commands.put(
                lambda: self._add(stream, name, prompt, sampling_params, output_kind, arrival_s, slo)
            )
        finished = False
        try:
            while not finished:
                if not stream.items:
                    await stream.arrival()
                output = stream.items.popleft()
                if isinstance(output, Exception):
                    raise output
                finished = output.finished
                yield output
        finally:
            with self._lock:
                self._open.discard(stream)
            if not finished:
                self._commands.put(lambda: self._abort(stream, name))

    @former_names_too
    async def set_policy(
        self, policy: str | Policy, slo: Slo = NO_TARGETS, prompt_order: PromptOrder | None = None
    ) -> None:
        """Serve under another policy and other targets from now on; see :meth:`Engine.set_policy`.

        Raises:
            RequestError: requests are under way.
            ConfigError: the policy needs a performance table or partitions that this engine was not made with.
            EngineDeadError: the engine was shut down or has failed.
        """
        done: Future[None] = Future()
        with self._lock:
            if self._failure is not None:
                raise _copy(self._failure)
            self._commands.put(lambda: self._set_policy(done, policy, slo, prompt_order))
        await asyncio.wrap_future(done)

    @property
    def failure(self) -> EngineDeadError | None:
        """Why there will be no more outputs; None while the engine lives."""
        return self._failure

    def stalled(self, limit_s: float) -> str | None:
        """What has made no progress for longer than so many seconds, in words; None: nothing. From any thread."""
        launches = self.engine.stalled_launches(limit_s)
        if launches:
            return "; then ".join(launches)
        busy_since_s = self._busy_since_s
        waited_s = 0.0 if busy_since_s is None else time.monotonic() - busy_since_s
        if waited_s <= limit_s:
            return None
        return f"engine loop: between two launches, nothing has happened for {waited_s:.1f} s"

    def fail(self, reason: str) -> None:
        """Give the engine up from outside, even if its thread is stuck: all requests get an EngineDeadError now.

        The thread ends, and gives the memory back, if it ever comes back from what it is stuck in.

        Args:
            reason: the error's message.
        """
        self._end_streams(EngineDeadError(reason))
        self._commands.put(None)

    def shutdown(self, timeout_s: float | None = None) -> bool:
        """Stop the thread and give the engine's memory back; requests under way get an EngineDeadError.

        Args:
            timeout_s: wait no longer than this for a thread that may be stuck; None waits as long as it takes.

        Returns:
            Whether the thread has ended.
        """
        self._commands.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    # ---- the engine's thread ----

    def _run(self) -> None:
        failure = EngineDeadError("the engine was shut down: make a new one")
        try:
            while self._take_commands():
                outputs = self.engine.step()
                # Before the outputs: who has got them may look at the counters.
                self.stats = self.engine.stats()
                self._deliver(outputs)
        except EngineDeadError as error:
            failure = error
        finally:
            # First of all, for a device that has failed may fail again when it is shut down.
            self._end_streams(failure)
            self._streams.clear()
            self._busy_since_s = None
            try:
                self.engine.shutdown()
            finally:
                self._refuse_late_commands()

    def _end_streams(self, failure: EngineDeadError) -> None:
        """Tell every request, also one that the engine has not seen yet, and later ones; the first failure stays."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            streams = list(self._open)
        for stream in streams:
            stream.put(_copy(failure))

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Pass a step's outputs on, all of a loop's together: to wake it costs more than an output does.

        But for an abort's: nobody waits for it, and another may use its id by now.
        """
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_OutputStream, RequestOutput | Exception]]]
        by_loop = defaultdict(list)
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
            _put_all(loop, items)

    def _take_commands(self) -> bool:
        """Carry out what callers asked for; waits, and captures what is missing, while the engine is idle.

        False means stop.
        """
        # Once failed from outside, the rest is for _refuse_late_commands.
        while self._failure is None:
            self._busy_since_s = time.monotonic()
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                if self.engine.has_unfinished_requests():
                    return True
                if self.engine.prepare_next():
                    continue
                self._busy_since_s = None
                command = self._commands.get()
                self._busy_since_s = time.monotonic()
            if command is None:
                return False
            command()
        return False

    def _refuse_late_commands(self) -> None:
        """Requests that slipped in while the engine stopped are told so."""
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()

    def _add(
        self,
        stream: _OutputStream,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        output_kind: OutputKind,
        arrival_s: float,
        slo: Slo | None,
    ) -> None:
        try:
            self.engine.add_request(
                request_id, prompt, params, output_kind=output_kind, arrival_s=arrival_s, slo=slo
            )
        except Exception as error:
            # Whatever it is, it concerns this request alone: adding has not touched the others.
            stream.put(error)
            return
        self._streams[request_id] = stream

    def _set_policy(
        self, done: Future[None], policy: str | Policy, slo: Slo, prompt_order: PromptOrder | None
    ) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            self.engine.set_policy(policy, slo, prompt_order)
        except Exception as error:
            # The engine goes on as before: the error is the caller's alone.
            done.set_exception(error)
        else:
            self.stats = self.engine.stats()
            done.set_result(None)

    def _abort(self, stream: _OutputStream, request_id: str) -> None:
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self.engine.abort(request_id)


def _copy(error: EngineDeadError) -> EngineDeadError:
    """An error of its own for each task: raising adds to its traceback."""
    copy = EngineDeadError(*error.args)
    copy.__cause__ = error.__cause__
    return copy
