"""Launches: what Triton is asked, what is launched without asking, and what the driver gets."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiled_triton import run_compiled
from torch import Tensor

pytest.importorskip("triton", reason="Triton is published for Linux only")

from bullet_graph.kernels.gpu import Gpu
from bullet_graph.kernels.launch import Launcher, quick
from bullet_graph.runtime.capture_cache import _forget_kernels

CONSTANTS = {"WIDTH": 128, "BLOCK": 64}
BYTES = torch.zeros(256, dtype=torch.uint8)


def at(offset: int) -> Tensor:
    """A tensor so many bytes after an aligned address."""
    return BYTES[-BYTES.data_ptr() % 16 + offset :]


class Compiled:
    """What a launch found; remembers those that came without asking."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.launches.append((grid, arguments))


class Kernel:
    """Stands in for a function of ``triton.jit`` of two tensors and a number."""

    arg_names: tuple[str, ...] = ("x_ptr", "out_ptr", "rows", "WIDTH", "BLOCK")

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


def launch(launcher: Launcher, x: Tensor, out: Tensor, rows: int = 3, **named: int) -> None:
    launcher[(7,)](x, out, rows, **{**CONSTANTS, "num_warps": 4, **named})


def test_triton_is_asked_once() -> None:
    kernel = Kernel()
    launcher, x, out = Launcher(kernel), at(0), at(16)
    launch(launcher, x, out)
    launch(launcher, out, x)
    launch(launcher, at(32), at(48), 5)
    assert kernel.launches == [((7,), (x, out, 3), {**CONSTANTS, "num_warps": 4})]
    (found,) = kernel.found
    assert found is not None
    grids, arguments = zip(*found.launches, strict=True)
    assert grids == ((7, 1, 1), (7, 1, 1))
    # A compiled kernel takes all parameters, its constants too, in the order of the signature.
    assert [[tensor.data_ptr() for tensor in taken[:2]] for taken in arguments] == [
        [at(16).data_ptr(), at(0).data_ptr()],
        [at(32).data_ptr(), at(48).data_ptr()],
    ]
    assert [taken[2:] for taken in arguments] == [(3, 128, 64), (5, 128, 64)]


def test_numbers_by_name_come_in_the_signature_s_order() -> None:
    kernel = Kernel()
    launcher = Launcher(kernel)
    for _ in range(2):
        launcher[7, 2](at(0), at(16), BLOCK=64, num_warps=4, WIDTH=128, rows=3)
    (found,) = kernel.found
    assert found is not None
    ((grid, arguments),) = found.launches
    assert (grid, arguments[2:]) == ((7, 2, 1), (3, 128, 64))


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_kernel_that_can_overlap_does_so_where_the_gpu_can(overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gpu, "of", lambda _: Gpu(132, (9, 0) if overlaps else (8, 0)))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    kernel = Kernel()
    kernel.arg_names = (*Kernel.arg_names, "PDL")
    for _ in range(2):
        launch(quick(kernel), at(0), at(16))
    ((*_, options),), (found,) = kernel.launches, kernel.found
    assert options == {**CONSTANTS, "num_warps": 4, "PDL": overlaps, "launch_pdl": overlaps}
    assert found is not None
    assert [arguments[2:] for _, arguments in found.launches] == [(3, 128, 64, overlaps)]


NUMBERS = (*({"rows": rows} for rows in (1, 48, 2**31 + 1, True, None)), {"BLOCK": 32}, {"num_warps": 8})


@pytest.mark.parametrize("other", [{"x": at(4)}, {"out": at(8)}, {"x": at(0).view(torch.int8)}, *NUMBERS])
def test_what_triton_would_compile_anew_asks_again(other: dict[str, Any]) -> None:
    kernel = Kernel()
    launcher = Launcher(kernel)
    usual = {"x": at(0), "out": at(16)}
    for arguments in (usual, usual | other, usual, usual | other):
        launch(launcher, **arguments)
    assert len(kernel.launches) == 2
    assert [len(found.launches) for found in kernel.found if found is not None] == [1, 1]


def test_descriptors_differ_by_their_blocks() -> None:
    kernel = Kernel()
    launcher = Launcher(kernel)
    for shape in ([64, 64], [64, 64], [128, 64]):
        launch(launcher, at(0), SimpleNamespace(base=at(16), block_shape=shape))  # type: ignore[arg-type]
    assert len(kernel.launches) == 2


def test_nothing_found_asks_each_time() -> None:
    launcher = Launcher(kernel := Kernel(lambda: None))
    for _ in range(3):
        launch(launcher, at(0), at(16))
    assert len(kernel.launches) == 3


def test_kernels_of_a_rejected_entry_are_forgotten() -> None:
    kernel = Kernel()
    for _ in range(2):
        launch(quick(kernel), at(0), at(16))
        _forget_kernels()
    assert len(kernel.launches) == 2


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

utils = SimpleNamespace(load_binary=lambda *_: (1, 2, 32, 0, 1024), unload_module=lambda _: None,
                        get_device_properties=lambda _: {"max_shared_mem": 1 << 18})
driver.set_active(SimpleNamespace(
    launcher_cls=Launcher, utils=utils, get_current_device=lambda: 0, get_current_stream=lambda _: 77,
    get_current_target=lambda: GPUTarget("cuda", 90, 32)))
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
