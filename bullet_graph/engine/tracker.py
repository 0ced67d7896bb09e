"""The requests under way: what steps bring is handed to their samples here."""

from bullet_graph.engine.output import RequestOutput
from bullet_graph.engine.request import Request, row_logprobs
from bullet_graph.engine.scheduled import ScheduledStep
from bullet_graph.engine.scheduler import Scheduler
from bullet_graph.engine.sequence import Status
from bullet_graph.runtime.step import StepResult


class RequestTracker:
    """Requests by id, and their way through the scheduler.

    Args:
        scheduler: told of every sequence that begins or ends.
        max_model_len: most tokens of a sequence.
    """

    def __init__(self, scheduler: Scheduler, *, max_model_len: int) -> None:
        self._scheduler = scheduler
        self._max_model_len = max_model_len
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: Request) -> None:
        """Queue a request's sequences."""
        self._requests[request.request_id] = request
        for sample in request.samples:
            self._scheduler.add(sample.sequence)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request where it is and return its last output; None for an unknown id."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        for sample in request.samples:
            if sample.finish_reason is None:
                sample.finish("abort")
                self._scheduler.finish(sample.sequence)
        return request.output()

    def clear(self) -> None:
        """Forget all requests."""
        self._requests.clear()

    def note_scheduled(self, scheduled: ScheduledStep, now: float) -> None:
        """Note when requests were launched first."""
        for sequence in scheduled.admitted:
            request = self._requests.get(sequence.request_id)
            if request is not None and request.first_scheduled_s is None:
                request.first_scheduled_s = now

    def retire(self, scheduled: ScheduledStep, result: StepResult, now: float) -> list[RequestOutput]:
        """Hand a finished step's tokens out.

        Args:
            now: when they reached the host.

        Returns:
            One output for each request that has something to report.
        """
        self._scheduler.retire(scheduled)
        touched: dict[Request, None] = {}
        has_logprobs = result.logprobs is not None
        for row, (sequence, token_id) in enumerate(
            zip(scheduled.sampled, result.token_ids.tolist(), strict=True)
        ):
            if sequence.status is Status.FINISHED:
                continue  # it ended while this step was in flight
            request = self._requests[sequence.request_id]
            sample = request.samples[sequence.index]
            sample.append(token_id, row_logprobs(result, row, token_id, sequence) if has_logprobs else None)
            num_tokens = sequence.num_tokens - sequence.num_in_flight
            if sample.finish_reason is None and num_tokens >= self._max_model_len:
                sample.finish("length")
            if sequence.first_token_s is None:
                sequence.first_token_s = now
            if sequence.index == 0:
                request.token_times_s.append(now)
            if sample.finish_reason is not None:
                self._scheduler.finish(sequence)
                touched[request] = None
            elif request.reports_progress:
                touched[request] = None
        outputs = []
        for request in touched:
            if request.reports_progress or request.finished:
                output = request.output()
                if output.finished:
                    del self._requests[request.request_id]
                outputs.append(output)
        return outputs
