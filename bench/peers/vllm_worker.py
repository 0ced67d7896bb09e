"""What vLLM's workers import before they load a model: of its dummy weights, those in FP8 get the range of real ones.

vLLM draws all below 0.001, of which FP8 leaves zeros, and under a power cap products of zeros are faster.
"""

from typing import Any

from vllm.model_executor.model_loader import weight_utils

_SPREAD = 200.0
"""Quantized weights fill E4M3's range of ±448; uniform numbers in ±200 have their standard deviation."""
_draw = weight_utils.initialize_single_dummy_weight


def draw(param: Any, low: float = -1e-3, high: float = 1e-3, seed: int = 1234) -> None:
    """Fill a weight with random numbers."""
    if param.is_floating_point() and param.element_size() == 1:
        low, high = -_SPREAD, _SPREAD
    _draw(param, low, high, seed)


weight_utils.initialize_single_dummy_weight = draw


class Worker:
    """Adds nothing: vLLM imports this module for it."""
