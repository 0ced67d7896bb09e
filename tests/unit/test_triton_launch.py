"""Repeated launches: what Triton is asked, what is launched without asking, and what the driver gets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_triton import run_compiled
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


# ---- what a driver that launches nothing gets of decode attention, compiled without a GPU ----

SCRIPT = """
import json, sys
from types import SimpleNamespace
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from bullet_graph.kernels.attention import LayerRows
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.kernels.memory import KVCache
from bullet_graph.models.presets import PRESETS
from bullet_graph.kernels.decode_attention import DecodeBatch, TritonDecodeAttention

launches = []

class Launcher:
    def __init__(self, source, metadata):
        self.name = source.fn.__name__

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        told = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        launches.append([self.name, [x, y, z], stream, function, told])

driver.set_active(
    SimpleNamespace(
        launcher_cls=Launcher,
        utils=SimpleNamespace(
            load_binary=lambda *_: (1, 2, 32, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 1 << 18},
            unload_module=lambda _: None,
        ),
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 77,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
)
config = PRESETS["qwen3-0.6b"]
cache = KVCache(config, num_blocks=4, block_tokens=16, dtype=torch.bfloat16, device=torch.device("cpu"))
lane = TritonDecodeAttention(config, cache, max_rows=64, gpu=Gpu(132, (9, 0)))
rows = 20
batch = DecodeBatch(*(torch.arange(n, dtype=torch.int32) for n in (rows + 1, rows, rows)))
q, out = (torch.zeros(rows, config.num_heads, config.head_dim, dtype=torch.bfloat16) for _ in range(2))
once = lane.plan(batch)
for layer in range(3):
    once.run_into(layer, LayerRows(q, q, q), out)
for layer in range(3):
    lane.plan(batch).run_into(layer, LayerRows(q, q, q), out)
json.dump(launches, sys.stdout)
"""


def test_the_driver_gets_the_same_launches_however_the_kernel_was_found(tmp_path: Path) -> None:
    launches = run_compiled(SCRIPT, tmp_path)
    assert [name for name, *_ in launches] == ["decode_attention_kernel", "combine_partials_kernel"] * 6
    found_once, asked_each_time = launches[:6], launches[6:]
    assert found_once == asked_each_time
    # Each layer has keys and values of its own, at the places of the signature.
    assert len({launch[-1][1] for launch in found_once[::2]}) == 3
