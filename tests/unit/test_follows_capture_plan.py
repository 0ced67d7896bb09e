"""An engine follows its capture plan: what is captured, what it costs, and where steps may be placed."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from capture_plans import NARROW, PLAN
from core_loop import MODEL, Arrival, CheckedExecutor, CoreLoop, arrivals
from examples import few
from fakes.perf_tables import LLAMA_8B, h200_table
from hypothesis import given
from hypothesis import strategies as st
from planner_loads import chosen, chunk_of, decoding, load_of
from planner_loads import planner as planner_of

from bullet_graph import Engine
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.errors import ConfigError, PartitionError
from bullet_graph.graphs.capture_plan import format_plan, named_plan
from bullet_graph.graphs.decode_graph import DecodeGraphs, DecodeInputs
from bullet_graph.graphs.key import GraphKey
from bullet_graph.models.presets import PRESETS
from bullet_graph.partition.masks import WHOLE_GPU, SmPartition, partition_of
from bullet_graph.perf.performance import PaddedModel
from bullet_graph.perf.predict import TableModel
from bullet_graph.planner.plan import Load, Plan
from bullet_graph.planner.planner import Planner
from bullet_graph.runtime import resolve
from bullet_graph.runtime.build import capture_plan_of, plan_ledger
from bullet_graph.runtime.memory import GIB, piecewise_scratch_bytes
from bullet_graph.runtime.resolve import Runtime
from bullet_graph.slo import NO_TARGETS, Slo

CONFIG = EngineConfig(model="llama-3.1-8b", max_num_seqs=64, max_num_batched_tokens=512)


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = tmp_path / "plan.toml"
    path.write_text(format_plan(PLAN))
    return str(path)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """A runtime on a GPU of 132 SMs, as far as anybody asks."""
    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return Runtime(PRESETS["llama-3.1-8b"], "llama-3.1-8b", None, torch.device("cuda"), torch.bfloat16, 4096)


# ---- which plan ----


def test_the_plan_that_is_named_or_without_one_all_buckets_for_all_partitions(plan_file: str, h200: Runtime) -> None:
    assert capture_plan_of(replace(CONFIG, capture_plan=plan_file), h200) == PLAN
    assert capture_plan_of(replace(CONFIG, capture_plan=plan_file, max_num_batched_tokens=64), h200) == PLAN
    plan = capture_plan_of(replace(CONFIG, decode_sms=(48, 32)), h200)
    assert plan.decode_sms == (32, 48)
    assert {entry.batch_sizes for entry in plan.decode} == {(1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)}
    assert plan.piecewise_rows[-1] == 576
    assert capture_plan_of(replace(CONFIG, policy=Policy("auto")), h200, MODEL).decode_sms == tuple(MODEL.decode_sms)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "qwen3-8b"}, "made for model=llama-3.1-8b, but the engine has model=qwen3-8b"),
        ({"max_num_seqs": 65}, "made for max_num_seqs=64, but the engine has max_num_seqs=65"),
        ({"dtype": "float16"}, "made for dtype=bfloat16, but the engine has dtype=float16"),
        ({"num_sms": 108}, "made for num_sms=132, but the engine has num_sms=108"),
        ({"max_num_batched_tokens": 63}, "128 rows in piecewise_rows, but the longest of this engine has 127"),
        ({"policy": Policy.parse("split:48")}, "no decode lane of 48 SMs, which the policy split:48 needs, but 32"),
    ],
)
def test_a_plan_for_another_engine_is_refused(plan_file: str, change: dict[str, Any], message: str) -> None:
    device = {"dtype": "bfloat16", "num_sms": 132}
    device |= {name: change.pop(name) for name in device.keys() & change.keys()}
    with pytest.raises(ConfigError) as refused:
        named_plan(replace(CONFIG, capture_plan=plan_file, **change), **device)
    assert str(refused.value).startswith(f"the capture plan {plan_file} ")
    assert message in str(refused.value)
    with pytest.raises(ConfigError, match="the device is the CPU: leave out capture_plan"):
        Engine("tiny", device="cpu", capture_plan=plan_file)


# ---- what it takes ----


@pytest.mark.parametrize(("model", "rows"), [("llama-3.1-8b", 1024), ("qwen3-0.6b", 3840)])
def test_the_ledger_holds_pieces_scratch(model: str, rows: int, h200: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (139 * GIB, 140 * GIB))
    monkeypatch.setattr(resolve, "_require_cuda_libraries", lambda: None)
    runtime = replace(h200, model=PRESETS[model])
    config = EngineConfig(model=model, max_num_seqs=64, max_num_batched_tokens=8192)
    plan = capture_plan_of(config, runtime)
    assert plan.piecewise_rows[-1] == rows
    scratch = piecewise_scratch_bytes(runtime.model, rows, dtype_bytes=2)
    assert scratch > rows * 2 * 9 * runtime.model.hidden_size
    assert plan_ledger(config, runtime).graphs_bytes == plan.graph_bytes(runtime.model.num_layers) + scratch
    assert plan_ledger(replace(config, cuda_graphs=False), runtime).graphs_bytes == 0


# ---- what is captured ----


def test_a_step_replays_the_smallest_graph_of_its_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = object.__new__(DecodeGraphs)
    graphs._sizes = {WHOLE_GPU: (8, 64), NARROW: (16,)}
    graphs._captured = {
        key: (SimpleNamespace(replay=lambda key=key: replayed.append(key)), [0] * 64)
        for key in ((GraphKey(8), False), (GraphKey(64), False), (GraphKey(64), True), (GraphKey(16, NARROW), False))
    }  # type: ignore[assignment]
    replayed: list[tuple[GraphKey, bool]] = []
    saved = [*[None] * 3, object()]
    graphs._attention = SimpleNamespace(shared_blocks=lambda *_: saved.pop())  # type: ignore[assignment]
    padded: list[int] = []
    monkeypatch.setattr(DecodeGraphs, "_pad", lambda _, inputs, size: padded.append(size) or inputs)
    monkeypatch.setattr(DecodeGraphs, "_prepare", lambda *_: None)

    def run(rows: int, partition: SmPartition = WHOLE_GPU, least_rows: int = 1) -> int:
        inputs = DecodeInputs([0] * rows, *[None] * 5)  # type: ignore[arg-type, list-item]
        return len(graphs.run(inputs, partition, least_rows))

    assert [run(3), run(8), run(9), run(9), run(9, NARROW)] == [3, 8, 9, 9, 9]
    small, large, narrow = GraphKey(8), GraphKey(64), GraphKey(16, NARROW)
    assert replayed == [(small, False), (small, False), (large, True), (large, False), (narrow, False)]
    # Padded further to a size there is; to none else.
    assert [run(3, least_rows=64), run(3, least_rows=9), run(9, least_rows=8), run(9, NARROW, 99)] == [3, 3, 9, 9]
    assert padded == [8, 8, 64, 64, 16, 64, 8, 64, 16]
    with pytest.raises(ConfigError, match=r"no decode graph was captured for .*batch_size=17"):
        run(17, NARROW)


# ---- where steps may be placed ----


def limited_planner(policy: str, limits: dict[int, int]) -> Planner:
    planner = planner_of(policy)
    planner.max_batch_sizes = limits
    return planner


def test_a_split_is_weighed_only_where_a_graph_holds_the_batch() -> None:
    planner = limited_planner("auto", {sms: 16 for sms in MODEL.decode_sms if sms != 48})
    plan = planner.plan(load_of(decoding(17, tpot=20.0), 2048, 2048))
    assert {option.decode_sms for option in plan.options} == {None, 48}
    plan = planner.plan(load_of(decoding(16, tpot=20.0), 2048, 2048))
    assert {option.decode_sms for option in plan.options} == {None, *MODEL.decode_sms}


def test_a_forced_split_mixes_while_no_graph_holds_the_batch() -> None:
    planner = limited_planner("split", dict.fromkeys(MODEL.decode_sms, 8))
    assert chosen(planner.plan(load_of(decoding(8), 2048))).policy == "split"
    plan = planner.plan(load_of(decoding(9), 2048))
    assert (plan.policy, plan.partition, plan.prefill_lane) == ("mixed", WHOLE_GPU, "decode")
    # A chunk that is on the prefill lane ends there, and decode waits for it.
    for policy in ("split", "auto"):
        planner = limited_planner(policy, dict.fromkeys(MODEL.decode_sms, 8))
        plan = planner.plan(load_of(decoding(9, tpot=20.0), 500, chunk=chunk_of(2048, 30)))
        assert (plan.policy, plan.decode, plan.prefill_lane) == ("solo", False, "prefill")
        assert plan.partition == WHOLE_GPU
        assert 0 < plan.slice_layers < 30


@given(
    policy=st.sampled_from(["split", "split:48", "auto"]),
    limits=st.fixed_dictionaries({sms: st.integers(1, 8) for sms in MODEL.decode_sms}),
    requests=arrivals([Slo(tpot_ms=12)], max_output=60),
    depth=st.integers(1, 2),
)
@few(15)
def test_no_batch_is_placed_where_no_graph_holds_it(
    policy: str, limits: dict[int, int], requests: list[Arrival], depth: int
) -> None:
    """The executor refuses such a launch, and checks all others as ever."""
    by_partition = {partition_of(sms, num_sms=MODEL.num_sms): most for sms, most in limits.items()}
    executor = CheckedExecutor(max_in_flight=depth, max_batch_sizes=by_partition)
    CoreLoop(policy, executor=executor).run(arrivals=requests)
    for launch in executor.launches:
        if launch.step.prefill is None and launch.step.decode is not None:
            assert len(launch.step.decode.slots) <= by_partition.get(launch.placement.partition, 64)


class _Alternating(Planner):
    """Slices beside 48 SMs, then a step on the whole GPU while they run, and so on."""

    def plan(self, load: Load) -> Plan:
        if load.prompts or load.chunk:
            self.turn = not getattr(self, "turn", False)
            if self.turn or load.decode is None:
                rows = 0 if load.chunk else 512
                return Plan("split", False, "prefill", rows, slice_layers=4, partition=partition_of(48, num_sms=132))
        return Plan("solo", decode=True)


@pytest.mark.parametrize("most", [2, 8])
def test_a_step_stays_beside_the_slices_in_flight_only_where_a_graph_holds_it(most: int) -> None:
    beside = partition_of(48, num_sms=132)
    executor = CheckedExecutor(max_batch_sizes={beside: most})
    planner = _Alternating(Policy("auto"), max_chunk_tokens=8192, decode_sms=(48,), model=MODEL)
    CoreLoop(planner, executor=executor).run(arrivals=[(0.0, 100, 50, NO_TARGETS)] * 4 + [(0.2, 900, 5, NO_TARGETS)])
    decode = [launch for launch in executor.launches if launch.step.decode is not None]
    assert any(launch.placement.partition == beside for launch in decode) == (most == 8)
    if most == 2:
        assert any(launch.placement.takes_turns for launch in decode), "it waits for the slices instead"


def test_a_device_refuses_a_batch_that_no_graph_holds() -> None:
    loop = CoreLoop("split:48", executor=CheckedExecutor(max_batch_sizes={partition_of(48, num_sms=132): 2}))
    loop.core.planner.max_batch_sizes = {}
    with pytest.raises(PartitionError, match="where at most 2 are captured: place it on the whole GPU"):
        loop.run(arrivals=[(0.0, 100, 50, NO_TARGETS)] * 4 + [(0.1, 900, 5, NO_TARGETS)])


# ---- what is predicted ----


def test_predictions_are_padded_as_the_plan_pads() -> None:
    table = TableModel(h200_table(), LLAMA_8B)
    padded = PaddedModel(table, PLAN.padded, routes=False)
    assert padded.decode(9, 9000) == table.decode(64, 9000)
    assert padded.decode(9, 9000, 32) == table.decode(16, 9000, 32)
    assert padded.split(32, 3, 3000, 512, 1e5) == table.split(32, 4, 3000, 512, 1e5)
    assert padded.mixed(100, 1e4, 9, 9000) == table.mixed(100, 1e4, 9, 9000)
    assert padded.prefill(100, 1e4) == table.prefill(100, 1e4)
    assert padded.wave_chunk_tokens(2048, 100) == table.wave_chunk_tokens(2048, 100)
    assert (padded.num_sms, padded.num_layers) == (132, 32)
    assert tuple(padded.decode_sms) == tuple(table.decode_sms)
    assert PaddedModel(table, PLAN.padded, routes=True).decode(9, 9000) == table.decode(10, 9000)
