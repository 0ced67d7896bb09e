"""Decode attention compiled for Hopper without a GPU: its second kernel, which starts while the first runs, waits in
time; and where there is one kernel, its programs tell each other in the right order.
"""

import re

import pytest
from compiled_triton import run_compiled

pytest.importorskip("triton", reason="Triton is published for Linux only")

FIRST, SECOND = "decode_attention_kernel", "combine_partials_kernel"
WAIT, TRIGGER = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bullet_graph.kernels.decode_attention_kernels import combine_partials_kernel, decode_attention_kernel

I32, F32 = "*i32", "*fp32"
SHARED = dict(kv_indptr_ptr=I32, block_indptr_ptr=I32, kv_indices_ptr=I32, last_block_tokens_ptr=I32,
              members_ptr=I32, prefix_ptr=F32, prefix_lse_ptr=F32,
              partial_ptr=F32, partial_lse_ptr=F32, arrived_ptr=I32,
              num_rows="i32", scale_log2="fp32", workers="i32", NUM_HEADS=32, HEAD_DIM=128)
KERNELS = {
    decode_attention_kernel: dict(
        NUM_KV_HEADS=8, BLOCK_TOKENS=16, KV_HEADS=4, Q_BLOCK=16, TILE=64, ROWS_BLOCK=64, STAGES=3, WINDOW=0,
        MEMBERS=1, LEAST_UNITS=16, CONTINUE=False, COMBINE=False),
    combine_partials_kernel: dict(PARTIALS=32),
}
WAYS = {"False": dict(PDL=False), "True": dict(PDL=True), "alone": dict(PDL=False, COMBINE=True),
        "groups": dict(PDL=False, COMBINE=True, MEMBERS=4, Q_BLOCK=64), "goes on": dict(PDL=False, CONTINUE=True)}
found = {}
for kernel, given in KERNELS.items():
    for way, more in WAYS.items():
        if way not in ("False", "True") and kernel is combine_partials_kernel:
            continue
        chosen = SHARED | given | more
        types = {n: chosen.get(n, "*bf16") for n in kernel.arg_names}
        constants = {n: v for n, v in types.items() if not isinstance(v, str)}
        signature = {n: "constexpr" if n in constants else t for n, t in types.items()}
        source = ASTSource(kernel, signature, {(kernel.arg_names.index(n),): v for n, v in constants.items()})
        found[f"{kernel.__name__} {way}"] = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found: dict[str, str] = run_compiled(COMPILE, tmp_path_factory.mktemp("compile"))
    return found


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


@pytest.mark.parametrize("kernel", [FIRST, SECOND])
def test_neither_does_so_unless_asked_to(ptx: dict[str, str], kernel: str) -> None:
    assert "griddepcontrol" not in ptx[f"{kernel} False"]


@pytest.mark.parametrize("way", ["alone", "groups"])
def test_one_program_adds_up_what_all_threads_of_all_programs_have_written(ptx: dict[str, str], way: str) -> None:
    before, after = re.split(r"atom\.global\.gpu\.acq_rel\.add", ptx[f"{FIRST} {way}"])
    # Of partial results the last are written before, and all threads of the program have passed a barrier since.
    assert before.rindex("bar.sync") > before.rindex("st.global")
    # All learn by another what the one thread has found, and read past the SM's own cache.
    assert "bar.sync" in after[: after.index("ld.global")]
    assert "ld.global.cg" in after
    assert "atom" not in ptx[f"{FIRST} False"] + ptx[f"{FIRST} goes on"]
