"""Decode attention's launches as a driver gets them that launches nothing: compiled, without a GPU."""

from pathlib import Path

import pytest
from compiled_triton import run_compiled

pytest.importorskip("triton", reason="Triton is published for Linux only")

SCRIPT = """
import json, sys
from types import SimpleNamespace
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
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
    once.run_into(layer, q, out)
for layer in range(3):
    lane.plan(batch).run_into(layer, q, out)
json.dump(launches, sys.stdout)
"""


def test_the_driver_gets_the_same_launches_however_the_kernel_was_found(tmp_path: Path) -> None:
    launches = run_compiled(SCRIPT, tmp_path)
    assert [name for name, *_ in launches] == ["decode_attention_kernel", "combine_partials_kernel"] * 6
    found_once, asked_each_time = launches[:6], launches[6:]
    assert found_once == asked_each_time
    # Each layer has keys and values of its own, at the places of the signature.
    keys = [launch[-1][1] for launch in found_once[::2]]
    assert len(set(keys)) == 3
