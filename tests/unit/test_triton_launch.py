"""Repeated launches: what Triton is asked, and what goes to the compiled kernel without asking."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is published for Linux only")

from bullet_graph.kernels.decode_attention import RepeatedLaunch

CONSTANTS = {"WIDTH": 128, "BLOCK": 64}
BYTES = torch.zeros(256, dtype=torch.uint8)
START = -BYTES.data_ptr() % 16


def at(offset: int) -> Tensor:
    """A tensor so many bytes after an aligned address."""
    return BYTES[START + offset :]


class Compiled:
    """What a launch found; remembers those that came without asking."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.launches.append((grid, arguments))


class Kernel:
    """Stands in for a function of ``triton.jit`` of two tensors and a number."""

    arg_names = ("x_ptr", "out_ptr", "rows", "WIDTH", "BLOCK")

    def __init__(self, found: Callable[[], Compiled | None] = Compiled) -> None:
        self.found: list[Compiled | None] = []
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []
        self._find = found

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled | None]:
        def launch(*arguments: Any, **options: Any) -> Compiled | None:
            self.launches.append((grid, arguments, options))
            self.found.append(self._find())
            return self.found[-1]

        return launch


def launch_of(kernel: Kernel) -> RepeatedLaunch:
    return RepeatedLaunch(kernel, (7,), numbers=(3,), constants=CONSTANTS, options={"num_warps": 4})


def test_triton_is_asked_once() -> None:
    kernel = Kernel()
    launch, x, out = launch_of(kernel), at(0), at(16)
    launch(x, out)
    launch(out, x)
    launch(at(32), at(48))
    assert kernel.launches == [((7, 1, 1), (x, out, 3), {**CONSTANTS, "num_warps": 4})]
    (found,) = kernel.found
    assert found is not None
    grids, arguments = zip(*found.launches, strict=True)
    assert grids == ((7, 1, 1), (7, 1, 1))
    # A compiled kernel takes all parameters, its constants too, in the order of the signature.
    assert [[tensor.data_ptr() for tensor in taken[:2]] for taken in arguments] == [
        [at(16).data_ptr(), at(0).data_ptr()],
        [at(32).data_ptr(), at(48).data_ptr()],
    ]
    assert [taken[2:] for taken in arguments] == [(3, 128, 64)] * 2


def test_other_alignment_asks_again() -> None:
    kernel = Kernel()
    launch = launch_of(kernel)
    for offset in (0, 32, 4, 36, 16):
        launch(at(offset), at(64))
    assert [arguments[0].data_ptr() for _, arguments, _ in kernel.launches] == [
        at(offset).data_ptr() for offset in (0, 4, 16)
    ]
    assert [len(found.launches) for found in kernel.found if found is not None] == [1, 1, 0]


def test_nothing_found_asks_each_time() -> None:
    kernel = Kernel(lambda: None)
    launch = launch_of(kernel)
    for _ in range(3):
        launch(at(0), at(16))
    assert len(kernel.launches) == 3


@pytest.mark.parametrize("constants", [{"BLOCK": 64, "WIDTH": 128}, {"WIDTH": 128}])
def test_constants_are_the_last_parameters_in_their_order(constants: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="constants are"):
        RepeatedLaunch(Kernel(), (1,), numbers=(), constants=constants, options={})
