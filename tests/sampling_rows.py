"""Packed sampling settings, for tests of both samplers."""

import torch

from bullet_graph.runtime import rows
from bullet_graph.runtime.step import SlotInit

_GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
_UNMASKED = {"masked_until": 0, "masked_token_ids": ()}


def settings_row(**changes: object) -> torch.Tensor:
    """Greedy settings but for the changes."""
    init = SlotInit(**{"slot": 0, **_GREEDY, **_UNMASKED, **changes})  # type: ignore[arg-type]
    return torch.from_numpy(rows.settings_row(init))
