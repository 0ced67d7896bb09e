"""Chooses at every tick how prefill and decode share the device."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from bullet_graph.config import Policy
from bullet_graph.errors import ConfigError
from bullet_graph.partition.masks import partition_of
from bullet_graph.perf.performance import PerformanceModel
from bullet_graph.planner.backlog import Backlog, ChunkSizes
from bullet_graph.planner.corrections import Corrections, ForwardKind
from bullet_graph.planner.offers import Offers, lane_waits_for_host
from bullet_graph.planner.options import FLOOR_TOKENS, ROW_STEP, Outlook
from bullet_graph.planner.plan import Bound, Load, Option, Plan, PolicyName
from bullet_graph.planner.preference import (
    BESIDE_GAIN,
    Preference,
    interval_of,
    rate_worth,
    throughput_worth,
)

SOLO_SLICE_MS = 8.0
"""Slices aim at this time when nothing decodes."""

PAUSE_PATIENCE_S = 1.0
"""Prefill may be paused so long, in favour of TPOT targets; then for every second tick at most."""

OVERDUE_PATIENCE_S = 0.25
"""The same once the first prompt's deadline has passed."""

LEAST_RATE = 0.1
"""When prefill must go on at the cost of TPOT, it gets at least this share of its rate alone."""

RATE_WEIGHT = 0.1
"""Weight of one plan in the prefill rate that prompts are said to be served at."""


class Planner:
    """Turns a load into a plan; holds corrections of the model, and what it last chose.

    Args:
        policy: the policy.
        max_chunk_tokens: most rows of a forward with prompt tokens in it; ``ROW_STEP`` prompt rows may always go
            beside decode rows.
        decode_sms: sizes of the decode lane that have captured graphs and that the model knows.
        num_layers: of the model.
        max_batch_sizes: most rows of a decode step on such a lane, by its SMs; one that is not in it takes any.
        model: of the device; ``serial`` and ``mixed`` do without.
        corrections: of the model, learned before; None begins with none.

    Attributes:
        policy: as given.
        model: as given.
        max_rows: most rows of a forward with prompt tokens in it under the policy, but for ``ROW_STEP`` as above.

    Raises:
        ConfigError: the policy needs a performance model or a decode lane's size that is not there.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_chunk_tokens: int,
        decode_sms: Sequence[int],
        num_layers: int,
        model: PerformanceModel | None,
        corrections: Corrections | None = None,
        max_batch_sizes: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        if model is None and policy.name not in ("serial", "mixed"):
            raise ConfigError(
                f"the policy {policy} needs a performance table, but there is none: measure one with `bullet-graph "
                "profile`, or choose serial or mixed"
            )
        if policy.name == "split" and (
            not decode_sms or (policy.decode_sms is not None and policy.decode_sms not in decode_sms)
        ):
            raise ConfigError(
                f"the policy {policy} needs a decode lane of {policy.decode_sms or 'some'} SMs, but those that are "
                f"captured and measured are {', '.join(map(str, decode_sms)) or 'none'}: choose one of them, or add "
                "it to decode_sms and to the performance table"
            )
        self.policy = policy
        self.model = model
        self._max_chunk_tokens = max_chunk_tokens
        self.max_rows = min(policy.chunk_tokens or max_chunk_tokens, max_chunk_tokens)
        lane_sms = tuple(sorted(decode_sms if policy.decode_sms is None else (policy.decode_sms,)))
        self._num_layers = num_layers
        self._corrections = Corrections() if corrections is None else corrections
        self._ms_per_token = 0.0
        waits_for_host = False
        if model is not None:
            self._sizes = ChunkSizes.of(model, max_chunk_tokens, lane_sms)
            whole = self._sizes.whole
            self._ms_per_token = model.prefill(whole, whole * whole / 2).ms / whole
            waits_for_host = lane_waits_for_host(model, self._sizes.lane)
        self._offers = Offers(lane_sms, max_batch_sizes, lane_waits_for_host=waits_for_host)
        self._preference = Preference()
        self._now_s = 0.0
        self._paused = False
        self._paused_s = 0.0

    @property
    def corrections(self) -> Mapping[tuple[PolicyName, ForwardKind], float]:
        """Measured over predicted time, for each policy and kind of forward; 1 before anything was measured."""
        return self._corrections.as_dict()

    @property
    def prefill_ms_per_token(self) -> float:
        """Time of a prompt token at the rate planned lately, beside decode as it is; 0 without a model."""
        return self._ms_per_token

    def decode_ms(self, batch_size: int, kv_tokens: int) -> float:
        """Predicted time of a decode step alone on the whole GPU; there must be a model."""
        assert self.model is not None
        return self.model.decode(batch_size, kv_tokens).ms * self._corrections["solo", "step"]

    def observe(self, policy: PolicyName, kind: ForwardKind, predicted_ms: float, measured_ms: float) -> None:
        """Correct later predictions by one measurement; times of 0 say nothing.

        Args:
            policy: of the plan.
            kind: ``step`` for a forward with decode rows, ``slice`` for prompt rows alone, on whichever lane.
            predicted_ms: as the plan said, so corrected already.
            measured_ms: on the device.
        """
        self._corrections.observe(policy, kind, predicted_ms, measured_ms)

    def limit_batch_sizes(self, max_batch_sizes: Mapping[int, int]) -> None:
        """Take other limits of batches from now on; see the class."""
        self._offers.max_batch_sizes = max_batch_sizes

    def plan(self, load: Load) -> Plan:
        """How the next launches share the device; the same loads in the same order give the same plans."""
        contended = load.decode is not None and bool(load.prompts or load.chunk)
        elapsed_s = load.now_s - self._now_s
        self._now_s = load.now_s
        self._paused_s += elapsed_s if self._paused else -elapsed_s
        self._paused_s = max(self._paused_s, 0.0) if contended else 0.0
        plan = self._choose(load)
        self._paused = contended and plan.chunk_tokens == 0 and plan.slice_layers == 0
        return plan

    def _choose(self, load: Load) -> Plan:
        decode, name = load.decode, self.policy.name
        if not load.prompts and load.chunk is None:
            if decode is None or self.model is None:
                return Plan("solo", decode=decode is not None)
            return Plan("solo", decode=True, decode_ms=self.decode_ms(decode.batch_size, decode.kv_tokens))
        if self.model is None or name == "serial":
            return self._by_rule(load)
        backlog = Backlog(load, max_chunk_tokens=self._max_chunk_tokens, num_layers=self._num_layers)
        if decode is None:
            return self._prefill_only(load, backlog, self.model)
        outlook = Outlook(
            load,
            decode,
            backlog,
            model=self.model,
            sizes=self._sizes,
            corrections=self._corrections,
            max_chunk_tokens=self._max_chunk_tokens,
        )
        if load.chunk is not None and not self._offers.splits(outlook):
            # No lane has a graph for so many rows: decode waits until the chunk is done.
            return self._prefill_only(load, backlog, self.model)
        if name == "auto":
            return self._best(outlook, load)
        return self._plan_of(self._forced(outlook, load), outlook, load, "forced")

    # ---- no model, one phase, or a policy that is forced ----

    def _by_rule(self, load: Load) -> Plan:
        """``serial``, and ``mixed`` where nothing is predicted."""
        rows = self.max_rows
        if self.policy.name == "serial":
            ms: float | None = None
            if self.model is not None:
                backlog = Backlog(load, max_chunk_tokens=self._max_chunk_tokens, num_layers=self._num_layers)
                rows = min(rows, backlog.tokens)
                ms = self._prefill_ms(backlog, rows, "serial", self.model)
            return Plan("serial", decode=False, chunk_tokens=rows, decode_ms=ms, bound="forced")
        if load.decode is None:
            return Plan("solo", decode=False, chunk_tokens=rows)
        rows = max(rows - load.decode.batch_size, ROW_STEP)
        return Plan("mixed", decode=True, chunk_tokens=rows, bound="forced")

    def _prefill_only(self, load: Load, backlog: Backlog, model: PerformanceModel) -> Plan:
        """Whole chunks on the decode lane; slices of layers where a chunk is on the prefill lane."""
        if load.chunk is None:
            tokens = min(backlog.lane_chunk(self._sizes.whole), self.max_rows)
            ms = self._prefill_ms(backlog, tokens, "solo", model)
            return Plan("solo", decode=False, chunk_tokens=tokens, decode_ms=ms)
        layer_ms = self._prefill_ms(backlog, backlog.tokens, "solo", model) / self._num_layers
        layers = min(max(round(SOLO_SLICE_MS / layer_ms), 1), backlog.layers_left)
        return Plan(
            "solo", decode=False, prefill_lane="prefill", slice_layers=layers, slice_ms=layers * layer_ms
        )

    def _prefill_ms(
        self, backlog: Backlog, tokens: int, policy: PolicyName, model: PerformanceModel
    ) -> float:
        ms = model.prefill(tokens, backlog.pairs(tokens)).ms * self._corrections[policy, "slice"]
        self._note_rate(tokens / ms)
        return ms

    def _forced(self, outlook: Outlook, load: Load) -> Option:
        """``mixed`` or ``split`` as well as they can; ``mixed`` as well while no lane has a graph for so many rows."""
        splits = self._offers.splits(outlook) if self.policy.name == "split" else []
        if splits:
            # The fewest SMs that hold the target; where none do, what is fastest for decode.
            return next((o for o in splits if o.holds_tpot), None) or min(splits, key=interval_of)
        if self.policy.chunk_tokens is not None:
            return outlook.mixed(self.max_rows - outlook.batch_size)
        largest = outlook.largest_mixed()
        if largest is None:
            return outlook.alone() if self._may_pause(load) else outlook.mixed(FLOOR_TOKENS)
        return largest

    # ---- the best of all policies ----

    def _best(self, outlook: Outlook, load: Load) -> Plan:
        alone = outlook.alone()
        if load.chunk is None and outlook.budget_ms == math.inf and load.steps_left is not None:
            paced = outlook.paced(load.steps_left)
            return self._plan_of(paced, outlook, load, "throughput", [alone, paced])
        options = self._offers.prefilling(outlook, load)
        weighed = [alone, *options]
        if load.chunk is None and outlook.budget_ms == math.inf:
            first = outlook.prefill_first()
            weighed.append(first)
            if max(map(throughput_worth, options)) < BESIDE_GAIN * first.throughput:
                return self._plan_of(first, outlook, load, "throughput", weighed)
        holding = [option for option in options if option.holds_tpot or outlook.infeasible]
        on_time = [option for option in holding if option.holds_ttft]
        bound: Bound = "ttft"
        if on_time:
            option = self._preference.pick(
                on_time, rate_worth if outlook.demand.some_late else throughput_worth
            )
            bound = "throughput" if outlook.limit_ms == math.inf else "tpot"
        elif holding:
            option = self._preference.pick(holding, rate_worth)
        elif self._may_pause(load):
            option, bound = alone, "tpot"
        else:
            least = LEAST_RATE * 1e3 / outlook.prefill_ms_per_token
            fast = [option for option in options if option.prefill_tokens_per_s >= least]
            option = min(fast, key=interval_of) if fast else max(options, key=rate_worth)
        return self._plan_of(option, outlook, load, bound, weighed)

    def _may_pause(self, load: Load) -> bool:
        """Whether the prompts can wait for decode to catch up: no pause goes on for ever."""
        overdue = (load.chunk or load.prompts[0]).deadline_s < load.now_s
        return self._paused_s < (OVERDUE_PATIENCE_S if overdue else PAUSE_PATIENCE_S)

    def _plan_of(
        self, option: Option, outlook: Outlook, load: Load, bound: Bound, weighed: Sequence[Option] = ()
    ) -> Plan:
        self._preference.note(option)
        if option.prefill_tokens_per_s:
            self._note_rate(option.prefill_tokens_per_s / 1e3)
        on_prefill_lane = load.chunk is not None or option.policy == "split"
        decode_ms, slice_ms = outlook.lane_ms(option)
        return Plan(
            option.policy,
            decode=option.interval_ms < math.inf,
            prefill_lane="prefill" if on_prefill_lane else "decode",
            chunk_tokens=0 if load.chunk is not None else option.chunk_tokens,
            slice_layers=option.slice_layers,
            partition=partition_of(option.decode_sms, num_sms=outlook.num_sms),
            decode_ms=decode_ms,
            slice_ms=slice_ms,
            bound=bound,
            options=tuple(weighed) or (option,),
        )

    def _note_rate(self, tokens_per_ms: float) -> None:
        self._ms_per_token += RATE_WEIGHT * (1 / tokens_per_ms - self._ms_per_token)
