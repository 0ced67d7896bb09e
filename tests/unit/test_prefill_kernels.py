"""Candidate kernels for prefill against plain torch: in Triton's interpreter where there is no GPU."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bullet_graph.models.ops import TorchOps

pytest.importorskip("triton", reason="Triton is published for Linux only")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ERROR = 1e-2  # relative, Frobenius, as on the GPU
# The products' kernels by the tile of a test: an H200's would take the interpreter minutes.
TILE = {"BM": 16, "BK": 16, "GROUP_M": 2, "STAGES": 2, "num_warps": 4}


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """bench/ is no package."""
    path = Path(__file__).parents[2] / "bench" / "kernels" / "prefill_triton.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(5)


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    # Half and not bf16, of which Triton's interpreter multiplies the bits.
    return torch.randn(*shape, generator=generator, device=DEVICE).half()


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=torch.half, device=DEVICE)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


# Fewer rows than a tile, rows that no tile divides, and more rows of tiles than a group with an incomplete last group.
@pytest.mark.parametrize("rows", [1, 80])
@pytest.mark.parametrize("num_sms", [3])
@pytest.mark.parametrize("adds", [False, True])
def test_matmul(kernels: ModuleType, generator: torch.Generator, rows: int, num_sms: int, adds: bool) -> None:
    x, w = normal(generator, rows, 48), normal(generator, 64, 48)
    expected = x.float() @ w.float().t()
    y = poisoned(rows, 64)
    if adds:
        y = normal(generator, rows, 64)
        expected += y.float()
    kernels.matmul(x, w, y, TILE | {"BN": 32, "FLATTEN": False}, num_sms, y if adds else None)
    assert relative_error(y, expected) <= ERROR


@pytest.mark.parametrize(("rows_per_program", "grid"), [(1, None), (2, None), (1, 4), (2, 1)])
def test_add_rms_norm(
    kernels: ModuleType, generator: torch.Generator, rows_per_program: int, grid: int | None
) -> None:
    x, residual, weight = normal(generator, 6, 64), normal(generator, 6, 64), normal(generator, 64)
    normed, summed = poisoned(6, 64), poisoned(6, 64)
    kernels.add_rms_norm(x, residual, weight, 1e-5, (normed, summed), rows_per_program, 4, grid)
    expected = TorchOps.add_rms_norm(x, residual, weight, 1e-5)
    assert relative_error(normed, expected[0].float()) <= ERROR
    assert relative_error(summed, expected[1].float()) <= ERROR


def test_norm_of_what_is_added_already(kernels: ModuleType, generator: torch.Generator) -> None:
    x, weight = normal(generator, 6, 64), normal(generator, 64)
    normed, before = poisoned(6, 64), x.clone()
    kernels.add_rms_norm(x, None, weight, 1e-5, (normed, x))
    expected, _ = TorchOps.add_rms_norm(before, torch.zeros_like(before), weight, 1e-5)
    assert relative_error(normed, expected.float()) <= ERROR
    assert torch.equal(x, before)


def test_reference_swiglu(kernels: ModuleType, generator: torch.Generator) -> None:
    x, gate_up = normal(generator, 5, 48), normal(generator, 2 * 64, 48)
    expected = TorchOps.swiglu(x.float(), gate_up.float())
    torch.testing.assert_close(kernels.reference_swiglu(x, gate_up), expected)


def test_silu_and_mul(kernels: ModuleType, generator: torch.Generator) -> None:
    gate_up, out = normal(generator, 3, 128), poisoned(3, 64)
    kernels.silu_and_mul(gate_up, out, 32)
    assert relative_error(out, TorchOps.silu_and_mul(gate_up.float())) <= ERROR


def test_sizes_that_the_tiles_do_not_divide(kernels: ModuleType, generator: torch.Generator) -> None:
    rows = normal(generator, 5, 64)
    with pytest.raises(ValueError, match="multiple of 2, found 5"):
        kernels.add_rms_norm(rows, rows, rows[0], 1e-5, (rows, rows), 2)
    with pytest.raises(ValueError, match="divide the intermediate size 64, found 96"):
        kernels.silu_and_mul(normal(generator, 3, 128), poisoned(3, 64), 96)
