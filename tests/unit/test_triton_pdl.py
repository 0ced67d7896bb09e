"""Kernels compiled for Hopper without a GPU: those whose launches overlap wait in time, and where decode attention is
one kernel, its programs tell each other in the right order.
"""

import re

import pytest
from compiled_triton import run_compiled

pytest.importorskip("triton", reason="Triton is published for Linux only")
pytestmark = pytest.mark.timeout(180)

FIRST, SECOND = "decode_attention_kernel", "combine_partials_kernel"
WAIT, TRIGGER = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bullet_graph.kernels import decode_attention_kernels, few_rows, fp8_kernels, triton_kernels

I32, F32, FP8 = "*i32", "*fp32", "*fp8e4nv"
SIZES = dict(OUT_FEATURES=6144, IN_FEATURES=4096, GLU=0)
GIVEN = dict(  # a kernel takes those that it names
    kv_indptr_ptr=I32, block_indptr_ptr=I32, kv_indices_ptr=I32, last_block_tokens_ptr=I32,
    members_ptr=I32, prefix_ptr=F32, prefix_lse_ptr=F32, partial_ptr=F32, partial_lse_ptr=F32, arrived_ptr=I32,
    positions_ptr=I32,
    kv_slots_ptr=I32, cos_sin_ptr=F32, num_rows="i32", scale_log2="fp32", workers="i32", width="i32", hidden_size="i32",
    eps="fp32", scale_ptr=F32, x_scales_ptr=F32, scales_ptr=F32, bias_ptr=None, q_norm_ptr=None, k_norm_ptr=None,
    NUM_HEADS=32, NUM_KV_HEADS=8, HEAD_DIM=128, HALF=64, HEADS_BLOCK=16, BLOCK_TOKENS=16, Q_BLOCK=8,
    ROWS_BLOCK=64, STAGES=3, WINDOW=0, MEMBERS=1, LEAST_UNITS=16, CONTINUE=False, COMBINE=False, PARTIALS=32,
    GELU=False, GROUP=4096, BLOCK=4096, TRIGGER=False, PDL=True)
ROW = SIZES | dict(weight_ptr=FP8, BLOCK=2048, FEATURES=2, CHANNELS=1)
ROWS = SIZES | dict(BLOCK_M=16, BLOCK_N=64, BLOCK_K=256, GROUP=0, CHANNELS=1)
IN_FP8 = dict(x_ptr=FP8, weight_ptr=FP8)
QUANTIZED = dict(values_ptr=FP8, out_ptr=FP8)
ATTENTION = decode_attention_kernels.decode_attention_kernel
COMBINATION = decode_attention_kernels.combine_partials_kernel
CASES = {
    **{f"{ATTENTION.__name__} {trigger}": (ATTENTION, dict(TRIGGER=trigger)) for trigger in (False, True)},
    **{f"{COMBINATION.__name__} {pdl}": (COMBINATION, dict(PDL=pdl)) for pdl in (False, True)},
    "decode_attention_kernel alone": (ATTENTION, dict(COMBINE=True)),
    "decode_attention_kernel in FP8": (ATTENTION, dict(COMBINE=True, keys_ptr=FP8, values_ptr=FP8)),
    "decode_attention_kernel groups": (ATTENTION, dict(COMBINE=True, MEMBERS=4, Q_BLOCK=16)),
    "decode_attention_kernel goes on": (ATTENTION, dict(CONTINUE=True)),
    "one row": (few_rows.one_row_kernel, ROW),
    "rows in FP8": (fp8_kernels.matmul_kernel, ROWS | IN_FP8),
    "SwiGLU in FP8": (fp8_kernels.matmul_kernel, ROWS | IN_FP8 | dict(GLU=1)),
    "blocks in FP8": (fp8_kernels.matmul_kernel, ROWS | IN_FP8 | dict(BLOCK_K=128, GROUP=128, CHANNELS=128)),
    "few rows": (fp8_kernels.matmul_kernel, ROWS | dict(BLOCK_M=8, BLOCK_N=32, scale_ptr=None, x_scales_ptr=None)),
    "norm": (triton_kernels.add_rms_norm_kernel, {}),
    "rotation": (triton_kernels.rope_and_cache_kernel, {}),
    "quantizing norm": (fp8_kernels.add_rms_norm_quantize_kernel, QUANTIZED),
    "quantizing SwiGLU": (fp8_kernels.act_and_mul_quantize_kernel, QUANTIZED),
    "quantizing": (fp8_kernels.quantize_kernel, QUANTIZED),
}
found = {}
for name, (kernel, chosen) in CASES.items():
    types = {n: (GIVEN | chosen).get(n, "*bf16") for n in kernel.arg_names}
    constants = {n: v for n, v in types.items() if not isinstance(v, str)}
    signature = {n: "constexpr" if n in constants else t for n, t in types.items()}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(n),): v for n, v in constants.items()})
    options = {"num_warps": 1 if kernel is ATTENTION else 4}
    found[name] = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_compiled(COMPILE, tmp_path_factory.mktemp("compile"))


def test_the_first_lets_the_second_start(ptx: dict[str, str]) -> None:
    code = ptx[f"{FIRST} True"]
    assert code.count(TRIGGER) == 1
    # It is launched behind all before it, and so needs not wait.
    assert WAIT not in code


def test_the_second_waits_before_it_reads_partial_results_or_writes(ptx: dict[str, str]) -> None:
    before, after = ptx[f"{SECOND} True"].split(WAIT)
    assert "st.global" not in before
    assert "st.global" in after
    # Of the batch, which was there before the first kernel: its end, and where the row's blocks begin and end.
    assert before.count("ld.global") == 3
    assert "ld.global" in after
    # Nor does a program leave before, or wait only sometimes.
    assert not re.search(r"\bret;|\bbra\b", before)


@pytest.mark.parametrize(
    ("name", "num_loads"),  # before the wait: of a norm's weights; of place, slot, cosines and sines
    [
        *(("norm", 32), ("quantizing norm", 32), ("rotation", 4)),
        *((name, 0) for name in ("one row", "few rows", "quantizing SwiGLU", "quantizing")),
        *((f"{name} in FP8", 0) for name in ("rows", "SwiGLU", "blocks")),
    ],
)
def test_launches_between_attention_wait_for_those_before(ptx: dict[str, str], name: str, num_loads: int) -> None:
    before, after = ptx[name].split(WAIT)
    assert before.count(TRIGGER) == 1
    assert before.count("ld.global") == num_loads
    assert not re.search(r"st\.global|cp\.async|\bret;|\bbra\b", before)
    assert "st.global" in after


@pytest.mark.parametrize("kernel", [FIRST, SECOND])
def test_neither_does_so_unless_asked_to(ptx: dict[str, str], kernel: str) -> None:
    assert "griddepcontrol" not in ptx[f"{kernel} False"]


@pytest.mark.parametrize("way", ["alone", "in FP8"])
def test_one_program_adds_up_what_all_threads_of_all_programs_have_written(ptx: dict[str, str], way: str) -> None:
    before, after = re.split(r"atom\.global\.gpu\.acq_rel\.add", ptx[f"{FIRST} {way}"])
    # Of partial results the last are written before, and all threads of the program have passed a barrier since.
    assert before.rindex("bar.sync") > before.rindex("st.global")
    # All learn by another what the one thread has found, and read past the SM's own cache.
    assert "bar.sync" in after[: after.index("ld.global")]
    assert "ld.global.cg" in after
    assert "atom" not in ptx[f"{FIRST} False"]
