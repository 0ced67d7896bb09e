"""Halves of a layer that were compiled ahead of time: made into packages, and loaded without compiling anything.

AOTInductor's packages hold shared libraries and cubins, which torch's C++ runtime loads within milliseconds. That is
why its loader is called here directly: ``torch._inductor.aoti_load_package``, the documented way to the same loader,
imports Dynamo, Inductor and sympy, which takes seconds.
"""

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bullet_graph.errors import CacheError
from bullet_graph.graphs.compiled import Half, HalfCompiler, LayerHalf, compile_now, inductor_contained

PACKAGE_SUFFIX = ".pt2"

_MODEL_NAME = "model"
"""AOTInductor's own name for the one model of a package."""

_LEAST_TIME = {
    # To preprocess the headers takes longer than it saves two halves.
    "aot_inductor.precompile_headers": False,
    # Of the code around the kernels.
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.enable_line_tables": False,
}
"""Inductor's settings for the least time in the C++ compiler (bench/LOG.md), which is most of the time here."""

_GPU_SETTINGS = {
    # No kernel runs on the host: so neither probe its processor for vector instructions, nor use them.
    "cpp.vec_isa_ok": False,
    "cpp.march": "",
}


class HalfStore(Protocol):
    """Where compiled halves are kept."""

    def find(self, name: str) -> Path | None:
        """The package that was kept under this name; None: nothing."""

    def save(self, name: str, ahead: Callable[[], tuple[Half, bytes]], now: Callable[[], Half]) -> Half:
        """Compile a half that is not there: ahead of time where it is to be kept, else as ever."""

    def refuse(self, name: str, problem: str) -> None:
        """Be told that what was kept cannot be loaded; raises where that is an error."""


def stored(store: HalfStore, prefix: str) -> HalfCompiler:
    """A compiler of halves that takes them from a store, where it has them.

    Args:
        prefix: of the names, which tells all that the halves are compiled for.
    """

    def compile_or_load(half: LayerHalf) -> Half:
        name = f"{prefix}/{half.name}{PACKAGE_SUFFIX}"
        package = store.find(name)
        if package is None:
            return store.save(name, lambda: compile_ahead(half), lambda: compile_now(half))
        try:
            return load_ahead(package, half)
        except CacheError as error:
            store.refuse(name, str(error))
        # Whatever the runtime and foreign code may raise.
        except Exception as error:
            store.refuse(name, f"{type(error).__name__}: {error!s:.300}")
        return compile_now(half)

    return compile_or_load


def compile_ahead(half: LayerHalf) -> tuple[Half, bytes]:
    """Compile a half, and give it as a package as well.

    Raises:
        Exception: of any kind, where torch cannot do so, or this machine has no C++ compiler, or no CUDA headers.
    """
    with (
        inductor_contained(),
        tempfile.TemporaryDirectory(prefix="bullet_graph_") as folder,
        warnings.catch_warnings(),
    ):
        # Torch's own code calls what torch deprecates.
        warnings.simplefilter("ignore", FutureWarning)
        package = Path(folder) / f"{half.name}{PACKAGE_SUFFIX}"
        torch._inductor.aoti_compile_and_package(
            exported(half),
            package_path=str(package),
            inductor_configs=_inductor_settings(half.rows[0].device),
        )
        return load_ahead(package, half), package.read_bytes()


def exported(half: LayerHalf) -> torch.export.ExportedProgram:
    """A half as a program of its tensors, weights included: for 2 to ``max_rows`` rows, the other sizes as they are."""
    tensors = _tensors(half.arguments)
    # A dimension of one size is none.
    rows = {0: torch.export.Dim("rows", min=2, max=half.max_rows)} if half.max_rows > 2 else None
    shapes = [rows] * len(half.rows) + [None] * (len(tensors) - len(half.rows))
    # Not strict: Dynamo would only trace the function a second time.
    return torch.export.export(
        _OfTensors(half), tuple(tensors), dynamic_shapes=(tuple(shapes),), strict=False
    )


def load_ahead(package: Path, half: LayerHalf) -> Half:
    """A half from its package, which is code: it must come from a trusted place.

    It has been called once then, since its kernels are loaded at the first call, which must not be one that is
    captured. What it calls of this package's operators must be registered.

    Args:
        half: that the package was compiled of; its arguments tell where to load it to.

    Raises:
        Exception: of any kind, where the package is not what :func:`compile_ahead` gives with the same torch.
    """
    device = half.rows[0].device
    # Single-threaded: else the runtime records events and waits for them, which a capture forbids.
    loader = torch._C._aoti.AOTIModelPackageLoader(
        str(package), _MODEL_NAME, True, 1, -1 if device.index is None else device.index
    )
    run = loader.boxed_run

    def loaded(*arguments: Any) -> tuple[Tensor, Tensor]:
        x, residual = run(_tensors(arguments))
        return x, residual

    loaded(*half.arguments)
    return loaded


class _OfTensors(torch.nn.Module):
    """A half as a function of its tensors alone; None and numbers are part of the program."""

    def __init__(self, half: LayerHalf) -> None:
        super().__init__()
        self._half = half

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        given = iter(tensors)
        half = self._half
        return half.function(
            *(next(given) if isinstance(value, Tensor) else value for value in half.arguments)
        )


def _inductor_settings(device: torch.device) -> dict[str, Any]:
    wanted = _LEAST_TIME if device.type == "cpu" else _LEAST_TIME | _GPU_SETTINGS
    # Releases of torch differ in which they know.
    known = torch._inductor.config.get_config_copy()
    return {name: value for name, value in wanted.items() if name in known}


def _tensors(arguments: tuple[Any, ...]) -> list[Tensor]:
    return [value for value in arguments if isinstance(value, Tensor)]
