"""Finding and loading FlashInfer's modules, on a stand-in for its package and its loader."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fakes.flashinfer_package import FakeFlashInfer

from bullet_graph.kernels.flashinfer_attention import ModuleSpec, load_module, needed_module
from bullet_graph.kernels.gpu import Gpu

FA2 = ModuleSpec("fa2", torch.bfloat16, 128)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeFlashInfer:
    return FakeFlashInfer.install(monkeypatch, tmp_path)


def test_a_library_at_hand_is_loaded_without_flashinfer(
    flashinfer: FakeFlashInfer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "module.so"
    library.write_bytes(b"compiled")
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # who imports it, fails
    module = load_module(FA2, library)
    assert load_module(FA2) is module, "a process loads a module once"
    assert flashinfer.loaded == [library]


def test_without_one_flashinfer_compiles_it(flashinfer: FakeFlashInfer) -> None:
    module = load_module(FA2)
    assert load_module(FA2) is module
    assert flashinfer.built == ["prefill_fa2_128"]
    assert flashinfer.loaded == [flashinfer.jit / "prefill_fa2_128" / "prefill_fa2_128.so"]


def test_what_was_compiled_ahead_of_time_is_only_found(flashinfer: FakeFlashInfer) -> None:
    library = flashinfer.aot / "prefill_fa2_128" / "prefill_fa2_128.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"compiled")
    load_module(FA2)
    assert (flashinfer.built, flashinfer.loaded) == ([], [library])


def test_what_cannot_be_loaded_is_asked_for_again(flashinfer: FakeFlashInfer, tmp_path: Path) -> None:
    library = tmp_path / "module.so"
    library.write_bytes(FakeFlashInfer.BROKEN)
    with pytest.raises(RuntimeError, match="undefined symbol"):
        load_module(FA2, library)
    load_module(FA2)
    assert flashinfer.built == ["prefill_fa2_128"]


@pytest.mark.parametrize(
    ("capability", "name"),
    [((9, 0), "fa3_float16_64"), ((8, 0), "fa2_float16_64")],
)
def test_what_an_engine_needs(capability: tuple[int, int], name: str) -> None:
    assert needed_module(Gpu(132, capability), torch.float16, 64).name == name


def test_the_gpu_s_executor_imports_neither_flashinfer_nor_its_loader() -> None:
    pytest.importorskip("triton", reason="Triton is published for Linux only")
    code = "import sys; sys.modules['flashinfer'] = sys.modules['tvm_ffi'] = None; import bullet_graph.runtime.cuda"
    checkout = Path(sys.modules["bullet_graph"].__path__[0]).parent
    subprocess.run([sys.executable, "-c", code], cwd=checkout, check=True, timeout=60)
