"""Launches of Triton's kernels that find what is compiled in a dictionary.

Triton's own Python takes 20 to 50 µs to find the compiled kernel of a launch, longer than many a kernel runs. A forward
that is launched kernel by kernel would keep the device waiting.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch import Tensor

from bullet_graph.kernels.gpu import Gpu

_ALIGNMENT = 16
"""Triton compiles a kernel anew for addresses, and whole numbers, that are no multiples of this."""


class Launcher:
    """Launches a kernel as Triton does: ``Launcher(kernel)[grid](*tensors_and_numbers, **constants_and_options)``.

    Triton is asked at the first launch with these constants, options, and kinds of arguments: dtype and alignment of
    tensors, what Triton compiles numbers by. Arguments are in the signature's order; those by name are its last.

    A kernel with a parameter ``PDL`` starts while the launch before runs (programmatic dependent launch), if the GPU
    can do so. It must call ``triton_kernels.wait_for_earlier`` before it reads what others write, and before it writes.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel, self._names = kernel, tuple(kernel.arg_names)
        self._options: dict[str, bool] | None = None if "PDL" in self._names else {}
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        kinds = [
            (x.dtype, x.get_device(), x.data_ptr() % _ALIGNMENT == 0) if isinstance(x, Tensor) else _kind(x)
            for x in arguments
        ]
        if self._options is None:
            x = next(x for x in arguments if isinstance(x, Tensor))
            overlaps = x.is_cuda and Gpu.of(x.device).overlaps_launches
            self._options = {"PDL": overlaps, "launch_pdl": overlaps}
        named |= self._options
        key = (*kinds, *named.items())
        if (compiled := self._compiled.get(key)) is None:
            self._compiled[key] = self._kernel[grid](*arguments, **named)  # None in Triton's interpreter
            return
        compiled[(*grid, 1, 1)[:3]](*arguments, *(named[name] for name in self._names[len(arguments) :]))


def _kind(value: Any) -> object:
    """What Triton compiles a kernel by, of an argument that is no tensor."""
    if isinstance(value, int):
        return type(value), value == 1, value % _ALIGNMENT == 0, value.bit_length() > 31
    if hasattr(value, "block_shape"):  # a descriptor of a tensor, for TMA
        return value.base.dtype, value.base.get_device(), *value.block_shape
    return type(value)


quick = cache(Launcher)
"""The one launcher of each kernel."""
