"""vLLM's token budget per step, changed while vLLM runs: a restart for each budget would cost a minute.

vLLM's scheduler is in another process. Both processes map a small file that holds the number
(:mod:`bench.peers.vllm_scheduler`).
"""

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONFIG_KEY = "bullet_graph_token_budget_file"
"""Key of the file's path in vLLM's ``additional_config``."""

_NUMBER = struct.Struct("=q")


class TokenBudget:
    """A number in a file that one process writes and another reads; :meth:`create` makes the file."""

    def __init__(self, path: str | Path) -> None:
        with Path(path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _NUMBER.size)

    @classmethod
    def create(cls, path: Path, num_tokens: int) -> "TokenBudget":
        """Create the file, or replace it."""
        path.write_bytes(_NUMBER.pack(num_tokens))
        return cls(path)

    @property
    def num_tokens(self) -> int:
        """The number now, at least 1."""
        return int(_NUMBER.unpack_from(self._map)[0])

    @num_tokens.setter
    def num_tokens(self, value: int) -> None:
        if value < 1:
            raise ValueError(f"a step's budget must be at least 1 token, got {value}")
        _NUMBER.pack_into(self._map, 0, value)

    def close(self) -> None:
        """Unmap the file; it stays."""
        self._map.close()


class BudgetedSchedule:
    """A mixin for vLLM's scheduler: the shared file sets each step's token budget, up to the engine's own.

    The number of running sequences has the same limit: vLLM demands it of a server with this budget.
    """

    vllm_config: Any
    max_num_scheduled_tokens: int
    max_num_running_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._budget = TokenBudget(self.vllm_config.additional_config[CONFIG_KEY])
        self._most_tokens, self._most_seqs = self.max_num_scheduled_tokens, self.max_num_running_reqs

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan the next step; arguments and result are the scheduler's."""
        budget = self._budget.num_tokens
        self.max_num_scheduled_tokens = min(self._most_tokens, budget)
        self.max_num_running_reqs = min(self._most_seqs, budget)
        plan: Callable[..., Any] = super().schedule  # type: ignore[misc]
        return plan(*args, **kwargs)
