"""Which of several ways to share the device is better."""

from collections.abc import Callable, Sequence

from bullet_graph.planner.plan import Option, PolicyName

STICKINESS = 1.15
"""Another policy must be so many times better than the last one to take its place."""

LANE_SHARE = 0.75
"""What a chunk on the prefill lane is worth beside rows of a mixed step: its prompts wait for its end and then, to
decode, for a step or two, and until then no other chunk can begin. Outputs of a few tokens never make good for that: at
rates predicted within 5 %, split served a third fewer code requests within 8 ms a token (bench/LOG.md)."""

BESIDE_GAIN = 1.03
"""Without TPOT targets, prefill beside decode must bring so many times what the phases bring in turn: prompts that are
prefilled first let the batch grow, which makes every later step cheaper. Simulated, all at once: conv 24.0 → 22.6 s,
code 23.7 → 23.1 s."""


class Preference:
    """Prefers what was chosen last, unless another option is much better."""

    def __init__(self) -> None:
        self._last: tuple[PolicyName, int | None] | None = None

    def note(self, option: Option) -> None:
        """This option was chosen."""
        self._last = option.policy, option.decode_sms

    def pick(self, options: Sequence[Option], key: Callable[[Option], float]) -> Option:
        """The best, or the best of the policy chosen last where that is nearly as good.

        Args:
            options: at least one.
            key: what is better is higher.
        """
        best = max(options, key=key)
        same = [option for option in options if (option.policy, option.decode_sms) == self._last]
        kept = max(same, key=key, default=best)
        return kept if STICKINESS * key(kept) >= key(best) else best


def interval_of(option: Option) -> float:
    """Predicted time from one decode step to the next, in ms."""
    return option.interval_ms


def rate_worth(option: Option) -> float:
    """Predicted prefill rate in tokens/s, less on a lane of its own."""
    return option.prefill_tokens_per_s * (LANE_SHARE if option.slice_layers else 1.0)


def throughput_worth(option: Option) -> float:
    """Predicted throughput, less on a lane of its own; see :class:`Option`."""
    return option.throughput * (LANE_SHARE if option.slice_layers else 1.0)
