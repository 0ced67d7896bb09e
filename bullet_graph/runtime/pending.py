"""A launch on a GPU that is under way, and the copies of its results to the host."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from bullet_graph.kernels.sampler import token_logprobs
from bullet_graph.runtime.step import Step, StepLogprobs, StepResult


@dataclass(frozen=True, slots=True)
class PendingLaunch:
    """Where a launch's results will be once the event ``finished`` has passed; it is to be recorded after the copies.

    Attributes:
        started: recorded before the launch.
        finished: recorded after it.
        token_ids: [sampled rows] int32 in pinned memory; None where nothing is sampled.
        logprobs: chosen, top ids and top ones, likewise; None where they are not asked for.
    """

    started: torch.cuda.Event
    finished: torch.cuda.Event
    token_ids: Tensor | None
    logprobs: tuple[Tensor, Tensor, Tensor] | None

    @classmethod
    def sampling(
        cls,
        started: torch.cuda.Event,
        finished: torch.cuda.Event,
        step: Step,
        logits: Tensor,
        token_ids: Tensor,
    ) -> Self:
        """Start the copies of what a step has sampled, on the current stream."""
        logprobs = None
        if step.num_logprobs is not None:
            chosen, top_ids, top = token_logprobs(logits, token_ids, step.num_logprobs)
            logprobs = _to_host(chosen), _to_host(top_ids), _to_host(top)
        return cls(started, finished, _to_host(token_ids), logprobs)

    def wait(self) -> StepResult:
        """Wait for the launch, and read its results."""
        self.finished.synchronize()
        device_ms = self.started.elapsed_time(self.finished)
        if self.token_ids is None:
            return StepResult(np.empty(0, dtype=np.int32), None, device_ms)
        logprobs = None
        if self.logprobs is not None:
            chosen, top_ids, top = self.logprobs
            logprobs = StepLogprobs(chosen.numpy(), top_ids.int().numpy(), top.numpy())
        return StepResult(self.token_ids.numpy(), logprobs, device_ms)


def _to_host(tensor: Tensor) -> Tensor:
    """Start a copy into pinned memory on the current stream."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
