"""Serves a workload in virtual time to see what it asks of captured graphs, and tries the plan proposed for it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bullet_graph.cli.simulate.run import PolicyRun, Simulator
from bullet_graph.engine.capture_proposal import Budget, GroupUse, Workload, propose
from bullet_graph.engine.capture_usage import CaptureUsage
from bullet_graph.graphs.capture_plan import CapturePlan, default_plan
from bullet_graph.graphs.plan_file import load_plan
from bullet_graph.runtime.captures import check_plan, max_forward_rows


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """What a plan does for the workload.

    Attributes:
        name: ``proposal``, ``every size``, that of a plan, or ``no plan``: all that an engine captures then.
        plan: the plan.
        groups: its sizes, by what they serve, for the steps of the recorded run.
        run: the workload served with it; None where that was not tried.
    """

    name: str
    plan: CapturePlan
    groups: tuple[GroupUse, ...]
    run: PolicyRun | None

    @property
    def lost_ms(self) -> float:
        """Time lost by all steps: to padding, to turns, to launches one by one."""
        return sum(group.lost_ms for group in self.groups)


@dataclass(frozen=True, slots=True)
class CaptureStudy:
    """A proposal and what led to it.

    Attributes:
        simulator: workload and device.
        budget: that the proposal keeps to.
        usage: the steps of the recorded run.
        workload: the same as demands.
        proposal: the plan proposed.
        against: what it is held against.
        everything: every size that a step could be padded to.
    """

    simulator: Simulator
    budget: Budget
    usage: CaptureUsage
    workload: Workload
    proposal: PlanOutcome
    against: PlanOutcome
    everything: PlanOutcome

    @property
    def device_ms(self) -> float:
        """Time of all steps on the decode lane."""
        decode = (rows for sizes in self.usage.decode.values() for rows in sizes.values())
        return sum(rows.device_ms for rows in (*decode, *self.usage.forwards.values()))


def study_captures(
    simulator: Simulator,
    budget: Budget,
    *,
    against: str | None,
    on_done: Callable[[object], object],
) -> CaptureStudy:
    """Record the workload with everything captured, propose a plan, and serve the workload with it.

    Args:
        simulator: with one policy.
        against: a plan's file or name to hold the proposal against; None: what an engine without a plan captures.
        on_done: told of each finished request, of up to three runs.

    Raises:
        ConfigError: the plan cannot be used here, or the budget affords nothing.
    """
    spec, device, config = simulator.spec, simulator.device, simulator.spec.config
    (policy,) = spec.policies
    other = None if against is None else load_plan(against)
    if other is not None:
        check_plan(other, config, name=str(against), dtype=device.dtype, num_sms=device.performance.num_sms)
    decode_sms = device.performance.decode_sms if policy.name in ("auto", "split") else ()
    today = default_plan(
        model=Path(config.model).name,
        dtype=device.dtype,
        num_sms=device.performance.num_sms,
        max_num_seqs=config.max_num_seqs,
        max_rows=max_forward_rows(config),
        shape=device.model,
        decode_sms=decode_sms if policy.decode_sms is None else (policy.decode_sms,),
    )
    usage = CaptureUsage(device.unpadded)

    def serve(plan: CapturePlan, record: bool = False) -> PolicyRun:
        return simulator.run(
            policy,
            spec.request_rate,
            capture_plan=plan,
            on_done=on_done,
            on_step=usage.note if record else lambda _: None,
        )

    first = serve(today, record=True)
    workload = Workload.of(usage, like=today)
    proposed = propose(workload, budget, like=today)
    everything = workload.everything(like=today)
    if other is None:
        held = PlanOutcome("no plan", today, workload.uses(today), first)
    else:
        held = PlanOutcome(str(against), other, workload.uses(other), serve(other))
    return CaptureStudy(
        simulator,
        budget,
        usage,
        workload,
        PlanOutcome("proposal", proposed, workload.uses(proposed), serve(proposed)),
        held,
        PlanOutcome("every size", everything, workload.uses(everything), None),
    )
