"""Chooses at every tick how prefill and decode share the GPU."""

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter

from bullet_graph.config import Policy
from bullet_graph.errors import ConfigError
from bullet_graph.hardware import GENERIC
from bullet_graph.partition.masks import partition_of
from bullet_graph.perf.performance import PerformanceModel
from bullet_graph.planner.options import Backlog, Corrections, Options, Predictor
from bullet_graph.planner.plan import Bound, DecodeLoad, Load, Option, Plan, PolicyName
from bullet_graph.planner.tuning import TUNING


class Planner:
    """Turns a load into a plan. It remembers corrections of the model, prefill rates, and how long prefill paused.

    Args:
        max_chunk_tokens: most rows of a forward with prompt tokens in it; ``row_step`` prompt rows may always join
            decode rows. The policy may lower it to ``max_rows``.
        decode_sms: sizes of the decode lane, in SMs, that have captured graphs and that the model knows.
        eager_layer_ms: host time to launch one layer kernel by kernel.
        lone_rows: see :class:`~bullet_graph.runtime.executor.Executor`.

    Attributes:
        max_batch_sizes: most rows of a decode step on a lane, by its SMs; a lane that is not in it takes any.

    Raises ConfigError where the policy needs a performance model or a decode lane that is not available.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_chunk_tokens: int,
        decode_sms: Sequence[int],
        model: PerformanceModel | None,
        corrections: Corrections | None = None,
        eager_layer_ms: float = GENERIC.eager_layer_ms,
        lone_rows: int = 1,
    ) -> None:
        if model is None and policy.name == "split":
            raise ConfigError(
                f"the policy {policy} needs a performance table, but there is none: measure one with `bullet-graph "
                "profile`, or choose another policy"
            )
        if policy.name == "split" and (
            not decode_sms or (policy.decode_sms is not None and policy.decode_sms not in decode_sms)
        ):
            raise ConfigError(
                f"the policy {policy} needs a decode lane of {policy.decode_sms or 'some'} SMs, but those that are "
                f"captured and measured are {', '.join(map(str, decode_sms)) or 'none'}: choose one of them, or add "
                "it to decode_sms and to the performance table"
            )
        self.policy, self._lone_rows = policy, lone_rows
        self.max_rows = min(policy.chunk_tokens or max_chunk_tokens, max_chunk_tokens)
        self._decode_sms = tuple(sorted(decode_sms if policy.decode_sms is None else (policy.decode_sms,)))
        self.max_batch_sizes: Mapping[int, int] = {}
        self.corrections = Corrections() if corrections is None else corrections
        self.predictor: Predictor | None = None
        self._mean_tokens, self._mean_ms = 1.0, 0.0
        if model is not None:
            self.predictor = Predictor(
                model,
                self.corrections,
                max_chunk_tokens=max_chunk_tokens,
                decode_sms=self._decode_sms,
                eager_layer_ms=eager_layer_ms,
            )
            rows = self.predictor.whole_chunk
            self._mean_tokens, self._mean_ms = float(rows), model.prefill(rows, rows * rows / 2).ms
        self._now_s, self._paused, self._paused_s = 0.0, False, 0.0

    @property
    def prefill_ms_per_token(self) -> float:
        """Time of recently planned forwards over their prompt tokens; 0 without a model."""
        return self._mean_ms / self._mean_tokens

    def plan(self, load: Load) -> Plan:
        """How the next launches share the GPU; the same loads in the same order give the same plans."""
        contended = load.decode is not None and bool(load.prompts or load.chunk)
        elapsed_s = load.now_s - self._now_s
        self._now_s = load.now_s
        self._paused_s += elapsed_s if self._paused else -elapsed_s
        self._paused_s = max(self._paused_s, 0.0) if contended else 0.0
        plan = self._choose(load)
        self._paused = contended and plan.chunk_tokens == 0 and plan.slice_layers == 0
        return plan

    def _choose(self, load: Load) -> Plan:
        decode, predictor = load.decode, self.predictor
        if not load.prompts and load.chunk is None:
            if decode is None or predictor is None:
                return Plan("solo", decode=decode is not None)
            ms = predictor.decode_ms(decode.batch_size, decode.kv_tokens)
            interval_ms = _unhurried_ms(decode, ms, predictor) if self.policy.name == "auto" else 0.0
            least_rows = 1
            if decode.batch_size < self._lone_rows:
                padded_ms = predictor.decode_ms(self._lone_rows, decode.kv_tokens)
                if padded_ms <= interval_ms:
                    ms, least_rows = padded_ms, self._lone_rows
            return Plan("solo", decode=True, decode_ms=ms, interval_ms=interval_ms, least_rows=least_rows)
        if predictor is None:
            return self._unpredicted(decode)
        backlog = Backlog(load, predictor)
        if self.policy.name == "serial":
            rows = min(self.max_rows, backlog.tokens)
            ms = self._alone_ms(backlog, rows, "serial")
            return Plan("serial", decode=False, chunk_tokens=rows, decode_ms=ms, bound="forced")
        # If no lane has a graph for so many rows, decode waits until the chunk is done.
        if decode is None or (load.chunk is not None and not self._lanes_for(decode.batch_size)):
            return self._prefill_only(load, backlog, predictor)
        options = Options(load, decode, backlog, predictor)
        if self.policy.name == "split" and (splits := self._splits(options)):
            # The fewest SMs that hold the target; if none do, the fastest for decode.
            forced = next((o for o in splits if o.holds_tpot), None) or min(splits, key=attrgetter("interval_ms"))
        elif self.policy.name == "auto" or (self.policy.chunk_tokens is None and options.limit_ms < math.inf):
            return self._best(options, load)
        else:
            forced = options.mixed(self.max_rows - options.batch_size)
        return self._follow(forced, options, load, "forced")

    # ---- one phase only, or no predictions ----

    def _unpredicted(self, decode: DecodeLoad | None) -> Plan:
        """``serial`` and ``mixed`` without a model; ``auto`` then mixes."""
        if self.policy.name == "serial":
            return Plan("serial", decode=False, chunk_tokens=self.max_rows, bound="forced")
        if decode is None:
            return Plan("solo", decode=False, chunk_tokens=self.max_rows)
        rows = max(self.max_rows - decode.batch_size, TUNING.row_step)
        return Plan("mixed", decode=True, chunk_tokens=rows, bound="forced")

    def _prefill_only(self, load: Load, backlog: Backlog, predictor: Predictor) -> Plan:
        """Whole chunks on the decode lane; slices of layers if a chunk is under way on the prefill lane."""
        if load.chunk is None:
            rows = min(backlog.chunk_rows(predictor.whole_chunk), self.max_rows)
            return Plan("solo", decode=False, chunk_tokens=rows, decode_ms=self._alone_ms(backlog, rows, "solo"))
        layer_ms = self._alone_ms(backlog, backlog.tokens, "solo") / predictor.model.num_layers
        layers = min(max(round(TUNING.solo_slice_ms / layer_ms), 1), backlog.layers_left)
        return Plan("solo", decode=False, prefill_lane="prefill", slice_layers=layers, slice_ms=layers * layer_ms)

    def _alone_ms(self, backlog: Backlog, tokens: int, policy: PolicyName) -> float:
        ms = backlog.alone_ms(tokens, policy)
        self._note(tokens, ms)
        return ms

    # ---- the best of several options ----

    def _splits(self, options: Options) -> list[Option]:
        return [options.split(sms) for sms in self._lanes_for(options.batch_size)]

    def _lanes_for(self, rows: int) -> list[int]:
        """Sizes of the decode lane that have a graph for this batch, in SMs."""
        return [sms for sms in self._decode_sms if rows <= self.max_batch_sizes.get(sms, rows)]

    def _best(self, options: Options, load: Load) -> Plan:
        """The highest throughput within the targets; only ``auto`` splits. README.md tells it in full."""
        assert self.predictor is not None
        pause = options.decode_only()
        unlimited = load.chunk is None and options.budget_ms == math.inf
        if unlimited and load.steps_left is not None:
            paced = options.paced(load.steps_left)
            return self._follow(paced, options, load, "throughput", [pause, paced])
        if unlimited and load.now_s < load.prompts[0].deadline_s < math.inf:
            # While the next prompt can be on time, it does not wait for decode.
            first = options.prefill_only()
            return self._follow(first, options, load, "ttft", [pause, first])
        beside = options.mixed_sizes() if load.chunk is None else []  # a chunk on the prefill lane stays there
        if self.policy.name == "auto" and (load.chunk is not None or not self.predictor.lane_waits_for_host):
            beside += self._splits(options)
        weighed = [pause, *beside]
        if unlimited:
            first = options.prefill_only()
            weighed.append(first)
            if max(map(self._throughput, beside)) < TUNING.beside_gain * first.throughput:
                return self._follow(first, options, load, "throughput", weighed)
        holding = [option for option in beside if option.holds_tpot or options.infeasible]
        bound: Bound = "throughput" if options.limit_ms == math.inf else "tpot"
        if holding:
            option = max(holding, key=self._throughput)
            if options.urgent_tokens(option):
                # The least prefill rate at which none is urgent, if that costs little throughput.
                least = TUNING.urgent_throughput * self._throughput(option)
                enough = [o for o in holding if self._throughput(o) >= least and not options.urgent_tokens(o)]
                if enough:
                    option, bound = min(enough, key=attrgetter("prefill_tokens_per_s")), "ttft"
        elif self._paused_s < TUNING.pause_patience_s:
            # The prompts can wait for decode to catch up; no pause lasts for ever.
            option = pause
        else:
            option, bound = min(beside, key=attrgetter("interval_ms")), "ttft"
        return self._follow(option, options, load, bound, weighed)

    def _throughput(self, option: Option) -> float:
        """Normalized throughput, discounted on the prefill lane."""
        return option.throughput * (TUNING.lane_share if option.slice_layers else 1.0)

    def _follow(
        self, option: Option, options: Options, load: Load, bound: Bound, weighed: Sequence[Option] = ()
    ) -> Plan:
        assert self.predictor is not None
        if option.prefill_tokens_per_s:
            self._note(option.chunk_tokens, option.prefill_ms)
        on_prefill_lane = load.chunk is not None or option.policy == "split"
        decode_ms, slice_ms = options.launch_ms(option)
        return Plan(
            option.policy,
            decode=option.interval_ms < math.inf,
            prefill_lane="prefill" if on_prefill_lane else "decode",
            chunk_tokens=0 if load.chunk is not None else option.chunk_tokens,
            slice_layers=option.slice_layers,
            partition=partition_of(option.decode_sms, num_sms=self.predictor.model.num_sms),
            decode_ms=decode_ms,
            slice_ms=slice_ms,
            bound=bound,
            options=tuple(weighed) or (option,),
        )

    def _note(self, tokens: int, ms: float) -> None:
        self._mean_tokens += TUNING.rate_weight * (tokens - self._mean_tokens)
        self._mean_ms += TUNING.rate_weight * (ms - self._mean_ms)


def _unhurried_ms(decode: DecodeLoad, step_ms: float, predictor: Predictor) -> float:
    """Least time between decode steps alone, or 0. The longer it is, the more sequences share a reading of weights."""
    allowed_ms = TUNING.unhurried_share * min(decode.budget_ms, decode.target_ms)
    most_ms = TUNING.unhurried_ratio * predictor.decode_ms(1, decode.kv_tokens // decode.batch_size)
    return min(allowed_ms, most_ms) if step_ms < most_ms and step_ms < allowed_ms < math.inf else 0.0
