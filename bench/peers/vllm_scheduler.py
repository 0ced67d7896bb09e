"""vLLM's own scheduler with a budget that can change; vLLM's core imports it by name (``scheduler_cls``).

Of the asynchronous scheduler, which vLLM takes by default: the synchronous one would slow it down.
"""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from bench.peers.budget import BudgetedSchedule

NAME = f"{__name__}.BudgetedScheduler"


class BudgetedScheduler(BudgetedSchedule, AsyncScheduler):
    """See :class:`~bench.peers.budget.BudgetedSchedule`."""
