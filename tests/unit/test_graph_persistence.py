"""The experiment on keeping CUDA graphs, as far as it goes without a GPU: its values, its arithmetic, its processes."""

import dataclasses
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is published for Linux only")

from bench.graph_persistence.__main__ import ROOT as PACKAGE_ROOT
from bench.graph_persistence.__main__ import child, plan
from bench.graph_persistence.allocations import Allocation, AllocationTable, pointers, relocate, words
from bench.graph_persistence.arena import ALIGNMENT, Arena
from bench.graph_persistence.images import ImageStore, triton_cubins
from bench.graph_persistence.job import Job
from bench.graph_persistence.report import GRAPHS, PIECES, address_summary, savings, table
from bench.graph_persistence.saved import (
    SavedEdge,
    SavedEmpty,
    SavedFunction,
    SavedGraph,
    SavedKernel,
    SavedMemcpy,
    SavedMemset,
    SavedNode,
    match_functions,
)
from bench.graph_persistence.step_log import StepLog
from bench.graph_persistence.template import find_period, template_fit
from bullet_graph.errors import CacheError

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS, SCRATCH = 0x2F00_0000_0000, 0x2F00_4000_0000
TABLE = AllocationTable(
    [Allocation(SCRATCH, 1 << 20, "scratch.0"), Allocation(WEIGHTS, 1 << 20, "weights.0.qkv")]
)
FUNCTION = SavedFunction("_Z4normPf", "ab" * 32, ((0, 8), (8, 8), (16, 4)), ((4, 32), (8, 49152)))


def kernel(*values: int, tail: int = 7, **fields: Any) -> SavedKernel:
    """A node whose parameters are these words and one int."""
    arguments = struct.pack(f"<{len(values)}Qi", *values, tail)
    return SavedKernel(
        **({"function": 0, "grid": (4, 1, 1), "block": (128, 1, 1), "shared_bytes": 0} | fields),
        arguments=arguments,
    )


def graph(*nodes: SavedNode, edges: tuple[SavedEdge, ...] = (), functions: int = 1) -> SavedGraph:
    return SavedGraph(
        tuple(dataclasses.replace(FUNCTION, name=f"f{i}") for i in range(functions)), nodes, edges
    )


WHOLE = graph(
    kernel(WEIGHTS, SCRATCH + 512, attributes=((4, bytes(range(64))), (8, bytes(64)))),
    SavedMemset(SCRATCH + 16, 4, 0, 8, 1, 0),
    SavedMemcpy(struct.pack("<25Q", *range(25))),
    SavedEmpty(),
    edges=(SavedEdge(0, 1), SavedEdge(1, 2, 1, 0, 1), SavedEdge(2, 3)),
)


def test_a_graph_survives_the_file() -> None:
    assert SavedGraph.from_json(WHOLE.to_json()) == WHOLE


uint64 = st.integers(0, 2**64 - 1)


@given(
    arguments=st.binary(max_size=64),
    attributes=st.lists(st.tuples(st.integers(1, 14), st.binary(min_size=64, max_size=64)), max_size=3),
    grid=st.tuples(*[st.integers(1, 2**31 - 1)] * 3),
    destination=uint64,
)
def test_any_node_survives_the_file(
    arguments: bytes, attributes: list[tuple[int, bytes]], grid: tuple[int, int, int], destination: int
) -> None:
    nodes = (
        SavedKernel(0, grid, (1, 1, 1), 5, arguments, tuple(attributes)),
        SavedMemset(destination, 1, 2, 3, 4, 5),
    )
    assert SavedGraph.from_json(graph(*nodes).to_json()) == graph(*nodes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 2}',
        WHOLE.to_json().replace('"kind":"empty"', '"kind":"host"'),
        WHOLE.to_json().replace('"grid"', '"grit"'),
        WHOLE.to_json().replace('"function":0', '"function":1'),
        WHOLE.to_json().replace("[2,3,0,0,0]", "[2,4,0,0,0]"),
    ],
)
def test_what_is_no_saved_graph(text: str) -> None:
    with pytest.raises(CacheError, match="save it again"):
        SavedGraph.from_json(text)


def test_words_are_little_endian_and_aligned() -> None:
    assert words(struct.pack("<QQi", 1, 2**63, 9)) == [1, 2**63]


def test_pointers_are_found_by_value() -> None:
    assert [one.name for one in pointers(WHOLE.nodes[0], TABLE)] == ["weights.0.qkv", "scratch.0"]
    assert [one.name for one in pointers(WHOLE.nodes[1], TABLE)] == ["scratch.0"]
    assert pointers(WHOLE.nodes[2], TABLE) == pointers(WHOLE.nodes[3], TABLE) == []


@pytest.mark.parametrize(
    ("address", "name"),
    [
        (WEIGHTS - 1, None),
        (WEIGHTS, "weights.0.qkv"),
        (WEIGHTS + (1 << 20) - 1, "weights.0.qkv"),
        (WEIGHTS + (1 << 20), None),
    ],
)
def test_an_allocation_ends_before_its_end(address: int, name: str | None) -> None:
    found = TABLE.find(address)
    assert (found and found.name) == name


def test_allocations_must_not_overlap() -> None:
    with pytest.raises(CacheError, match="overlap"):
        AllocationTable([Allocation(0, 16, "a"), Allocation(15, 16, "b")])


def test_relocation_moves_pointers_and_nothing_else() -> None:
    moved = relocate(WHOLE, TABLE, {"weights.0.qkv": 0x1000, "scratch.0": 0x7000_0000})
    first, memset, memcpy, empty = moved.nodes
    assert first == dataclasses.replace(kernel(0x1000, 0x7000_0200), attributes=WHOLE.kernels()[0].attributes)
    assert memset == dataclasses.replace(WHOLE.nodes[1], destination=0x7000_0010)
    assert (memcpy, empty, moved.edges, moved.functions) == (*WHOLE.nodes[2:], WHOLE.edges, WHOLE.functions)


@given(
    values=st.lists(st.sampled_from([0, 5, WEIGHTS, WEIGHTS + 77, SCRATCH + 8]), max_size=6),
    tail=st.integers(-9, 9),
)
def test_relocation_there_and_back(values: list[int], tail: int) -> None:
    there = {"weights.0.qkv": 1 << 50, "scratch.0": 1 << 51}
    back = AllocationTable(
        [Allocation(there[one.name], one.num_bytes, one.name) for one in TABLE.allocations]
    )
    home = {one.name: one.address for one in TABLE.allocations}
    saved = graph(kernel(*values, tail=tail))
    assert relocate(relocate(saved, TABLE, there), back, home) == saved


def test_relocation_needs_every_allocation() -> None:
    with pytest.raises(CacheError, match=r"weights\.0\.qkv"):
        relocate(WHOLE, TABLE, {"scratch.0": 0})


def test_functions_match_by_name_layout_and_code() -> None:
    other_layout = dataclasses.replace(FUNCTION, layout=((0, 8),))
    other_code = dataclasses.replace(FUNCTION, attributes=((4, 40), (8, 49152)))
    other_setting = dataclasses.replace(FUNCTION, attributes=((4, 32), (8, 0)), image="")
    available = [(other_layout, 1), (other_code, 2), (other_setting, 3)]
    missing = dataclasses.replace(FUNCTION, name="elsewhere")
    assert match_functions([FUNCTION, missing, other_code], available) == [3, None, 2]


def test_functions_that_cannot_be_told_apart_do_not_match() -> None:
    assert match_functions([FUNCTION], [(FUNCTION, 1), (FUNCTION, 2)]) == [None]


@pytest.mark.parametrize(
    ("sequence", "repeats", "found"),
    [
        ("xabcabcabcy", 3, (1, 3)),
        ("xabcabcaby", 3, None),
        ("aaaa", 4, (0, 1)),
        ("abab", 2, (0, 2)),
        ("ab", 1, None),
        ("", 2, None),
    ],
)
def test_the_period_of_layers(sequence: str, repeats: int, found: tuple[int, int] | None) -> None:
    assert find_period(sequence, repeats) == found


def layered(*layers: tuple[SavedKernel, SavedKernel]) -> SavedGraph:
    start, end = kernel(1, function=2), kernel(2, function=3)
    return graph(start, *(node for layer in layers for node in layer), end, functions=4)


def test_layers_that_differ_by_pointers_alone_fit_a_template() -> None:
    layers = [(kernel(WEIGHTS + 64 * i, 5), kernel(SCRATCH, function=1)) for i in range(3)]
    fit = template_fit(layered(*layers), TABLE, 3)
    assert fit is not None
    assert (fit.start, fit.period, fit.layers) == (1, 2, 3)
    # A layer has 3 + 2 words, the ints at the ends among them; one of them moves.
    assert (fit.equal_words, fit.moved_words, fit.other_words, fit.other_launches) == (8, 2, 0, 0)


def test_a_template_must_be_told_what_else_differs() -> None:
    layers = [(kernel(WEIGHTS, 5 + i), kernel(SCRATCH, function=1, grid=(1 + i, 1, 1))) for i in range(2)]
    fit = template_fit(layered(*layers), TABLE, 2)
    assert fit is not None
    assert (fit.moved_words, fit.other_words, fit.other_launches) == (0, 1, 1)


def test_no_layers_no_template() -> None:
    assert template_fit(graph(kernel(1), kernel(2, function=1), functions=2), TABLE, 2) is None


def test_the_arena_gives_the_same_addresses_for_the_same_requests() -> None:
    arenas = [Arena(WEIGHTS, 1 << 20, WEIGHTS) for _ in range(2)]
    sizes = [0, 1, 512, 513, 4096]
    first, second = ([arena.allocate(size) for size in sizes] for arena in arenas)
    assert first == second
    assert first == sorted(set(first))
    assert all(address % ALIGNMENT == 0 for address in first)
    assert [size for _, size in arenas[0].log] == [512, 512, 512, 1024, 4096]


def test_a_full_arena_says_so_and_keeps_what_is_left() -> None:
    arena = Arena(0x1000, 1024, 0x1000)
    assert arena.allocate(2048) == 0
    assert arena.allocate(1024) == 0x1000
    assert arena.refused == 1


def test_what_a_saved_graph_uses_is_not_given_away() -> None:
    arena = Arena(0x1000, 1 << 20, 0x1000)
    arena.skip_to(0x9000)
    arena.skip_to(0x2000)
    assert arena.allocate(1) == 0x9000


def test_a_cubin_that_was_changed_is_refused(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    sha = store.add(b"code")
    assert store.read(sha) == b"code"
    assert store.names() == {}
    (tmp_path / "images" / f"{sha}.cubin").write_bytes(b"c0de")
    with pytest.raises(CacheError, match="must hold the cubin"):
        store.read(sha)
    with pytest.raises(CacheError, match="must hold the cubin"):
        store.read("ab" * 32)


def test_cubins_of_live_triton_kernels_by_handle() -> None:
    class CompiledKernel:
        def __init__(self, function: int | None, kernel: bytes) -> None:
            self.function, self.kernel = function, kernel

    live = [CompiledKernel(11, b"cubin"), CompiledKernel(None, b"not loaded")]
    assert triton_cubins()[11] == b"cubin"
    assert b"not loaded" not in triton_cubins().values()
    assert len(live) == 2


def test_a_step_that_fails_is_kept_and_the_next_one_runs(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "log.json")

    def fail() -> None:
        raise CacheError("CUDA_ERROR_NOT_FOUND")

    assert log.run("one", fail) is None
    assert log.run("two", lambda: {"works": False, "sms": 132}) == {"works": False, "sms": 132}
    assert log.run("three", lambda: {"ms": 1.5}) == {"ms": 1.5}
    one, two, three = json.loads(log.path.read_text())
    assert (one["works"], one["error"]) == (False, "CacheError: CUDA_ERROR_NOT_FOUND")
    assert (two["works"], two["detail"]["sms"]) == (False, 132)
    assert (three["works"], three["error"], three["detail"]) == (True, None, {"ms": 1.5})


def test_a_step_that_ends_the_process_stands_as_failed(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    code = f"""
import os
from pathlib import Path
from bench.graph_persistence.step_log import StepLog
StepLog(Path({str(path)!r})).run("last", lambda: os._exit(3))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment).returncode == 3
    [entry] = json.loads(path.read_text())
    assert (entry["works"], entry["error"]) == (False, "the process ended here")


def test_the_order_of_processes(tmp_path: Path) -> None:
    jobs = plan(tmp_path, (32, 2))
    assert [(job.role, job.layers) for job in jobs] == [
        ("pool", 0),
        ("save", 2),
        ("load", 2),
        ("load", 2),
        ("save", 32),
        ("load", 32),
        ("masks", 0),
        ("load", 32),
    ]
    assert [job.images for job in jobs if job.role == "save"] == [True, False]
    assert [job.costs for job in jobs if job.role == "save"] == [False, True]
    assert len({job.log for job in jobs}) == len(jobs)
    assert all(Job.from_json(job.to_json()) == job for job in jobs)


def probe(got: str, memory: str = "works", allocated: str = "0x1") -> dict[str, Any]:
    return {"allocated": allocated, "reserved": "0x2", "hints": {"0xa": {"got": got, "memory": memory}}}


def test_addresses_of_fresh_processes() -> None:
    probes = [probe("0xa"), probe("0xb", "-"), probe("0xa", "cuMemMap: CUDA_ERROR_INVALID_VALUE", "0x9")]
    summary = address_summary(probes)
    assert summary["hints"] == {"0xa": {"processes": 3, "got": 2, "usable": 1}}
    assert summary["different_addresses_of_cuMemAlloc"] == 2
    assert summary["different_addresses_without_a_hint"] == 1


def process(name: str, *steps: tuple[str, bool, dict[str, Any]]) -> dict[str, Any]:
    entries = [
        {
            "step": step,
            "works": works,
            "error": None if works else "see detail",
            "detail": detail,
            "seconds": 0.1,
        }
        for step, works, detail in steps
    ]
    return {"process": name, "rc": 0, "seconds": 1.0, "steps": entries}


def test_what_would_be_saved() -> None:
    again = {"capture_ms": {"64": [30.0, 20.0]}, "instantiate_ms": {"64": [5.0, 4.0]}}
    processes = [
        process("save", ("F: capture again", True, again)),
        process("load", ("F: rebuild a whole step", True, {"total_ms": [9.0, 10.0]})),
        process("load", ("F: rebuild a piece of eight kernels", False, {"total_ms": 1.0})),
    ]
    found = savings(processes)
    assert found == {
        "graphs, captured": pytest.approx(GRAPHS * 0.024),
        "graphs, instantiating alone": pytest.approx(GRAPHS * 0.004),
        "graphs, rebuilt": pytest.approx(GRAPHS * 0.009),
    }
    assert PIECES == 1024


def test_the_table_of_a_report_in_which_all_failed() -> None:
    failed = process("load 2 layers by images")
    failed |= {"rc": -11, "steps": [{"step": "C", "works": False, "error": "DeviceError: no"}]}
    lines = table({"addresses": {"error": "no driver"}, "processes": [failed], "savings": {}})
    assert any("no driver" in line for line in lines)
    assert any("ENDED WITH -11" in line for line in lines)
    assert any("FAILS" in line and "DeviceError: no" in line for line in lines)


def test_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.graph_persistence", "--output-json", str(tmp_path / "r.json")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "needs a GPU" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "r.json").exists()


def test_processes_find_what_this_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries may be on its path by other ways than an installation."""
    monkeypatch.syspath_prepend(str(tmp_path))
    told: dict[str, Any] = {}
    monkeypatch.setattr(subprocess, "run", lambda _, **settings: told.update(settings))
    child("child", timeout_s=1.0)
    paths = told["env"]["PYTHONPATH"].split(os.pathsep)
    assert paths[0] == str(PACKAGE_ROOT)
    assert str(tmp_path) in paths
