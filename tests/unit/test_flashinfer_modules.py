"""Finding and loading FlashInfer's modules, on a stand-in for its package and its loader."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes.flashinfer_package import FakeFlashInfer
from programs import printed_by

from bullet_graph.kernels.flashinfer_attention import Backend, ModuleSpec, cached_modules, load_module
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.models.presets import PRESETS

FA2 = ModuleSpec("fa2", torch.bfloat16, 128)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeFlashInfer:
    return FakeFlashInfer.install(monkeypatch, tmp_path)


def test_without_one_flashinfer_compiles_it(flashinfer: FakeFlashInfer) -> None:
    assert load_module(FA2) is load_module(FA2)
    assert flashinfer.built == ["prefill_fa2_128"]
    assert flashinfer.loaded == [flashinfer.jit / "prefill_fa2_128" / "prefill_fa2_128.so"]


def test_a_window_has_a_module_of_its_own(flashinfer: FakeFlashInfer) -> None:
    assert load_module(replace(FA2, windowed=True)) is not load_module(FA2)
    assert flashinfer.built == ["prefill_fa2_128_swa", "prefill_fa2_128"]


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_a_cache_in_fp8_has_a_module_of_its_own(flashinfer: FakeFlashInfer, backend: Backend) -> None:
    load_module(ModuleSpec(backend, torch.bfloat16, 128, fp8_kv=True))
    assert flashinfer.built == [f"prefill_{backend}_128_fp8"]


def test_what_was_compiled_ahead_of_time_is_only_found(flashinfer: FakeFlashInfer) -> None:
    library = flashinfer.aot / "prefill_fa2_128" / "prefill_fa2_128.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"compiled")
    load_module(FA2)
    assert (flashinfer.built, flashinfer.loaded) == ([], [library])


@pytest.mark.parametrize(("capability", "backend"), [((9, 0), "fa3"), ((8, 0), "fa2")])
def test_what_an_engine_needs(capability: tuple[int, int], backend: str) -> None:
    def names(windows: tuple[int | None, ...]) -> dict[int | None, str]:
        shape = replace(PRESETS["tiny"], num_layers=4, layer_windows=windows)
        modules = cached_modules(Gpu(132, capability), torch.float16, shape)
        return {window: module.name for window, module in modules.items()}

    plain = f"{backend}_float16_64"
    assert names(()) == {None: plain}
    assert names((8, 8, 8, 8)) == {8: f"{plain}_window"}
    assert names((8, None, 16, 8)) == {8: f"{plain}_window", None: plain, 16: f"{plain}_window"}


def test_the_gpu_s_executor_imports_neither_flashinfer_nor_its_loader() -> None:
    pytest.importorskip("triton", reason="Triton is published for Linux only")
    code = "import sys; sys.modules['flashinfer'] = sys.modules['tvm_ffi'] = None; import bullet_graph.runtime.cuda"
    assert printed_by(code) == ""
