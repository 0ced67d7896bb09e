"""Prefill's matrix products and element-wise passes on one GPU, sustained under its power cap.

    python bench/kernels/prefill_gemm.py --output-json prefill_gemm.json

Parts: A the engine's layer today; B the algorithms of cublasLt; C Triton's products; E element-wise passes; F whole
layers out of the best of them. Each figure is a CUDA graph replayed for --seconds, the first third of it unmeasured.
Weights are those of eight distinct layers of llama-3.1-8b's shapes, random, so that each product finds its weights in
device memory.
"""

import argparse
import ctypes
import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import prefill_triton as candidates

from bullet_graph.models.ops import RowInputs
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.triton_gemm import swiglu_matmul
from bullet_graph.models.triton_ops import TritonOps
from bullet_graph.models.weights import LayerWeights
from bullet_graph.perf.energy import NvmlProbe
from bullet_graph.perf.provenance import collect_provenance

CONFIG = PRESETS["llama-3.1-8b"]
HIDDEN, INTERMEDIATE, EPS = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.rms_norm_eps
LAYERS = 8
SHAPES = {  # (out_features, in_features)
    "qkv": (CONFIG.q_size + 2 * CONFIG.kv_size, HIDDEN),
    "o": (HIDDEN, CONFIG.q_size),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}
MAX_ERROR = 1e-2
BLOCK_TOKENS = 16

Run = Callable[[], object]


def normal(*shape: int, std: float = 1.0) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="cuda").normal_(std=std)


def make_layers() -> list[LayerWeights]:
    def matrix(name: str) -> Tensor:
        return normal(*SHAPES[name], std=SHAPES[name][1] ** -0.5)

    return [
        LayerWeights(
            1 + normal(HIDDEN, std=0.1),
            matrix("qkv"),
            None,
            None,
            None,
            matrix("o"),
            1 + normal(HIDDEN, std=0.1),
            matrix("gate_up"),
            matrix("down"),
        )
        for _ in range(LAYERS)
    ]


def relative_error(out: Tensor, reference: Tensor) -> float:
    return float((out.float() - reference).norm() / reference.norm())


class Lab:
    """Measures runs and keeps their rows, until the time is spent."""

    def __init__(self, seconds: float, budget_s: float) -> None:
        self.seconds, self.end = seconds, time.perf_counter() + budget_s
        probe = NvmlProbe.open(str(torch.cuda.get_device_properties(0).uuid))
        if probe is None:
            raise SystemExit("NVML is required to read the GPU's energy counter: install nvidia-ml-py")
        self.probe = probe
        self.rows: list[dict[str, Any]] = []
        self.num_sms = torch.cuda.get_device_properties(0).multi_processor_count

    def note(self, **row: Any) -> None:
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def check(self, part: str, name: str, out: Tensor, run: Run, reference: Tensor) -> bool:
        """Run into a poisoned output and compare; notes what failed."""
        out.fill_(torch.nan)
        try:
            run()
            torch.cuda.synchronize()
        except Exception as error:  # one candidate that fails must not lose the others' figures
            self.note(part=part, name=name, failed=repr(error)[:300])
            return False
        error_size = relative_error(out, reference)
        if not error_size <= MAX_ERROR:
            self.note(part=part, name=name, failed=f"relative error {error_size:.3g}")
        return error_size <= MAX_ERROR

    def measure(
        self, part: str, name: str, rows: int, run: Run, flops: float, layers: float, seconds: float = 0.0
    ) -> float:
        """Sustained figures of a run of ``layers`` layers' work over ``rows`` rows; returns ms a run, inf if none."""
        if time.perf_counter() > self.end:
            self.note(part=part, name=name, rows=rows, skipped="out of time")
            return math.inf
        try:
            run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            ms, watts, mhz = self._sustain(graph.replay, seconds or self.seconds)
        except Exception as error:  # as above
            self.note(part=part, name=name, rows=rows, failed=repr(error)[:300])
            return math.inf
        self.note(
            part=part,
            name=name,
            rows=rows,
            us_per_layer=round(1e3 * ms / layers, 1),
            ns_per_token_layer=round(1e6 * ms / layers / rows, 2),
            tflops=round(flops / ms / 1e9, 1),
            watts=round(watts),
            mhz=round(mhz),
            mj_per_token_layer=round(watts * ms / layers / rows, 4),
        )
        return ms

    def _sustain(self, replay: Run, seconds: float) -> tuple[float, float, float]:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        replay()
        torch.cuda.synchronize()
        batch = max(1, round(0.03 / (time.perf_counter() - begin)))
        fences: list[torch.cuda.Event] = []
        samples: list[tuple[float, float, float]] = []
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds:
            for _ in range(batch):
                replay()
            fences.append(torch.cuda.Event(enable_timing=True))
            fences[-1].record()
            if len(fences) > 2:
                fences[-3].synchronize()
            clock = self.probe.sample().sm_clock_mhz or 0
            samples.append((time.perf_counter() - begin, self.probe.total_energy_mj() or 0, clock))
        torch.cuda.synchronize()
        first = next(i for i, s in enumerate(samples) if s[0] >= seconds / 3 or i == max(0, len(samples) - 4))
        ms = fences[first].elapsed_time(fences[-1]) / (batch * (len(fences) - 1 - first))
        times, energies, clocks = np.array(samples[first:]).T
        return ms, float(np.polyfit(times, energies, 1)[0]) / 1e3, float(clocks.mean())


def flops_of(*names: str, rows: int) -> float:
    return LAYERS * rows * sum(2.0 * math.prod(SHAPES[name]) for name in names)


def weight_of(layer: LayerWeights, name: str) -> Tensor:
    return getattr(layer, name)


def each_layer(layers: list[LayerWeights], step: Callable[[LayerWeights], object]) -> Run:
    def run() -> None:
        for layer in layers:
            step(layer)

    return run


# --- Whole layers: A and F -------------------------------------------------------------------------------------------


class Chain:
    """Eight layers without attention (rotated queries stand for its output), in one of several ways."""

    def __init__(self, layers: list[LayerWeights], rows: int) -> None:
        self.layers, self.rows = layers, rows
        blocks = rows // BLOCK_TOKENS
        self.inputs = RowInputs(
            torch.arange(rows, dtype=torch.int32, device="cuda"),
            torch.randperm(rows, device="cuda").int(),
            torch.randn(rows, CONFIG.head_dim, device="cuda"),
        )
        shape = (blocks, BLOCK_TOKENS, CONFIG.num_kv_heads, CONFIG.head_dim)
        self.keys, self.values = normal(*shape), normal(*shape)
        self.start = normal(rows, HIDDEN)
        self.x, self.residual = normal(rows, HIDDEN), normal(rows, HIDDEN)
        self.normed, self.act = normal(rows, HIDDEN), normal(rows, INTERMEDIATE)

    def attention_input(self, normed: Tensor, layer: LayerWeights) -> Tensor:
        qkv = TritonOps.linear(normed, layer.qkv)
        q = TritonOps.rope_and_cache(qkv, self.inputs, self.keys, self.values, layer, CONFIG)
        return q.view(self.rows, CONFIG.q_size)

    def engine(self, swiglu: Callable[[Tensor, Tensor], Tensor] = TritonOps.swiglu) -> None:
        """As bullet_graph.models runs it, but perhaps for ``swiglu``."""
        x, residual = self.x, self.residual
        for layer in self.layers:
            normed, residual = TritonOps.add_rms_norm(x, residual, layer.input_norm, EPS)
            o = TritonOps.linear(self.attention_input(normed, layer), layer.o)
            normed, residual = TritonOps.add_rms_norm(o, residual, layer.post_norm, EPS)
            x = TritonOps.linear(swiglu(normed, layer.gate_up), layer.down)

    def fused(
        self, swiglu: Callable[[Tensor, Tensor, Tensor], object] | None, add: Callable[..., object]
    ) -> None:
        """The products add to the residual in place; ``swiglu`` fuses the gate and up projections, or None."""
        hidden = self.start.clone()
        for layer in self.layers:
            self.norm(hidden, layer.input_norm)
            add(hidden, self.attention_input(self.normed, layer), layer.o)
            self.norm(hidden, layer.post_norm)
            if swiglu is None:
                candidates.silu_and_mul(TritonOps.linear(self.normed, layer.gate_up), self.act)
            else:
                swiglu(self.normed, layer.gate_up, self.act)
            add(hidden, self.act, layer.down)

    def norm(self, hidden: Tensor, weight: Tensor) -> None:
        candidates.add_rms_norm(hidden, None, weight, EPS, (self.normed, hidden), num_warps=8)


def two_steps(x: Tensor, gate_up: Tensor) -> Tensor:
    return TritonOps.silu_and_mul(TritonOps.linear(x, gate_up))


def addmm(hidden: Tensor, x: Tensor, w: Tensor) -> None:
    hidden.addmm_(x, w.t())


def part_a(lab: Lab, layers: list[LayerWeights], rows_list: list[int]) -> None:
    for rows in rows_list:
        chain = Chain(layers, rows)
        flops = flops_of(*SHAPES, rows=rows)
        inputs = {name: normal(rows, k) for name, (_, k) in SHAPES.items()}
        outs = {name: normal(rows, n) for name, (n, _) in SHAPES.items()}

        def products(layer: LayerWeights, inputs: dict = inputs, outs: dict = outs) -> None:
            for name in SHAPES:
                torch.mm(inputs[name], weight_of(layer, name).t(), out=outs[name])

        lab.measure("A", "engine layer", rows, chain.engine, flops, LAYERS)
        lab.measure("A", "products alone", rows, each_layer(layers, products), flops, LAYERS)
        split(lab, chain)


def split(lab: Lab, chain: Chain) -> None:
    """Time of each step of the engine's layer, by events between launches queued behind a pause."""
    marks: list[tuple[str, torch.cuda.Event]] = []

    def mark(name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append((name, event))

    torch.cuda.synchronize()
    torch.cuda._sleep(60_000_000)
    x, residual = chain.x, chain.residual
    for _, layer in itertools.product(range(2), chain.layers):
        mark("start")
        normed, residual = TritonOps.add_rms_norm(x, residual, layer.input_norm, EPS)
        mark("add_rms_norm")
        qkv = TritonOps.linear(normed, layer.qkv)
        mark("qkv")
        q = TritonOps.rope_and_cache(qkv, chain.inputs, chain.keys, chain.values, layer, CONFIG)
        mark("rope_and_cache")
        o = TritonOps.linear(q.view(chain.rows, CONFIG.q_size), layer.o)
        mark("o")
        normed, residual = TritonOps.add_rms_norm(o, residual, layer.post_norm, EPS)
        mark("add_rms_norm")
        act = TritonOps.swiglu(normed, layer.gate_up)
        mark("swiglu")
        x = TritonOps.linear(act, layer.down)
        mark("down")
    torch.cuda.synchronize()
    totals: dict[str, float] = {}
    for (_, before), (name, after) in itertools.pairwise(marks):
        if name != "start":
            totals[name] = totals.get(name, 0.0) + before.elapsed_time(after) / (2 * LAYERS)
    ns = {name: round(1e6 * ms / chain.rows, 2) for name, ms in totals.items()}
    lab.note(part="A", name="split, ns a token-layer", rows=chain.rows, **ns)


def part_f(lab: Lab, layers: list[LayerWeights], rows_list: list[int]) -> None:

    def triton_add(hidden: Tensor, x: Tensor, w: Tensor) -> None:
        candidates.matmul(x, w, hidden, candidates.MATMULS["s4"], lab.num_sms, hidden)

    for rows in rows_list:
        chain, flops = Chain(layers, rows), flops_of(*SHAPES, rows=rows)
        variants: dict[str, Run] = {
            "engine": chain.engine,
            "engine, SwiGLU in two steps": partial(chain.engine, two_steps),
            "engine, SwiGLU fused": partial(chain.engine, swiglu_matmul),
            "addmm": partial(chain.fused, None, addmm),
            "addmm, Triton SwiGLU": partial(chain.fused, swiglu_matmul, addmm),
            "Triton add and SwiGLU": partial(chain.fused, swiglu_matmul, triton_add),
            "engine again": chain.engine,
        }
        for name, run in variants.items():
            lab.measure("F", name, rows, run, flops, LAYERS)


# --- B: cublasLt -----------------------------------------------------------------------------------------------------

BF16, FP32, COMPUTE_32F = 14, 0, 68  # cudaDataType, cublasComputeType_t
ID, TILE, SPLIT_K, SWIZZLING, CUSTOM, STAGES, CLUSTER = (
    0,
    1,
    2,
    4,
    5,
    6,
    8,
)  # cublasLtMatmulAlgoConfigAttributes_t
ALGO_FIELDS = {
    "id": ID,
    "tile": TILE,
    "stages": STAGES,
    "split_k": SPLIT_K,
    "swizzle": SWIZZLING,
    "custom": CUSTOM,
}
CLUSTERS = {2: "1x1", 3: "2x1", 5: "1x2", 4: "4x1", 8: "1x4", 6: "2x2"}


class Heuristic(ctypes.Structure):
    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class LtProduct:
    """y[M, N] = x[M, K] @ w[N, K]^T, or w[K, N] if ``transposed``, by an algorithm of choice."""

    def __init__(self, m: int, n: int, k: int, transposed: bool, workspace: Tensor) -> None:
        with open("/proc/self/maps") as maps:
            path = next(line.split()[-1] for line in maps if "libcublasLt.so" in line)
        self.lt, self.workspace = ctypes.CDLL(path), workspace
        self.handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self.handle))
        desc, pref = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cublasLtMatmulDescCreate", ctypes.byref(desc), COMPUTE_32F, FP32)
        for attribute, transpose in ((3, int(not transposed)), (4, 0)):  # A is the weights: column-major
            value = ctypes.c_int32(transpose)
            self._call(
                "cublasLtMatmulDescSetAttribute", desc, attribute, ctypes.byref(value), ctypes.c_size_t(4)
            )
        a = self._layout(n, k, n) if transposed else self._layout(k, n, k)
        b, d = self._layout(k, m, k), self._layout(n, m, n)
        self.problem = (desc, a, b, d, d)
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(pref))
        size = ctypes.c_uint64(workspace.nbytes)
        self._call("cublasLtMatmulPreferenceSetAttribute", pref, 1, ctypes.byref(size), ctypes.c_size_t(8))
        results, found = (Heuristic * 16)(), ctypes.c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            self.handle,
            *self.problem,
            pref,
            16,
            results,
            ctypes.byref(found),
        )
        self.heuristics = [r for r in results[: found.value] if r.state == 0]

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self.lt, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} returned status {status}")

    def _layout(self, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride)
        self._call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), BF16, *sizes)
        return layout

    def config(self, algo: Any) -> dict[str, int]:
        return {name: self._get(algo, field) for name, field in ALGO_FIELDS.items()} | {
            "cluster": self._get(algo, CLUSTER)
        }

    def _get(self, algo: Any, field: int) -> int:
        """-1 for an attribute that the algorithm does not have."""
        value, written = ctypes.c_uint32(0), ctypes.c_size_t()
        size = ctypes.c_size_t(2 if field == CLUSTER else 4)
        target = ctypes.byref(value), size, ctypes.byref(written)
        if self.lt.cublasLtMatmulAlgoConfigGetAttribute(algo, field, *target):
            return -1
        return value.value

    def variants(self) -> list[Any]:
        """The heuristic's algorithms, then each of the first six with other clusters and swizzles."""
        algos, seen = [], set()
        wanted = [(r, None, None) for r in self.heuristics]
        wanted += list(itertools.product(self.heuristics[:6], CLUSTERS, (0, 1)))
        for result, cluster, swizzle in wanted:
            algo = (ctypes.c_uint64 * 8)(*result.algo)
            try:
                for field, value, kind in (
                    (CLUSTER, cluster, ctypes.c_uint16),
                    (SWIZZLING, swizzle, ctypes.c_uint32),
                ):
                    if value is not None:
                        setting = kind(value)
                        size = ctypes.c_size_t(ctypes.sizeof(setting))
                        self._call(
                            "cublasLtMatmulAlgoConfigSetAttribute", algo, field, ctypes.byref(setting), size
                        )
                checked = Heuristic()
                self._call("cublasLtMatmulAlgoCheck", self.handle, *self.problem, algo, ctypes.byref(checked))
            except RuntimeError:
                continue
            if checked.workspace <= self.workspace.nbytes and bytes(algo) not in seen:
                seen.add(bytes(algo))
                algos.append(algo)
        return algos

    def run(self, algo: Any, x: Tensor, w: Tensor, y: Tensor) -> None:
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        desc, a, b, c, d = self.problem
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (w, x, y, self.workspace)]
        self._call(
            "cublasLtMatmul",
            self.handle,
            desc,
            ctypes.byref(one),
            pointers[0],
            a,
            pointers[1],
            b,
            ctypes.byref(zero),
            pointers[2],
            c,
            pointers[2],
            d,
            algo,
            pointers[3],
            ctypes.c_size_t(self.workspace.nbytes),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )


def burst_ms(run: Run) -> float:
    """Time of a run by itself, of three; the GPU is too briefly at work for the power cap."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    run()
    for event in events[:-1]:
        event.record()
        run()
    events[-1].record()
    torch.cuda.synchronize()
    return min(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def part_b(lab: Lab, layers: list[LayerWeights], rows_list: list[int], kept: int) -> None:
    workspace = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    for rows, (name, (n, k)) in itertools.product(rows_list, SHAPES.items()):
        x, y = normal(rows, k), normal(rows, n)
        flops = flops_of(name, rows=rows)
        weights = [weight_of(layer, name) for layer in layers]

        def default(weights: list = weights, x: Tensor = x, y: Tensor = y) -> None:
            for w in weights:
                torch.mm(x, w.t(), out=y)

        lab.measure("B", f"{name} torch", rows, default, flops, LAYERS)
        for transposed in (False, True):
            product = LtProduct(rows, n, k, transposed, workspace)
            stored = [w.t().contiguous() for w in weights] if transposed else weights
            reference = x.float() @ weights[0].float().t()
            screened = []
            for algo in product.variants()[: 16 if transposed else None]:
                run_one = partial(product.run, algo, x, stored[0], y)
                if lab.check("B", f"{name} {product.config(algo)}", y, run_one, reference):
                    screened.append((burst_ms(run_one), bytes(algo), algo))
            screened.sort(key=lambda entry: entry[:2])
            # Of one tile and cluster only the fastest: what saves energy is what is kept near the units.
            best: dict[tuple[int, int], tuple[float, Any]] = {}
            for ms, _, algo in screened:
                config = product.config(algo)
                best.setdefault((config["tile"], config["cluster"]), (ms, algo))
            for ms, algo in list(best.values())[: 1 if transposed else kept]:
                label = " ".join(f"{key}={value}" for key, value in product.config(algo).items())
                label = (
                    f"{name}{' w[K,N]' if transposed else ''} {label} burst={2e-9 * rows * n * k / ms:.0f}T"
                )

                def chosen(algo: Any = algo, product: LtProduct = product, stored: list = stored) -> None:
                    for w in stored:
                        product.run(algo, x, w, y)  # noqa: B023 - used in this round only

                lab.measure("B", label, rows, chosen, flops, LAYERS)


# --- C: products of our own -------------------------------------------------------------------------------------------

Product = Callable[[Tensor, Tensor, Tensor], object]  # of x, w, y


def part_c(lab: Lab, layers: list[LayerWeights], rows_list: list[int]) -> None:
    plain: dict[str, Product] = {
        f"Triton {label}": partial(candidates.matmul, config=config, num_sms=lab.num_sms)
        for label, config in candidates.MATMULS.items()
    }
    swiglu: dict[str, Product] = {
        f"Triton {label}": partial(swiglu_matmul, tiling=tiling)
        for label, tiling in candidates.SWIGLUS.items()
    }

    def triton_add(x: Tensor, w: Tensor, y: Tensor) -> None:
        candidates.matmul(x, w, y, candidates.MATMULS["s4"], lab.num_sms, y)

    def torch_add(x: Tensor, w: Tensor, y: Tensor) -> None:
        addmm(y, x, w)

    products(lab, layers, rows_list, plain, {"addmm": torch_add, "Triton s4": triton_add}, swiglu)


def products(
    lab: Lab,
    layers: list[LayerWeights],
    rows_list: list[int],
    plain: dict[str, Product],
    adding: dict[str, Product],
    swiglu: dict[str, Product],
) -> None:
    """Every product of a layer in each way: ``adding`` to what y holds for o and down, ``swiglu`` for gate_up."""
    for rows, (name, (n, k)) in itertools.product(rows_list, SHAPES.items()):
        fused = name == "gate_up"
        x, y, w = normal(rows, k), normal(rows, n // 2 if fused else n), weight_of(layers[0], name)
        flops, odd = flops_of(name, rows=rows), x[: rows - 24]  # a number of rows that no tile divides
        expected = candidates.reference_swiglu(odd, w) if fused else odd.float() @ w.float().t()
        added = normal(*expected.shape)
        ways = [(way, f"{name} {label}", None) for label, way in (swiglu if fused else plain).items()]
        if name in ("o", "down"):
            ways += [(way, f"{name} + residual {label}", added) for label, way in adding.items()]
        lab.measure("C", f"{name} torch", rows, partial(torch_products, layers, name, x), flops, LAYERS)
        for way, label, start in ways:
            out = torch.empty_like(added)
            once = partial(checked_once, way, odd, w, out, start)
            wanted = expected if start is None else expected + start.float()
            if lab.check("C", label, out, once, wanted):
                lab.measure("C", label, rows, partial(way_products, way, layers, name, x, y), flops, LAYERS)


def torch_products(layers: list[LayerWeights], name: str, x: Tensor) -> None:
    for layer in layers:
        (two_steps if name == "gate_up" else TritonOps.linear)(x, weight_of(layer, name))


def way_products(way: Product, layers: list[LayerWeights], name: str, x: Tensor, y: Tensor) -> None:
    for layer in layers:
        way(x, weight_of(layer, name), y)


def checked_once(way: Product, x: Tensor, w: Tensor, out: Tensor, start: Tensor | None) -> None:
    if start is not None:
        out.copy_(start)
    way(x, w, out)


# --- E: element-wise passes ------------------------------------------------------------------------------------------


NORMS = (
    # rows a program, warps, programs an SM (0: as many as there are rows)
    (1, 8, 0),
    (1, 4, 0),
    (2, 8, 0),
    (1, 8, 8),
    (2, 16, 2),
)
SILUS = ((2048, 8), (2048, 4), (1024, 4), (512, 2))  # block, warps


def part_e(lab: Lab, rows_list: list[int]) -> None:
    for rows in rows_list:
        copies = max(
            2, (400 << 20) // (rows * HIDDEN * 2 * 4)
        )  # so that each pass finds its rows in device memory
        norms(lab, [tuple(normal(rows, HIDDEN) for _ in range(4)) for _ in range(copies)])
        silus(lab, [normal(rows, 2 * INTERMEDIATE) for _ in range(max(2, copies // 6))])


def norms(lab: Lab, sets: list[tuple[Tensor, ...]]) -> None:
    """Each set is x, residual, normed, summed."""
    x, residual, normed, _ = sets[0]
    weight = 1 + normal(HIDDEN, std=0.1)
    wide = (x.float() + residual.float()).bfloat16().float()
    expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()

    def variant(rows_per: int, warps: int, programs: int, x: Tensor, r: Tensor, n: Tensor, s: Tensor) -> None:
        candidates.add_rms_norm(x, r, weight, EPS, (n, s), rows_per, warps, programs * lab.num_sms or None)

    def one_pass() -> None:
        for x, _, n, s in sets:
            candidates.add_rms_norm(x, None, weight, EPS, (n, s))

    def engine() -> None:
        for x, r, _, _ in sets:
            TritonOps.add_rms_norm(x, r, weight, EPS)

    def copy() -> None:
        for x, _, n, _ in sets:
            n.copy_(x)

    row_bytes = HIDDEN * 2
    elementwise(lab, "copy", len(x), copy, len(sets), 2 * row_bytes)
    elementwise(lab, "norm engine", len(x), engine, len(sets), 4 * row_bytes)
    elementwise(lab, "norm without add", len(x), one_pass, len(sets), 2 * row_bytes)
    for settings in NORMS:
        name = "norm rows={} warps={} programs an SM={}".format(*settings)
        if lab.check("E", name, normed, partial(variant, *settings, *sets[0]), expected):
            elementwise(
                lab,
                name,
                len(x),
                partial(repeat, partial(variant, *settings), sets),
                len(sets),
                4 * row_bytes,
            )


def silus(lab: Lab, gate_ups: list[Tensor]) -> None:
    rows = len(gate_ups[0])
    out = normal(rows, INTERMEDIATE)
    gate, up = gate_ups[0].float().chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    row_bytes, sets = 3 * INTERMEDIATE * 2, [(g,) for g in gate_ups]
    engine = partial(repeat, TritonOps.silu_and_mul, sets)
    elementwise(lab, "silu engine", rows, engine, len(sets), row_bytes)
    for block, warps in SILUS:
        name = f"silu block={block} warps={warps}"
        function = partial(candidates.silu_and_mul, out=out, block=block, num_warps=warps)
        if lab.check("E", name, out, partial(function, gate_ups[0]), expected):
            elementwise(lab, name, rows, partial(repeat, function, sets), len(sets), row_bytes)


def repeat(function: Callable[..., object], sets: list[tuple[Tensor, ...]]) -> None:
    for arguments in sets:
        function(*arguments)


def elementwise(lab: Lab, name: str, rows: int, run: Run, passes: int, row_bytes: int) -> None:
    ms = lab.measure("E", name, rows, run, 0.0, passes, lab.seconds / 2)
    if ms < math.inf:
        lab.rows[-1]["gb_per_s"] = round(row_bytes * rows * passes / ms / 1e6)


def table(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'':2} {'rows':>5} {'ns/tok-layer':>12} {'TFLOP/s':>8} {'GB/s':>6} {'W':>4} {'MHz':>5} {'mJ/tok-layer':>12}"
    )
    for r in rows:
        if "tflops" in r:
            print(
                f"{r['part']:2} {r['rows']:5} {r['ns_per_token_layer']:12.2f} {r['tflops']:8.1f} "
                f"{r.get('gb_per_s', ''):>6} {r['watts']:4} {r['mhz']:5} {r['mj_per_token_layer']:12.4f} {r['name']}"
            )
        else:
            print(*(f"{value}" if key in ("part", "name") else f"{key}={value}" for key, value in r.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="A,B,C,E,F", help="parts, with commas between")
    parser.add_argument("--seconds", type=float, default=0.9, help="a figure")
    parser.add_argument("--budget-s", type=float, default=135.0, help="no new figure is begun after this")
    parser.add_argument("--rows", default="512,1024,2048,4096,8192", help="of part A")
    parser.add_argument("--product-rows", default="2048", help="of parts B and C")
    parser.add_argument("--chain-rows", default="1024,2048", help="of part F")
    parser.add_argument("--algos", type=int, default=4, help="of part B that are measured, a product")
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    only = set(args.only.split(","))

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    torch.manual_seed(int(time.time()))
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    lab = Lab(args.seconds, args.budget_s)
    layers = make_layers()
    lab.measure("A", "warm-up", 2048, Chain(layers, 2048).engine, flops_of(*SHAPES, rows=2048), LAYERS, 2.0)
    product_rows = numbers(args.product_rows)
    parts: dict[str, Run] = {
        "A": partial(part_a, lab, layers, numbers(args.rows)),
        "C": partial(part_c, lab, layers, product_rows),
        "F": partial(part_f, lab, layers, numbers(args.chain_rows)),
        "B": partial(part_b, lab, layers, product_rows, args.algos),
        "E": partial(part_e, lab, [2048, 8192]),
    }
    try:
        for name, part in parts.items():
            if name not in only:
                continue
            try:
                part()
            except RuntimeError as error:  # a part that fails must not lose the others' figures
                lab.note(part=name, name="part", failed=repr(error)[:300])
    finally:
        table(lab.rows)
        if args.output_json:
            report = {"rows": lab.rows, "provenance": dataclasses.asdict(collect_provenance("cuda"))}
            args.output_json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
