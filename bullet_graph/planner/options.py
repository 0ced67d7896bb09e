"""What each policy would make of a load: predictions for the planner to choose from."""

import math
from functools import cached_property

from bullet_graph.graphs.key import EAGER_LAYER_MS
from bullet_graph.perf.performance import PerformanceModel, Prediction
from bullet_graph.planner.backlog import Backlog, ChunkSizes, Demand
from bullet_graph.planner.corrections import Corrections
from bullet_graph.planner.plan import DecodeLoad, Load, Option, PolicyName

ROW_STEP = 16
"""Mixed chunks are multiples of it, and never smaller while prompts wait."""

LEAST_CHUNK_TOKENS = 256
"""Mixed chunks worth weighing without a limit are no smaller: with fewer rows, reading weights takes all the time."""

BUDGET_CAP = 1.15
"""Intervals are planned up to so many times the tightest TPOT target, however far ahead the sequences are: what they
are ahead is kept for deadlines."""

FLOOR_TOKENS = 64
"""Prompt rows of a mixed step that cannot hold its target anyway."""

SPLIT_SLICE_MS = 5.0
"""Slices beside decode aim at this time, so that the split can soon change."""

SPLIT_LAUNCH_MS = 1.6
"""Most host time for the launches of such a slice, which the decode lane's next step has to wait for: a whole chunk of
a small model would keep it waiting longer than it runs."""

LEAST_PACED_ROWS, PACED_ROW_STEP = 1024, 256
"""Forwards that are to last for the longest output have so many rows, prompt and decode, or more, and a multiple: fewer
rows a forward cost matrix products more than decode rows that ride along save, and tiles fit others worse (1,152 rows
took 1.5 % longer a row than 1,024: bench/LOG.md)."""

LEAST_PACED_PROMPT_ROWS = 512
"""However many rows decode, so that the batch goes on growing."""


class Outlook:
    """Predictions, corrected, for sequences that decode while prompts wait or a chunk is under way.

    Args:
        load: with both.
        decode: the load's.
        backlog: the load's.
        model: of the device.
        sizes: of chunks.
        corrections: of the model's times.
        max_chunk_tokens: most rows of a forward, but that a mixed one may always have ``ROW_STEP`` of a prompt.

    Attributes:
        batch_size: rows of a decode step.
        decode_ms: a decode step alone on the whole GPU.
        budget_ms: longest interval between decode steps that holds the TPOT targets and is planned with.
        infeasible: decode alone on the whole GPU misses the targets, now and for good.
        limit_ms: interval to size options for: the budget, or no limit where nothing can hold it.
    """

    def __init__(
        self,
        load: Load,
        decode: DecodeLoad,
        backlog: Backlog,
        *,
        model: PerformanceModel,
        sizes: ChunkSizes,
        corrections: Corrections,
        max_chunk_tokens: int,
    ) -> None:
        self._load = load
        self.batch_size = decode.batch_size
        self._backlog = backlog
        self._model = model
        self._sizes = sizes
        self._corrections = corrections
        self._max_chunk_tokens = max_chunk_tokens
        self._batch = decode.batch_size, decode.kv_tokens
        self._step = model.decode(*self._batch)
        self.decode_ms = self._step.ms * corrections["solo", "step"]
        self.budget_ms = min(decode.budget_ms, BUDGET_CAP * decode.target_ms)
        self.infeasible = self.decode_ms > max(decode.budget_ms, decode.target_ms)
        self.limit_ms = math.inf if self.infeasible else self.budget_ms

    @property
    def num_sms(self) -> int:
        """SMs of the GPU."""
        return self._model.num_sms

    @cached_property
    def _whole_chunk(self) -> tuple[int, Prediction]:
        """The best chunk alone on the whole GPU: its tokens and its time, not corrected."""
        tokens = self._backlog.lane_chunk(self._sizes.whole)
        return tokens, self._model.prefill(tokens, self._backlog.pairs(tokens))

    @cached_property
    def prefill_ms_per_token(self) -> float:
        """Time of a token in the best chunk, alone on the whole GPU."""
        tokens, prediction = self._whole_chunk
        return prediction.ms * self._corrections["solo", "slice"] / tokens

    @cached_property
    def demand(self) -> Demand:
        """What the deadlines that can be met ask of prefill."""
        return self._backlog.demand(self.prefill_ms_per_token)

    @cached_property
    def _step_worth_ms(self) -> float:
        """What a decode step saves: its time later on, when the prompts that wait now are in the batch as well.

        Decoding a few rows before the others have joined them saves nearly nothing.
        """
        batch_size, kv_tokens = self._batch
        joined = batch_size + max(len(self._load.prompts), 1)
        later = self._model.decode(joined, kv_tokens * joined // batch_size).ms
        return min(self.decode_ms, later * self._corrections["solo", "step"] * batch_size / joined)

    def alone(self) -> Option:
        """Decode on the whole GPU, prefill paused."""
        return self._option("solo", 0, self.decode_ms, 0.0, self._step.measured)

    def prefill_first(self) -> Option:
        """A whole chunk on the whole GPU, decode paused."""
        tokens, prediction = self._whole_chunk
        return self._option("solo", tokens, math.inf, 1 / self.prefill_ms_per_token, prediction.measured)

    def mixed(self, tokens: int) -> Option:
        """One forward with decode rows and so many prompt rows, fewer where fewer wait or fit."""
        most = max(self._max_chunk_tokens - self.batch_size, ROW_STEP)
        tokens = min(max(tokens, ROW_STEP), most, self._backlog.tokens)
        prediction = self._model.mixed(tokens, self._backlog.pairs(tokens), *self._batch)
        ms = prediction.ms * self._corrections["mixed", "step"]
        return self._option("mixed", tokens, ms, tokens / ms, prediction.measured)

    def mixed_sizes(self) -> list[Option]:
        """Mixed forwards worth weighing: the largest that fits the limit; without a limit, some sizes down from all."""
        if self.limit_ms < math.inf:
            return [self.largest_mixed() or self.mixed(FLOOR_TOKENS)]
        most = min(self._max_chunk_tokens, self._backlog.tokens)
        halvings = range(max((most // LEAST_CHUNK_TOKENS).bit_length(), 1))
        return [self.mixed(most >> halving) for halving in halvings]

    def largest_mixed(self) -> Option | None:
        """The mixed forward with the most prompt rows that fits the budget; None if not even the fewest do."""
        option = self.mixed(self._max_chunk_tokens)
        if option.interval_ms <= self.limit_ms:
            return option
        limit_ms = self.limit_ms / self._corrections["mixed", "step"]
        fits, exceeds = 0, -(-option.chunk_tokens // ROW_STEP)
        while exceeds - fits > 1:
            middle = (fits + exceeds) // 2
            tokens = middle * ROW_STEP
            if self._model.mixed(tokens, self._backlog.pairs(tokens), *self._batch).ms <= limit_ms:
                fits = middle
            else:
                exceeds = middle
        return self.mixed(fits * ROW_STEP) if fits else None

    def paced(self, steps: int) -> Option:
        """The mixed forward with which the prompts last for so many decode steps, or as many as are worth their time.

        What is left of the longest output then rides along with prompts, instead of a batch that gets ever smaller.
        Rather some forwards too many than too few: one more costs less than a decode step without prompts.
        """
        rows = self.batch_size + max(self._load.queued_tokens, self._backlog.tokens) / max(steps, 1)
        lasting = math.floor(rows / PACED_ROW_STEP)
        growing = math.ceil((self.batch_size + LEAST_PACED_PROMPT_ROWS) / PACED_ROW_STEP)
        whole = max(PACED_ROW_STEP * max(lasting, growing), LEAST_PACED_ROWS)
        return self.mixed(min(whole, self._max_chunk_tokens) - self.batch_size)

    def split(self, decode_sms: int) -> Option:
        """Both lanes at once, so many SMs for decode and the others for prefill."""
        tokens = self._backlog.lane_chunk(self._sizes.beside[decode_sms])
        prediction = self._model.split(decode_sms, *self._batch, tokens, self._backlog.pairs(tokens))
        interval_ms = prediction.decode_ms * self._corrections["split", "step"]
        prefill_ms = prediction.prefill_ms * self._corrections["split", "slice"]
        layers = round(
            min(SPLIT_SLICE_MS * self._model.num_layers / prefill_ms, SPLIT_LAUNCH_MS / EAGER_LAYER_MS)
        )
        return self._option(
            "split",
            tokens,
            interval_ms,
            tokens / prefill_ms,
            prediction.measured,
            decode_sms=decode_sms,
            slice_layers=min(max(layers, 1), self._backlog.layers_left),
        )

    def lane_ms(self, option: Option) -> tuple[float, float | None]:
        """Predicted times of an option's next decode-lane step and of its next slice, None where it has none."""
        if option.policy == "split":
            forward_ms = option.chunk_tokens * 1e3 / option.prefill_tokens_per_s
            return option.interval_ms, forward_ms * option.slice_layers / self._model.num_layers
        if option.interval_ms == math.inf:
            return option.chunk_tokens * 1e3 / option.prefill_tokens_per_s, None
        return option.interval_ms, None

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
        left = tokens * self._backlog.layers_left / self._model.num_layers
        chunk_ms = left / tokens_per_ms if tokens_per_ms else math.inf
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
            tokens_per_ms >= self.demand.tokens_per_ms and chunk_ms <= self.demand.first_ms,
        )
