"""Halves of a layer that were compiled ahead of time: made into bytes, and loaded without compiling anything.

``torch.compile(...).aot_compile`` is the one of torch's ways that skips Dynamo as well: with its caches (Inductor's
folder, or the archive of ``torch.compiler.save_cache_artifacts``) each process traces anew. What it does not hold are
the shared libraries of Inductor's C++ kernels, which it looks for in Inductor's cache folder.
"""

import io
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bullet_graph.errors import CacheError
from bullet_graph.graphs.compiled import HalfCompiler, compile_now

Half = Callable[..., tuple[Tensor, Tensor]]


class HalfStore(Protocol):
    """Where compiled halves are kept."""

    def load(self, name: str) -> bytes | None:
        """What was kept under this name; None: nothing."""

    def save(self, name: str, ahead: Callable[[], tuple[Half, bytes]], now: Callable[[], Half]) -> Half:
        """Compile a half that is not there: ahead of time where it is to be kept, else as ever."""

    def refuse(self, name: str, problem: str) -> None:
        """Be told that what was kept cannot be loaded; raises where that is an error."""


def stored(store: HalfStore, prefix: str) -> HalfCompiler:
    """A compiler of halves that takes them from a store, where it has them.

    Args:
        prefix: of the names, which tells all that the halves are compiled for.
    """

    def compile_or_load(name: str, half: Half, arguments: Sequence[Any], settings: dict[str, Any]) -> Half:
        name = f"{prefix}/{name}"
        data = store.load(name)
        if data is not None:
            try:
                loaded = load_ahead(data)
                # Guards and missing kernels show at the first call.
                loaded(*_unmarked(arguments))
                return loaded
            except CacheError as error:
                store.refuse(name, str(error))
            # Whatever unpickling, importing and calling foreign code may raise.
            except Exception as error:
                store.refuse(name, f"{type(error).__name__}: {error!s:.300}")
            return compile_now(name, half, arguments, settings)
        return store.save(
            name,
            lambda: compile_ahead(half, arguments, settings),
            lambda: compile_now(name, half, arguments, settings),
        )

    return compile_or_load


def compile_ahead(half: Half, arguments: Sequence[Any], settings: dict[str, Any]) -> tuple[Half, bytes]:
    """Compile a half, and give it as bytes as well.

    Args:
        arguments: of a call, whose dynamic dimensions are marked.
        settings: for torch.compile.
    """
    with _settings_of_both(), tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "half"
        compiled: Any = torch.compile(half, **settings)
        function: Any = compiled.aot_compile((tuple(arguments), {}))
        function.save_compiled_function(str(file))
        return function, file.read_bytes()


def load_ahead(data: bytes) -> Half:
    """A half from its bytes, which are code: they must come from a trusted place.

    Raises:
        Exception: of any kind, where the bytes are not what :func:`compile_ahead` gives with the same torch.
    """
    with _settings_of_both():
        loaded: Half = torch.compiler.load_compiled_function(io.BytesIO(data))
        return loaded


@contextmanager
def _settings_of_both() -> Iterator[None]:
    """Settings that hold when a half is compiled and when it is loaded; releases of torch differ in which they know."""
    wanted = (
        # The header would be preprocessed by the compiler at each start, for nothing.
        (torch._inductor.config, {"cpp_cache_precompile_headers": False, "compile_threads": 1}),
        (torch._dynamo.config, {"enable_aot_compile": True}),
    )
    with ExitStack() as patched:
        for config, values in wanted:
            known = {name: value for name, value in values.items() if hasattr(config, name)}
            patched.enter_context(config.patch(known))
        yield


def _unmarked(arguments: Sequence[Any]) -> list[Any]:
    """The arguments without marks of dynamic dimensions, which the guards of a compiled half do not expect."""
    return [
        value.clone() if isinstance(value, Tensor) and hasattr(value, "_dynamo_dynamic_indices") else value
        for value in arguments
    ]
