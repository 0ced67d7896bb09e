"""What the loop tells a decision trace, if there is one."""

from bullet_graph.engine.in_flight import Launch
from bullet_graph.engine.output import RequestOutput
from bullet_graph.engine.trace import DecisionTrace
from bullet_graph.partition.masks import SMS_PER_TPC
from bullet_graph.planner.plan import Load, Plan


class LoopTrace:
    """Passes on what the loop does; does nothing without a file.

    Args:
        num_sms: of the GPU; None where there is none to divide.

    Attributes:
        file: the trace under way, or None.
    """

    def __init__(self, file: DecisionTrace | None, num_sms: int | None) -> None:
        self.file = file
        self._num_sms = num_sms

    def decided(self, load: Load, plan: Plan) -> int:
        """Note a plan, and return the number of its decision."""
        return 0 if self.file is None else self.file.decided(load, plan)

    def launched(self, launch: Launch, *, decision: int, layers: int, now_s: float) -> None:
        """Note a launch."""
        if self.file is None:
            return
        step, partition = launch.scheduled.step, launch.placement.partition
        self.file.launched(
            launch.ticket,
            launch.placement.lane,
            decision=decision,
            now_s=now_s,
            policy=launch.policy,
            decode_rows=0 if step.decode is None else len(step.decode.slots),
            prefill_rows=0 if step.prefill is None else len(step.prefill.token_ids),
            layers=layers,
            decode_sms=self._sms(partition.decode_tpcs),
            prefill_sms=self._sms(partition.prefill_tpcs),
            predicted_ms=launch.predicted_ms,
        )

    def retired(self, ticket: int, now_s: float, device_ms: float) -> None:
        """Note that a launch is over."""
        if self.file is not None:
            self.file.retired(ticket, now_s, device_ms)

    def finished(self, output: RequestOutput) -> None:
        """Note a request's last output."""
        if self.file is not None:
            self.file.finished(
                output.request_id,
                output.metrics,
                output.slo,
                len(output.prompt_token_ids),
                len(output.metrics.token_times_s),
                output.outputs[0].finish_reason or "abort",
            )

    def _sms(self, tpcs: int | None) -> int | None:
        return self._num_sms if tpcs is None else SMS_PER_TPC * tpcs
