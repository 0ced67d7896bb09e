"""vLLM's default, asynchronous scheduler with a token budget that can change; vLLM's core imports it by name."""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from bench.peers.budget import BudgetedSchedule


class BudgetedScheduler(BudgetedSchedule, AsyncScheduler):
    """See :class:`~bench.peers.budget.BudgetedSchedule`."""
