"""Packed sampling settings, for tests of both samplers."""

import torch

from bullet_graph.kernels.sampler import pack_settings


def settings_row(**changes: object) -> torch.Tensor:
    """Greedy settings but for the changes."""
    defaults: dict[str, object] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    masks: dict[str, object] = {"masked_until": 0, "masked_token_ids": ()}
    return torch.from_numpy(pack_settings(**(defaults | masks | changes)))  # type: ignore[arg-type]
