"""Running requests: their samples and text, stop conditions, and what has been reported."""

from typing import TYPE_CHECKING

from bullet_graph.engine.output import CompletionOutput, FinishReason, OutputKind, RequestOutput, TokenLogprobs
from bullet_graph.engine.sequence import Sequence
from bullet_graph.errors import RequestError
from bullet_graph.perf.metrics import RequestMetrics
from bullet_graph.runtime.step import StepLogprobs

if TYPE_CHECKING:
    # It imports the tokenizers, and the simulator does without.
    from bullet_graph.models.tokenizer import DetokenizeStream


class Sample:
    """One output of a request: detokenizes its tokens (not without a ``stream``) and looks for stop strings."""

    def __init__(self, sequence: Sequence, stream: "DetokenizeStream | None") -> None:
        self.sequence = sequence
        self.finish_reason: FinishReason | None = None
        self.logprobs: list[TokenLogprobs] = []
        self._stream = stream
        self._stops = tuple(sequence.params.stop)
        # Later text may still complete a stop string, so its length less one is held back.
        self._holdback = max((len(stop) for stop in self._stops), default=1) - 1
        self._text = ""
        self._reported_text = 0
        self._reported_tokens = 0

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Add the next token; finish the sample if it ends here."""
        sequence, matcher = self.sequence, self.sequence.matcher
        if matcher is not None and not matcher.accept(token_id):
            self.finish("error")
            return
        sequence.output_token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        num_output = len(sequence.output_token_ids)
        if self._stream is not None:
            searched = len(self._text)
            self._text += self._stream.push(token_id)
            if self._cut_at_stop(searched):
                self.finish_reason = "stop"
                return
        is_stop = token_id in sequence.stop_token_ids and num_output > sequence.params.min_tokens
        if is_stop or (matcher is not None and matcher.ended):
            self.finish("stop")
        elif num_output >= sequence.params.max_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        """End the sample here and release the text held back."""
        searched = len(self._text)
        if self._stream is not None:
            self._text += self._stream.flush()
        self.finish_reason = "stop" if reason == "length" and self._cut_at_stop(searched) else reason

    def _cut_at_stop(self, searched: int) -> bool:
        """Cut the text at the first stop string that ends beyond ``searched`` characters; not before min_tokens."""
        if len(self.sequence.output_token_ids) <= self.sequence.params.min_tokens:
            return False
        starts = [self._text.find(stop, max(searched - len(stop) + 1, 0)) for stop in self._stops]
        found = [start for start in starts if start >= 0]
        if found:
            self._text = self._text[: min(found)]
        return bool(found)

    def report(self, kind: OutputKind) -> CompletionOutput:
        """Report everything, or what is new since the last report."""
        sequence, first, first_char = self.sequence, 0, 0
        tokens = sequence.output_token_ids
        visible = len(self._text) if self.finish_reason else max(len(self._text) - self._holdback, 0)
        if kind is OutputKind.DELTA:
            first, self._reported_tokens = self._reported_tokens, len(tokens)
            first_char, self._reported_text = self._reported_text, visible
        return CompletionOutput(
            sequence.index,
            self._text[first_char:visible],
            tuple(tokens[first:]),
            None if sequence.params.logprobs is None else tuple(self.logprobs[first:]),
            self.finish_reason,
        )


class Request:
    """A prompt and its ``n`` samples, by index."""

    def __init__(self, samples: list[Sample], output_kind: OutputKind) -> None:
        self.samples = samples
        self.reports_progress = output_kind is not OutputKind.FINAL_ONLY
        self.first_scheduled_s: float | None = None
        self.token_times_s: list[float] = []
        self.last_token_s: float | None = None
        self._first = samples[0].sequence
        self.request_id = self._first.request_id
        self._prompt_token_ids = tuple(self._first.prompt_token_ids.tolist())
        self._output_kind = output_kind
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        if self._first.params.prompt_logprobs is not None:
            self._prompt_logprobs = [None for _ in self._prompt_token_ids]

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return None not in [sample.finish_reason for sample in self.samples]

    def score(self, first: int, end: int, logprobs: StepLogprobs, row: int) -> None:
        """Note the log-probabilities of the tokens after positions [first, end), whose rows begin at ``row``."""
        assert self._prompt_logprobs is not None
        for position in range(first, end):
            token_id, count = self._prompt_token_ids[position + 1], self._first.params.prompt_logprobs or 0
            self._prompt_logprobs[position + 1] = row_logprobs(logprobs, row + position - first, token_id, count)

    def output(self) -> RequestOutput:
        logprobs, finished, times = self._prompt_logprobs, self.finished, self.token_times_s
        return RequestOutput(
            self.request_id,
            self._prompt_token_ids,
            tuple([sample.report(self._output_kind) for sample in self.samples]),
            finished,
            RequestMetrics(self._first.arrival_s, self.first_scheduled_s, times, len(times), self.last_token_s),
            self._error(),
            self._first.slo,
            tuple(logprobs) if logprobs is not None and finished else None,
            self._first.num_found,
        )

    def _error(self) -> RequestError | None:
        """Why a structured output could not go on, if any."""
        failed = [s.sequence.matcher for s in self.samples if s.finish_reason == "error"]
        if not failed or failed[0] is None:
            return None
        return RequestError(
            f"a structured output could not go on: {failed[0].error:.300}; simplify its schema or grammar, and leave "
            "out what keeps its tokens from being sampled"
        )


def row_logprobs(logprobs: StepLogprobs, row: int, token_id: int, count: int) -> TokenLogprobs:
    """The log-probabilities of one row, as many as its request asked for."""
    top_ids, top = logprobs.top_ids[row, :count].tolist(), logprobs.top[row, :count].tolist()
    return TokenLogprobs(token_id, float(logprobs.chosen[row]), tuple(zip(top_ids, top, strict=True)))
