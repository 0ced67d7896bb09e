"""The most tokens of a step of vLLM's, changed while vLLM runs: starting it anew for each costs a minute.

The scheduler is in vLLM's core, a process of its own. It reads the number from a small file that both processes map
into their memory; see :mod:`bench.peers.vllm_scheduler`.
"""

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONFIG_KEY = "bullet_graph_token_budget_file"
"""Where in vLLM's ``additional_config`` the file's path is."""

_NUMBER = struct.Struct("=q")


class TokenBudget:
    """A number in a file that one process writes and another reads. :meth:`create` and :meth:`open` make it."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _NUMBER.size)

    @classmethod
    def create(cls, path: Path, num_tokens: int) -> "TokenBudget":
        """Make the file, or take the place of one that is there."""
        path.write_bytes(_NUMBER.pack(num_tokens))
        return cls(path)

    @classmethod
    def open(cls, path: str | Path) -> "TokenBudget":
        """Map a file that is there."""
        return cls(Path(path))

    @property
    def num_tokens(self) -> int:
        """The number now, at least 1."""
        number: int = _NUMBER.unpack_from(self._map)[0]
        return number

    @num_tokens.setter
    def num_tokens(self, value: int) -> None:
        if value < 1:
            raise ValueError(f"a step's budget must be at least 1 token, got {value}")
        _NUMBER.pack_into(self._map, 0, value)

    def close(self) -> None:
        """Unmap the file; it stays."""
        self._map.close()


class BudgetedSchedule:
    """Mixed into a scheduler of vLLM's: every step has the tokens that the shared file says, the engine's at most.

    Sequences that run at once are limited alike, as vLLM demands it of a server started with so few tokens a step.
    """

    vllm_config: Any
    max_num_scheduled_tokens: int
    max_num_running_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._budget = TokenBudget.open(self.vllm_config.additional_config[CONFIG_KEY])
        self._most_tokens, self._most_seqs = self.max_num_scheduled_tokens, self.max_num_running_reqs

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan the next step; arguments and result are the scheduler's."""
        budget = self._budget.num_tokens
        self.max_num_scheduled_tokens = min(self._most_tokens, budget)
        self.max_num_running_reqs = min(self._most_seqs, budget)
        plan: Callable[..., Any] = super().schedule  # type: ignore[misc]
        return plan(*args, **kwargs)
