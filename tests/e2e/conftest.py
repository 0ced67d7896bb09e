"""What the end-to-end tests share: a checkpoint, and executors that have steps in flight."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import openai
import pytest
from checkpoints import write_checkpoint
from cli_runner import write_trace
from engines import PROMPTS, Gate, Launches, Model, before_launch, make_engine
from servers import Served, serving

from bullet_graph import Engine
from bullet_graph.models.config import with_padded_heads
from bullet_graph.models.presets import FoundModel, resolve_model
from bullet_graph.planner.plan import Load, Plan
from bullet_graph.planner.planner import Planner
from bullet_graph.runtime import resolve
from bullet_graph.runtime.cpu import CpuExecutor


@pytest.fixture(scope="session", autouse=True)
def _collect_garbage_quickly() -> Iterator[None]:
    """Spare the collection at each engine's shutdown, and before each replay, the million objects of the imports."""
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
    gc.unfreeze()


@pytest.fixture
def trace(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A trace of the module's LENGTHS."""
    return write_trace(tmp_path, *request.module.LENGTHS)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A random Llama of 320 tokens with a tokenizer of 300; read it only."""
    folder: Path = tmp_path_factory.mktemp("llama")
    return Model(folder, write_checkpoint(folder, "llama", seed=3).eval())


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server with the module's SERVER settings."""
    with serving(**request.module.SERVER) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the test file's own server."""
    with served.client() as client:
        yield client


@pytest.fixture
def padded_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's kernels take heads of 64, 128 and 256; here those of 16 become 32."""

    def padded(model: str, revision: str | None) -> FoundModel:
        found = resolve_model(model, revision)
        return found._replace(config=with_padded_heads(found.config, (8, 32, 64)))

    monkeypatch.setattr(resolve, "resolve_model", padded)


@pytest.fixture
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The preset ``tiny`` takes token ids alone, as the larger presets do."""
    monkeypatch.setattr("bullet_graph.runtime.resolve.PRESETS_OF_BYTES", frozenset())


@pytest.fixture
def engine(model: Model) -> Iterator[Engine]:
    """An engine of that checkpoint, which must have all its blocks back after the test."""
    with make_engine(model.folder) as engine:
        yield engine
        assert engine.stats().kv_blocks_used == 0


@pytest.fixture(params=[1, 3], ids=["depth=1", "depth=3"])
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs a test with one and with several steps in flight: the CPU has one by itself, a GPU more."""
    monkeypatch.setattr(CpuExecutor, "max_in_flight", request.param)
    return int(request.param)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Holds engines back after ten steps, so that no long request ends before the test says so.

    To be asked for after an engine that must be able to stop.
    """
    gate = Gate(10)
    before_launch(monkeypatch, lambda *_: gate.wait())
    yield gate
    gate.open()


@pytest.fixture(scope="session")
def expected(model: Model) -> list[tuple[int, ...]]:
    """Greedy tokens of ``PROMPTS``."""
    return [model.greedy(prompt, 12) for prompt in PROMPTS]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What was launched so far."""
    seen: Launches = []
    before_launch(monkeypatch, lambda *launched: seen.append(launched))
    return seen


@pytest.fixture
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` runs all prompts on the prefill lane, one layer at a time; by itself it would not without partitions."""
    choose = Planner.plan

    def plan(self: Planner, load: Load) -> Plan:
        plan = choose(self, load)
        if self.policy.name == "auto" and (plan.chunk_tokens or load.chunk):
            decode = load.decode is not None
            plan = replace(plan, decode=decode, prefill_lane="prefill", slice_layers=1, slice_ms=None)
        return plan

    monkeypatch.setattr(Planner, "plan", plan)
