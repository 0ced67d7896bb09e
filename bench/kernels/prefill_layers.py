"""Prefill's layers without attention, as the engine runs them, with random weights of llama-3.1-8b's shapes."""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from bench.kernels.sustained import Run
from bullet_graph.kernels.ops import RowInputs
from bullet_graph.kernels.triton_ops import TritonOps
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.weights import LayerWeights

CONFIG = PRESETS["llama-3.1-8b"]
HIDDEN, INTERMEDIATE, EPS = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.rms_norm_eps
OPS = TritonOps()
LAYERS = 8
SHAPES = {  # (out_features, in_features)
    "qkv": (CONFIG.q_size + 2 * CONFIG.kv_size, HIDDEN),
    "o": (HIDDEN, CONFIG.q_size),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}
BLOCK_TOKENS = 16


def normal(*shape: int, std: float = 1.0) -> Tensor:
    """Random bfloat16 on the GPU."""
    return torch.empty(*shape, dtype=torch.bfloat16, device="cuda").normal_(std=std)


def make_layers() -> list[LayerWeights]:
    """Distinct weights for each layer, so that each product finds its own in device memory."""

    def matrix(name: str) -> Tensor:
        return normal(*SHAPES[name], std=SHAPES[name][1] ** -0.5)

    return [
        LayerWeights(
            1 + normal(HIDDEN, std=0.1),
            matrix("qkv"),
            None,
            None,
            matrix("o"),
            1 + normal(HIDDEN, std=0.1),
            matrix("gate_up"),
            matrix("down"),
        )
        for _ in range(LAYERS)
    ]


def flops_of(*names: str, rows: int) -> float:
    """Of the named products over all layers."""
    return LAYERS * rows * sum(2.0 * math.prod(SHAPES[name]) for name in names)


def weight_of(layer: LayerWeights, name: str) -> Tensor:
    """The matrix of a name in SHAPES."""
    return getattr(layer, name)


def each_layer(layers: list[LayerWeights], step: Callable[[LayerWeights], object]) -> Run:
    """A run that does ``step`` with each layer in turn."""

    def run() -> None:
        for layer in layers:
            step(layer)

    return run


class Chain:
    """Eight layers without attention (rotated queries stand for its output); rows are a multiple of BLOCK_TOKENS."""

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
        self.x, self.residual = normal(rows, HIDDEN), normal(rows, HIDDEN)

    def attention_input(self, normed: Tensor, layer: LayerWeights) -> Tensor:
        """Projected, normed rows [rows, hidden_size] to rotated queries [rows, q_size]."""
        qkv = OPS.linear(normed, layer.qkv)
        q = OPS.rope_and_cache(qkv, self.inputs, self.keys, self.values, layer.head_norms, CONFIG)
        return q.view(self.rows, CONFIG.q_size)

    def engine(self, swiglu: Callable[[Tensor, Tensor], Tensor] = OPS.swiglu) -> None:
        """As bullet_graph.models runs it, but perhaps for ``swiglu``."""
        x, residual = self.x, self.residual
        for layer in self.layers:
            normed, residual = OPS.add_rms_norm(x, residual, layer.input_norm, EPS)
            o = OPS.linear(self.attention_input(normed, layer), layer.o)
            normed, residual = OPS.add_rms_norm(o, residual, layer.post_norm, EPS)
            x = OPS.linear(swiglu(normed, layer.gate_up), layer.down)


def two_steps(x: Tensor, gate_up: Tensor) -> Tensor:
    """SwiGLU as a product and a pass over it: what the engine does with few rows."""
    return OPS.silu_and_mul(OPS.linear(x, gate_up))


def split_ns(chain: Chain) -> dict[str, float]:
    """Time of each step of the engine's layer, ns a token, by events between launches queued behind a pause."""
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
        normed, residual = OPS.add_rms_norm(x, residual, layer.input_norm, EPS)
        mark("add_rms_norm")
        qkv = OPS.linear(normed, layer.qkv)
        mark("qkv")
        q = OPS.rope_and_cache(qkv, chain.inputs, chain.keys, chain.values, layer.head_norms, CONFIG)
        mark("rope_and_cache")
        o = OPS.linear(q.view(chain.rows, CONFIG.q_size), layer.o)
        mark("o")
        normed, residual = OPS.add_rms_norm(o, residual, layer.post_norm, EPS)
        mark("add_rms_norm")
        act = OPS.swiglu(normed, layer.gate_up)
        mark("swiglu")
        x = OPS.linear(act, layer.down)
        mark("down")
    torch.cuda.synchronize()
    totals: dict[str, float] = {}
    for (_, before), (name, after) in itertools.pairwise(marks):
        if name != "start":
            totals[name] = totals.get(name, 0.0) + before.elapsed_time(after) / (2 * LAYERS)
    return {name: round(1e6 * ms / chain.rows, 2) for name, ms in totals.items()}
