"""Programmatic dependent launch: compiled for Hopper without a GPU, every kernel waits before it writes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bullet_graph.models.ops import RowInputs
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.sampler import SamplingState

pytest.importorskip("triton", reason="Triton is published for Linux only")

from bullet_graph.models import triton_ops
from bullet_graph.models.triton_ops import TritonOps, has_programmatic_launch, sample

ROOT = Path(__file__).resolve().parents[2]
WAIT, TRIGGER = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
# Loads before the wait: of weights and of a step's inputs; every kernel has more of them behind it.
READ_BEFORE = {
    "add_rms_norm_kernel": True,
    "silu_and_mul_kernel": False,
    "gemv_kernel": True,
    "rope_and_cache_kernel": True,
    "decode_attention_kernel": True,
    "combine_partials_kernel": True,
    "sample_kernel": True,
}
# Run where kernels are compiled, not interpreted.
COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bullet_graph.models import triton_decode_kernels, triton_kernels, triton_sample_kernel

I32, F32 = "*i32", "*fp32"
BATCH = dict(kv_indptr_ptr=I32, kv_indices_ptr=I32, last_block_tokens_ptr=I32)
PARTIALS = dict(partial_ptr=F32, partial_lse_ptr=F32)
ROTARY = dict(positions_ptr=I32, kv_slots_ptr=I32, cos_sin_ptr=F32, q_norm_ptr=None, k_norm_ptr=None, QK_NORM=False)
SAMPLED = dict(slots_ptr=I32, positions_ptr=I32, settings_ptr=I32, last_token_ptr=I32, out_ptr=I32)
SCALARS = dict(hidden_size="i32", eps="fp32", intermediate_size="i32", num_rows="i32", scale_log2="fp32",
               workers="i32", vocab_size="i32", row_stride="i32")
KERNELS = {
    triton_kernels.add_rms_norm_kernel: dict(BLOCK=1024),
    triton_kernels.silu_and_mul_kernel: dict(BLOCK=1024),
    triton_kernels.gemv_kernel: dict(bias_ptr=None, IN_FEATURES=4096, FEATURES=4, HAS_BIAS=False, BLOCK=2048),
    triton_kernels.rope_and_cache_kernel: ROTARY | dict(NUM_HEADS=32, NUM_KV_HEADS=8, HALF=64, HALF_BLOCK=64,
                                                        HEADS_BLOCK=16),
    triton_decode_kernels.decode_attention_kernel: BATCH | PARTIALS | dict(
        NUM_HEADS=32, NUM_KV_HEADS=8, HEAD_DIM=128, BLOCK_TOKENS=16, BLOCK_STRIDE=16384, TOKEN_STRIDE=1024,
        HEAD_STRIDE=128, KV_HEADS=4, Q_BLOCK=16, TILE=64, ROWS_BLOCK=64, SEQUENCE_COST=1, STAGES=3),
    triton_decode_kernels.combine_partials_kernel: BATCH | PARTIALS | dict(
        NUM_HEADS=32, HEAD_DIM=128, HEADS=1, PARTIALS=32, SEQUENCE_COST=1),
    triton_sample_kernel.sample_kernel: SAMPLED | dict(
        SETTINGS_COLUMNS=16, MASKED_COLUMN=8, MASKED_COUNT=2, BLOCK=1024),
}
found = {}
for kernel, given in KERNELS.items():
    for pdl in (False, True):
        chosen = SCALARS | given | dict(PDL=pdl)
        types = {n: chosen.get(n, "*bf16") for n in kernel.arg_names}
        constants = {n: v for n, v in types.items() if not isinstance(v, str)}
        signature = {n: "constexpr" if n in constants else t for n, t in types.items()}
        source = ASTSource(kernel, signature, {(kernel.arg_names.index(n),): v for n, v in constants.items()})
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(launch_pdl=pdl)).asm["ptx"]
        found[f"{kernel.__name__} {pdl}"] = ptx
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    compiled = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": str(ROOT),
    }
    script = tmp_path_factory.mktemp("compile") / "compile_kernels.py"
    script.write_text(COMPILE, encoding="utf-8")
    process = subprocess.run(
        [sys.executable, script], cwd=ROOT, env=compiled, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    found: dict[str, str] = json.loads(process.stdout)
    return found


@pytest.mark.parametrize("kernel", READ_BEFORE)
def test_a_kernel_waits_before_it_writes(ptx: dict[str, str], kernel: str) -> None:
    code = ptx[f"{kernel} True"]
    before, *after = code.split(WAIT)
    assert len(after) == 1
    assert "st.global" not in before
    assert "st.global" in after[0]
    assert "ld.global" in after[0]
    assert ("ld.global" in before) == READ_BEFORE[kernel]
    # Nor does a program leave before, or wait only sometimes.
    assert not re.search(r"\bret;|\bbra\b", before)
    assert (TRIGGER in before) == (kernel != "sample_kernel")


@pytest.mark.parametrize("kernel", READ_BEFORE)
def test_no_kernel_waits_unless_it_is_asked_to(ptx: dict[str, str], kernel: str) -> None:
    assert "griddepcontrol" not in ptx[f"{kernel} False"]


def test_devices_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(triton_ops.triton.knobs.runtime, "interpret", False)
    assert has_programmatic_launch(torch.device("cuda"))
    assert not has_programmatic_launch(torch.device("cpu"))
    capability = (8, 9)
    assert not has_programmatic_launch(torch.device("cuda"))
    capability = (10, 0)
    monkeypatch.setattr(triton_ops.triton.knobs.runtime, "interpret", True)
    assert not has_programmatic_launch(torch.device("cuda"))


class Launches:
    """In the place of a kernel: notes how it is launched."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    def __getitem__(self, _grid: object) -> "Launches":
        return self

    def __call__(self, *_arguments: object, PDL: bool, launch_pdl: bool, **_settings: object) -> None:
        self.seen.append((PDL, launch_pdl))


@pytest.mark.parametrize("pdl", [False, True])
def test_every_operation_launches_as_it_compiles(monkeypatch: pytest.MonkeyPatch, pdl: bool) -> None:
    launches = Launches()
    for name in READ_BEFORE:
        if hasattr(triton_ops, name):
            monkeypatch.setattr(triton_ops, name, launches)
    ops, config = TritonOps(pdl), PRESETS["tiny"]
    x, weight = torch.zeros(1, 128), torch.zeros(4, 128)
    ops.add_rms_norm(x, x, x[0], 1e-5)
    ops.linear(x, weight)
    ops.swiglu(x, weight)
    ids = torch.zeros(1, dtype=torch.int32)
    inputs = RowInputs(ids, ids, x)
    layer = SimpleNamespace(q_norm=None, k_norm=None)
    ops.rope_and_cache(torch.zeros(1, config.q_size + 2 * config.kv_size), inputs, x, x, layer, config)  # type: ignore[arg-type]
    sample(x, ids, ids, SamplingState(1, torch.device("cpu")), pdl=pdl)
    assert launches.seen == [(pdl, pdl)] * 6
