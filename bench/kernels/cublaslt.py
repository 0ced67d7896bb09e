"""cublasLt's algorithms for one matrix product, called through ctypes: torch takes the heuristic's first alone."""

import ctypes
import itertools
from typing import Any

import torch
from torch import Tensor

MAX_HEURISTICS = 16
_BF16, _FP32, _COMPUTE_32F = 14, 0, 68  # cudaDataType, cublasComputeType_t
_TRANSA, _TRANSB = 3, 4  # cublasLtMatmulDescAttributes_t
_MAX_WORKSPACE_BYTES = 1  # cublasLtMatmulPreferenceAttributes_t
_SWIZZLING, _CLUSTER = 4, 8  # cublasLtMatmulAlgoConfigAttributes_t, as are the numbers below
_ALGO_FIELDS = {
    "id": 0,
    "tile": 1,
    "stages": 6,
    "split_k": 2,
    "swizzle": _SWIZZLING,
    "custom": 5,
    "cluster": _CLUSTER,
}
_CLUSTERS = {2: "1x1", 3: "2x1", 5: "1x2", 4: "4x1", 8: "1x4", 6: "2x2"}
_VARIED_HEURISTICS = 6
_NO_SUCH_ATTRIBUTE = -1


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def library_path(maps: str) -> str:
    """The cublasLt that torch has loaded.

    Args:
        maps: /proc/self/maps.

    Raises:
        RuntimeError: none is loaded.
    """
    path = next((line.split()[-1] for line in maps.splitlines() if "libcublasLt.so" in line), None)
    if path is None:
        raise RuntimeError("cublasLt is not loaded: multiply two matrices on the GPU first")
    return path


class LtProduct:
    """y[M, N] = x[M, K] @ w[N, K]^T, or w[K, N] if ``transposed``, in bfloat16, by an algorithm of choice.

    Raises:
        RuntimeError: cublasLt is not loaded, or a call of it failed.
    """

    def __init__(self, m: int, n: int, k: int, transposed: bool, workspace: Tensor) -> None:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            self._lt = ctypes.CDLL(library_path(maps.read()))
        self._workspace = workspace
        self._handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self._handle))
        desc = ctypes.c_void_p()
        self._call("cublasLtMatmulDescCreate", ctypes.byref(desc), _COMPUTE_32F, _FP32)
        for attribute, transpose in ((_TRANSA, int(not transposed)), (_TRANSB, 0)):
            # A is the weights: column-major
            value = ctypes.c_int32(transpose)
            size = ctypes.c_size_t(4)
            self._call("cublasLtMatmulDescSetAttribute", desc, attribute, ctypes.byref(value), size)
        a = self._layout(n, k, n) if transposed else self._layout(k, n, k)
        b, d = self._layout(k, m, k), self._layout(n, m, n)
        self._problem = (desc, a, b, d, d)
        self._heuristics = self._ask_heuristic()

    def _ask_heuristic(self) -> list[_Heuristic]:
        pref, workspace_bytes = ctypes.c_void_p(), ctypes.c_uint64(self._workspace.nbytes)
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(pref))
        self._call(
            "cublasLtMatmulPreferenceSetAttribute",
            pref,
            _MAX_WORKSPACE_BYTES,
            ctypes.byref(workspace_bytes),
            ctypes.c_size_t(8),
        )
        results, found = (_Heuristic * MAX_HEURISTICS)(), ctypes.c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            *self._problem,
            pref,
            MAX_HEURISTICS,
            results,
            ctypes.byref(found),
        )
        return [result for result in results[: found.value] if result.state == 0]

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._lt, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} returned status {status}")

    def _layout(self, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride)
        self._call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), _BF16, *sizes)
        return layout

    def config(self, algo: Any) -> dict[str, int]:
        """An algorithm's settings by name; -1 for one that it does not have."""
        return {name: self._get(algo, field) for name, field in _ALGO_FIELDS.items()}

    def _get(self, algo: Any, field: int) -> int:
        value, written = ctypes.c_uint32(0), ctypes.c_size_t()
        size = ctypes.c_size_t(2 if field == _CLUSTER else 4)
        target = ctypes.byref(value), size, ctypes.byref(written)
        if self._lt.cublasLtMatmulAlgoConfigGetAttribute(algo, field, *target):
            return _NO_SUCH_ATTRIBUTE
        return value.value

    def variants(self) -> list[Any]:
        """The heuristic's algorithms, then each of the first six with other clusters and swizzles."""
        algos, seen = [], set()
        wanted: list[tuple[_Heuristic, int | None, int | None]] = [(r, None, None) for r in self._heuristics]
        wanted += itertools.product(self._heuristics[:_VARIED_HEURISTICS], _CLUSTERS, (0, 1))
        for result, cluster, swizzle in wanted:
            algo = (ctypes.c_uint64 * 8)(*result.algo)
            try:
                if cluster is not None and swizzle is not None:
                    self._set(algo, _CLUSTER, ctypes.c_uint16(cluster))
                    self._set(algo, _SWIZZLING, ctypes.c_uint32(swizzle))
                checked = _Heuristic()
                self._call(
                    "cublasLtMatmulAlgoCheck", self._handle, *self._problem, algo, ctypes.byref(checked)
                )
            except RuntimeError:  # not every algorithm has every cluster
                continue
            if checked.workspace <= self._workspace.nbytes and bytes(algo) not in seen:
                seen.add(bytes(algo))
                algos.append(algo)
        return algos

    def _set(self, algo: Any, field: int, setting: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(setting))
        self._call("cublasLtMatmulAlgoConfigSetAttribute", algo, field, ctypes.byref(setting), size)

    def run(self, algo: Any, x: Tensor, w: Tensor, y: Tensor) -> None:
        """Launch on torch's current stream."""
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        desc, a, b, c, d = self._problem
        w_ptr, x_ptr, y_ptr, workspace_ptr = (
            ctypes.c_void_p(tensor.data_ptr()) for tensor in (w, x, y, self._workspace)
        )
        workspace_bytes = ctypes.c_size_t(self._workspace.nbytes)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        alpha, beta = ctypes.byref(one), ctypes.byref(zero)
        # fmt: off
        self._call(
            "cublasLtMatmul", self._handle, desc, alpha, w_ptr, a, x_ptr, b, beta, y_ptr, c, y_ptr, d,
            algo, workspace_ptr, workspace_bytes, stream,
        )
        # fmt: on
