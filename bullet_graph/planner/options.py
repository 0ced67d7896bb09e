"""Pure predictions: what each policy would make of a load."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, takewhile
from typing import Literal

from bullet_graph.perf.performance import PerformanceModel, Prediction, attention_pairs, size_of
from bullet_graph.planner.plan import DecodeLoad, Load, Option, PolicyName
from bullet_graph.planner.tuning import TUNING

ForwardKind = Literal["step", "slice"]
"""What a prediction was for: a forward with decode rows in it, or one of prompt rows alone."""


class Corrections(dict[tuple[PolicyName, ForwardKind, int], float]):
    """Measured ÷ predicted time by policy, kind and size of forward: a moving geometric mean that begins at 1.

    Short forwards between decode steps run faster than in a profile, long ones do not (bench/LOG.md). Sizes are of
    :func:`~bullet_graph.perf.performance.size_of`; those never measured are absent.
    """

    def of(self, policy: PolicyName, kind: ForwardKind, rows: int) -> float:
        """The factor for a forward of this many rows; 1 if none of its size was measured."""
        return self.get((policy, kind, size_of(rows)), 1.0)

    def observe(
        self, policy: PolicyName, kind: ForwardKind, rows: int, predicted_ms: float, measured_ms: float
    ) -> None:
        """Include one measurement; its prediction was made with these corrections. Times of 0 are ignored."""
        if predicted_ms <= 0 or measured_ms <= 0:
            return
        ratio = _limited(measured_ms / predicted_ms)
        self[policy, kind, size_of(rows)] = _limited(self.of(policy, kind, rows) * ratio**TUNING.correction_weight)


def _limited(factor: float) -> float:
    return min(max(factor, 1 / TUNING.correction_limit), TUNING.correction_limit)


class Predictor:
    """What all predictions share, whatever the load.

    Chunks of ``whole_chunk`` rows have the highest prefill rate on the whole GPU; ``lane_chunks``, by SMs of the decode
    lane, on the prefill lane. With ``lane_waits_for_host``, launching a chunk there takes longer than running it:
    decode steps would wait for that, and no prediction includes it.
    """

    def __init__(
        self,
        model: PerformanceModel,
        corrections: Corrections,
        *,
        max_chunk_tokens: int,
        decode_sms: Sequence[int],
        eager_layer_ms: float,
    ) -> None:
        self.model = model
        self.corrections = corrections
        self.max_chunk_tokens = max_chunk_tokens
        self.slice_layers = TUNING.split_launch_ms / eager_layer_ms
        self.whole_chunk = model.wave_chunk_tokens(max_chunk_tokens)
        num_sms, lane = model.num_sms, min(max_chunk_tokens, TUNING.lane_chunk_tokens)
        self.lane_chunks = {
            sms: model.wave_chunk_tokens(max(lane * (num_sms - sms) // num_sms, 1), num_sms - sms) for sms in decode_sms
        }
        lane_tokens = model.wave_chunk_tokens(lane)
        lane_ms = model.prefill(lane_tokens, attention_pairs(lane_tokens)).ms
        self.lane_waits_for_host = lane_ms < model.num_layers * eager_layer_ms

    def decode_ms(self, batch_size: int, kv_tokens: int) -> float:
        """A decode step alone on the whole GPU."""
        return self.model.decode(batch_size, kv_tokens).ms * self.corrections.of("solo", "step", batch_size)


class Backlog:
    """The prompt tokens of a load, and its next chunk; with a chunk under way, those of that chunk alone."""

    def __init__(self, load: Load, predictor: Predictor) -> None:
        self._load, self._predictor = load, predictor
        if load.chunk is not None:
            self.tokens, self.layers_left = load.chunk.tokens, load.chunk.layers_left
            return
        # For each prompt, the tokens up to its last, and their pairs.
        self.ends = list(accumulate(p.tokens_left for p in load.prompts))
        self._pairs = list(accumulate(attention_pairs(p.tokens_left, p.tokens_cached) for p in load.prompts))
        self.tokens, self.layers_left = self.ends[-1] if self.ends else 0, predictor.model.num_layers

    def pairs(self, tokens: int) -> float:
        """(query, key) pairs of a chunk of the first ``tokens`` tokens, at most all of them."""
        if self._load.chunk is not None:
            return self._load.chunk.attention_pairs
        i = bisect_left(self.ends, tokens)
        before, pairs = (self.ends[i - 1], self._pairs[i - 1]) if i else (0, 0.0)
        return pairs + attention_pairs(tokens - before, self._load.prompts[i].tokens_cached)

    def chunk_rows(self, size: int) -> int:
        """Rows of a chunk of at most ``size``; those of the chunk under way, if there is one."""
        return min(self.tokens, size) if self._load.chunk is None else self.tokens

    def alone_ms(self, tokens: int, policy: PolicyName) -> float:
        """A forward of the first ``tokens`` prompt rows alone on the whole GPU."""
        factor = self._predictor.corrections.of(policy, "slice", tokens)
        return factor * self._predictor.model.prefill(tokens, self.pairs(tokens)).ms


class Options:
    """Corrected predictions for a load in which sequences decode while prompts wait or a chunk is under way.

    ``budget_ms`` is the longest interval between decode steps to plan with. The load is ``infeasible`` if decode alone
    on the whole GPU misses the targets, now and later: then ``limit_ms``, for which options are sized, is infinite.
    """

    def __init__(self, load: Load, decode: DecodeLoad, backlog: Backlog, predictor: Predictor) -> None:
        self._load, self._predictor = load, predictor
        self._model, self._corrections = predictor.model, predictor.corrections
        self._batch = decode.batch_size, decode.kv_tokens
        self._step = self._model.decode(*self._batch)
        self._decode_ms = self._step.ms * self._corrections.of("solo", "step", decode.batch_size)
        self.backlog, self.batch_size = backlog, decode.batch_size
        self.budget_ms = min(decode.budget_ms, TUNING.budget_cap * decode.target_ms)
        self._slack_ms, self._burst_ms = decode.slack_ms, min(decode.slack_ms, TUNING.burst_targets * decode.target_ms)
        self.infeasible = self._decode_ms > max(decode.budget_ms, decode.target_ms)
        self.limit_ms = math.inf if self.infeasible else self.budget_ms

    @cached_property
    def _whole_chunk(self) -> tuple[int, Prediction]:
        """The best chunk alone on the whole GPU: its rows and its uncorrected time."""
        tokens = self.backlog.chunk_rows(self._predictor.whole_chunk)
        return tokens, self._model.prefill(tokens, self.backlog.pairs(tokens))

    @cached_property
    def prefill_ms_per_token(self) -> float:
        """Time per token in the best chunk, alone on the whole GPU."""
        tokens, prediction = self._whole_chunk
        return prediction.ms * self._corrections.of("solo", "slice", tokens) / tokens

    @cached_property
    def _step_worth_ms(self) -> float:
        """What a decode step saves: its time later, when the prompts that wait now have joined the batch."""
        batch_size, kv_tokens = self._batch
        joined = batch_size + max(len(self._load.prompts), 1)
        later_ms = self._predictor.decode_ms(joined, kv_tokens * joined // batch_size)
        return min(self._decode_ms, later_ms * batch_size / joined)

    def decode_only(self) -> Option:
        """Decode on the whole GPU, prefill paused."""
        return self._option("solo", 0, self._decode_ms, 0.0, self._step.measured)

    def prefill_only(self) -> Option:
        """A whole chunk on the whole GPU, decode paused."""
        tokens, prediction = self._whole_chunk
        return self._option("solo", tokens, math.inf, 1 / self.prefill_ms_per_token, prediction.measured)

    def mixed(self, tokens: int) -> Option:
        """One forward with the decode rows and ``tokens`` prompt rows; fewer if fewer wait or fit."""
        row_step = TUNING.row_step
        most = max(self._predictor.max_chunk_tokens - self.batch_size, row_step)
        tokens = min(max(tokens, row_step), most, self.backlog.tokens)
        ms, measured = self._mixed_ms(tokens)
        return self._option("mixed", tokens, ms, tokens / ms, measured)

    def _mixed_ms(self, tokens: int) -> tuple[float, bool]:
        """The time of a mixed forward, and whether the prediction rests on measured points alone."""
        prediction = self._model.mixed(tokens, self.backlog.pairs(tokens), *self._batch)
        return prediction.ms * self._corrections.of("mixed", "step", tokens + self.batch_size), prediction.measured

    def mixed_sizes(self) -> list[Option]:
        """Mixed forwards to weigh: all rows, half of them, and so on; with a limit, the largest within it, and bursts.

        Parts of the prompt rows fill tiles, together with the rows that decode. A burst exceeds the limit, within every
        sequence's slack. It costs no more per prompt token, or the slack allows as many as serve all urgent prompts.
        """
        most = min(self._predictor.max_chunk_tokens, self.backlog.tokens)
        halvings = range(1, (most // TUNING.least_chunk_tokens).bit_length())
        rows, tile = self.batch_size, TUNING.tile_rows
        filling = ((rows + (most >> halving)) // tile * tile - rows for halving in halvings)
        sizes = [most, *(tokens for tokens in filling if tokens > 0)]
        if self.limit_ms == math.inf:
            return [self.mixed(tokens) for tokens in sizes]
        larger = (self.mixed(tokens) for tokens in reversed(sizes) if tokens > self._steady.chunk_tokens)
        bursts = takewhile(lambda option: option.interval_ms <= self._burst_ms, larger)
        urgent = self.urgent_tokens(self._steady)
        return [self._steady, *(replace(o, holds_tpot=True) for o in bursts if self._is_worth(o, urgent))]

    def _is_worth(self, burst: Option, urgent_tokens: int) -> bool:
        added_ms, steady_ms = (option.interval_ms - self._decode_ms for option in (burst, self._steady))
        forwards = -(-urgent_tokens // burst.chunk_tokens)
        serves_urgent = 0 < forwards * added_ms <= self._slack_ms - self._decode_ms
        return serves_urgent or added_ms / burst.chunk_tokens <= steady_ms / self._steady.chunk_tokens

    def urgent_tokens(self, option: Option) -> int:
        """Prompt tokens up to the last prompt that is urgent at this option's prefill rate; 0 if none is."""
        if self._load.chunk is not None or self.limit_ms == math.inf:
            return 0
        ms_per_token = TUNING.urgent_margin * 1e3 / option.prefill_tokens_per_s
        left_ms = ((prompt.deadline_s - self._load.now_s) * 1e3 for prompt in self._load.prompts)
        ends = zip(self.backlog.ends, left_ms, strict=True)
        return max((end for end, left in ends if 0 < left < end * ms_per_token), default=0)

    @cached_property
    def _steady(self) -> Option:
        """The mixed forward with the most prompt rows within the limit; one of few rows if none is."""
        row_step = TUNING.row_step
        option = self.mixed(self._predictor.max_chunk_tokens)
        if option.interval_ms <= self.limit_ms:
            return option
        steps = range(1, -(-option.chunk_tokens // row_step))
        fits = bisect_right(steps, self.limit_ms, key=lambda step: self._mixed_ms(step * row_step)[0])
        return self.mixed(fits * row_step or TUNING.floor_tokens)

    def paced(self, steps: int) -> Option:
        """The mixed forward with which the prompts last for ``steps`` decode steps, or as long as is worth their time.

        The rest of the longest output then rides along with prompts instead of decoding in a shrinking batch. The
        size is rounded down: one more forward costs less than a decode step without prompts.
        """
        lasting = self.batch_size + max(self._load.queued_tokens, self.backlog.tokens) / max(steps, 1)
        growing = self.batch_size + TUNING.paced_prompt_rows
        multiple = max(math.floor(lasting / TUNING.paced_rows), math.ceil(growing / TUNING.paced_rows))
        return self.mixed(min(multiple * TUNING.paced_rows, self._predictor.max_chunk_tokens) - self.batch_size)

    def split(self, decode_sms: int) -> Option:
        """Both lanes at once: ``decode_sms`` SMs for decode, the others for prefill."""
        tokens = self.backlog.chunk_rows(self._predictor.lane_chunks[decode_sms])
        prediction = self._model.split(decode_sms, *self._batch, tokens, self.backlog.pairs(tokens))
        interval_ms = prediction.decode_ms * self._corrections.of("split", "step", self.batch_size)
        prefill_ms = prediction.prefill_ms * self._corrections.of("split", "slice", tokens)
        layers = round(min(TUNING.split_slice_ms * self._model.num_layers / prefill_ms, self._predictor.slice_layers))
        return self._option(
            "split",
            tokens,
            interval_ms,
            tokens / prefill_ms,
            prediction.measured,
            decode_sms=decode_sms,
            slice_layers=min(max(layers, 1), self.backlog.layers_left),
        )

    def launch_ms(self, option: Option) -> tuple[float, float | None]:
        """Predicted times of an option's next decode-lane forward and of its next slice; None without slices."""
        if option.policy == "split":
            return option.interval_ms, option.prefill_ms * option.slice_layers / self._model.num_layers
        return option.prefill_ms if option.interval_ms == math.inf else option.interval_ms, None

    def _option(
        self,
        policy: PolicyName,
        tokens: int,
        interval_ms: float,
        tokens_per_ms: float,
        measured: bool,
        *,
        decode_sms: int | None = None,
        slice_layers: int = 0,
    ) -> Option:
        return Option(
            policy,
            decode_sms,
            tokens,
            slice_layers,
            interval_ms,
            tokens_per_ms * 1e3,
            tokens_per_ms * self.prefill_ms_per_token + self._step_worth_ms / interval_ms,
            measured,
            interval_ms <= self.budget_ms,
        )
