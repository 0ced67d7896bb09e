"""When the loop captures, between two steps, what its executor has not captured yet."""

from collections.abc import Iterable

from bullet_graph.planner.plan import Load

PREPARE_MS = 20.0
"""What capturing one graph takes at most, of 32 layers on an H200 (``graphs.capture_plan.DECODE_GRAPH_S``)."""

PREPARE_SHARE = 0.25
"""Captures take no more than this share of the time while there is work."""


def spare_ms(
    load: Load, awaited_s: Iterable[tuple[float, float]], *, ms_per_token: float, layers: int
) -> float:
    """How long the loop may stop launching without a target being missed that can be met; 0 for not at all.

    Sequences that decode can wait as long as their slack. Prompts, served in their order at the rate of late, can each
    wait until their end would come after their deadline; one that is late whatever is done binds nothing.

    Args:
        load: whose slack counts every sequence with a target.
        awaited_s: for tokens in flight that slack does not count, when each is expected and when it is due.
        ms_per_token: time of a prompt token.
        layers: of the model.
    """
    spare = float("inf") if load.decode is None else load.decode.slack_ms
    ends = [((due_s - end_s) * 1e3) for end_s, due_s in awaited_s]
    end_ms = 0.0
    if load.chunk is not None:
        end_ms += load.chunk.tokens * load.chunk.layers_left / layers * ms_per_token
        ends.append((load.chunk.deadline_s - load.now_s) * 1e3 - end_ms)
    for prompt in load.prompts:
        end_ms += prompt.tokens_left * ms_per_token
        ends.append((prompt.deadline_s - load.now_s) * 1e3 - end_ms)
    return max(min([spare, *(left_ms for left_ms in ends if left_ms >= 0)]), 0.0)


class PreparationPace:
    """Keeps captures to their share of the time."""

    def __init__(self) -> None:
        self._not_before_s = 0.0

    def may_begin(self, now_s: float) -> bool:
        """Whether the last capture is long enough ago."""
        return now_s >= self._not_before_s

    def note(self, start_s: float, end_s: float) -> None:
        """A capture took this time."""
        self._not_before_s = end_s + (end_s - start_s) * (1 / PREPARE_SHARE - 1)
