"""Launches of one Triton kernel over and over, without Triton's choice of the compiled kernel each time."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_ALIGNMENT_BYTES = 16
"""Triton compiles a kernel anew for pointers that are not aligned so."""


class RepeatedLaunch:
    """Launches that differ by where their tensors lie, and in nothing else.

    Triton's Python takes some 20 µs to find a launch's compiled kernel, longer than a short kernel runs. It does so
    for the first launch here; the others go to what it found, unless their tensors are aligned otherwise.

    Args:
        kernel: of ``triton.jit``; its parameters are tensors, then numbers, then constexprs.
        grid: programs along each axis, at most three.
        numbers: its numbers.
        constants: its constexprs, in their order.
        options: of the compiler and the launch, such as ``num_warps``.

    Raises:
        ValueError: the constants are not the kernel's last parameters.
    """

    __slots__ = ("_aligned", "_compiled", "_constants", "_grid", "_kernel", "_numbers", "_options")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        *,
        numbers: tuple[float, ...],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        last = list(kernel.arg_names[-len(constants) :])
        if last != list(constants):
            raise ValueError(f"the kernel's constants are {last} in this order, got {list(constants)}")
        self._kernel = kernel
        self._grid = (*grid, 1, 1)[:3]
        self._numbers = numbers
        self._constants = constants
        self._options = options
        self._compiled: Any = None
        self._aligned: list[bool] = []

    def __call__(self, *tensors: Tensor) -> None:
        """Enqueue the kernel on the current stream; dtypes are those of the first call.

        Args:
            tensors: its tensors, all of them.
        """
        aligned = [tensor.data_ptr() % _ALIGNMENT_BYTES == 0 for tensor in tensors]
        if self._compiled is not None and aligned == self._aligned:
            self._compiled[self._grid](*tensors, *self._numbers, *self._constants.values())
            return
        # None in Triton's interpreter, which has nothing to find.
        self._compiled = self._kernel[self._grid](
            *tensors, *self._numbers, **self._constants, **self._options
        )
        self._aligned = aligned
