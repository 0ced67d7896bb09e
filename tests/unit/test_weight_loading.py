"""Weights are filled by a thread while an executor is built; the CPU stands in for the GPU."""

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from checkpoints import write_checkpoint
from decoders import dummy_weights
from engines import GREEDY, make_engine

from bullet_graph import CheckpointError, Engine
from bullet_graph.models.checkpoint import WeightLoading, _StoredTensor
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.weights import ModelWeights, checkpoint_views, fill_dummy, zero_weights
from bullet_graph.runtime import build
from bullet_graph.runtime.cpu import CpuExecutor

EMBED = [-0.07249033451080322, 0.034969184547662735, 0.07945303618907928, -0.12271872162818909]
DOWN = [0.13584938645362854, -0.022783510386943817, 0.017964515835046768]
HEAD = [0.01219705119729042, 0.02277250587940216, -0.03661093860864639]
CPU, TINY = torch.device("cpu"), PRESETS["tiny"]
THREAD = "bullet-graph-weights"


def zeros() -> ModelWeights:
    return zero_weights(TINY, dtype=torch.float32, device=CPU)


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD)]


# ---- the thread ----


@pytest.mark.parametrize("inference", [False, True])
def test_random_weights_are_the_same_as_ever(inference: bool) -> None:
    """A profile makes them in inference mode, outside of which torch refuses to change such tensors: a thread's own."""
    with torch.inference_mode(inference):
        weights = zeros()
        with WeightLoading(weights, fill_dummy(TINY, weights, seed=7)) as filling:
            filling.join()
    expected = dummy_weights(TINY, dtype=torch.float32, device=CPU, seed=7)
    assert torch.equal(weights.embed, expected.embed)
    assert torch.equal(weights.layers[-1].mlp.down.weight, expected.layers[-1].mlp.down.weight)
    assert torch.equal(weights.lm_head, expected.lm_head)
    # Of the release before weights were filled by a thread.
    assert weights.embed[0, :4].tolist() == pytest.approx(EMBED)
    assert weights.layers[3].mlp.down.weight[-1, -3:].tolist() == pytest.approx(DOWN)
    assert weights.lm_head[100, 5:8].tolist() == pytest.approx(HEAD)


def test_unfilled_weights_are_numbers() -> None:
    assert not any(tensor.any() for _, tensor in checkpoint_views(TINY, zeros()))


def test_progress_is_told() -> None:
    weights, told = zeros(), []
    with WeightLoading(weights, iter([3, 4]), told.append) as filling:
        filling.join()
    assert told == [3, 4]
    assert filling.ended_s is not None
    assert filling.ended_s >= filling.started_s


def test_an_error_keeps_its_type_and_message_and_no_weights() -> None:
    weights = zeros()
    gone = weakref.ref(weights.embed)

    def failing(weights: ModelWeights) -> Iterator[int]:
        yield weights.embed.nbytes
        raise CheckpointError("the file ends early")

    with (
        pytest.raises(CheckpointError, match=r"^the file ends early$") as caught,
        WeightLoading(weights, failing(weights)) as filling,
    ):
        filling.join()
    del weights, filling
    assert caught.value.__traceback__ is not None
    gc.collect()
    assert gone() is None, "the error keeps the weights"
    assert not loader_threads()


def test_leaving_the_block_ends_the_thread() -> None:
    """As where a capture fails, or the user interrupts."""
    begun, told = threading.Event(), []

    def endless() -> Iterator[int]:
        while True:
            begun.set()
            yield 1

    def interrupted() -> None:
        begun.wait()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), WeightLoading(zeros(), endless(), told.append):
        interrupted()
    assert not loader_threads()
    assert told


# ---- an engine ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(folder, "llama", shards=2)
    return folder


def test_the_executor_is_built_while_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    executor_made = threading.Event()
    fill, init = build.fill_dummy, CpuExecutor.__init__

    def slow(*arguments: object, **settings: object) -> Iterator[int]:
        pieces = list(fill(*arguments, **settings))  # type: ignore[arg-type]
        assert executor_made.wait(30), "the executor waits for the weights"
        yield from pieces

    def made(executor: CpuExecutor, *arguments: object, **settings: object) -> None:
        init(executor, *arguments, **settings)  # type: ignore[arg-type]
        executor_made.set()

    monkeypatch.setattr(build, "fill_dummy", slow)
    monkeypatch.setattr(CpuExecutor, "__init__", made)
    with make_engine() as engine:
        report = engine.start_report
        tokens = engine.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    phases = {phase.name: phase for phase in report.phases}
    assert phases["allocation"].end_s <= phases["weights"].start_s < phases["weights"].end_s
    assert report.ready_s is not None
    assert phases["weights"].end_s <= report.ready_s
    monkeypatch.undo()
    with make_engine() as engine:
        assert engine.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == tokens
    assert not loader_threads()


@pytest.mark.parametrize("progress", [False, True])
def test_progress_bar_only_when_asked(folder: Path, progress: bool, capsys: pytest.CaptureFixture[str]) -> None:
    make_engine(folder, use_tqdm=progress).shutdown()
    shown = capsys.readouterr().err
    assert ("Loading weights: 100%" in shown) == progress
    assert progress or not shown


def test_a_file_that_breaks_while_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torn = Mock(get_tensor=Mock(side_effect=OSError(os.strerror(5))))
    read = _StoredTensor.read
    monkeypatch.setattr(_StoredTensor, "read", lambda stored, *rest: read(replace(stored, file=torn), *rest))
    with pytest.raises(CheckpointError, match=r"model-00001-of-.*: tensor .* cannot be read \(.*\); download"):
        make_engine(folder)
    assert not loader_threads()


def test_a_failed_start_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    zero = build.zero_weights

    def noted(*arguments: object, **settings: object) -> ModelWeights:
        weights = zero(*arguments, **settings)  # type: ignore[arg-type]
        made.append(weakref.ref(weights.embed))
        return weights

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("no executor")

    monkeypatch.setattr(build, "zero_weights", noted)
    monkeypatch.setattr("bullet_graph.runtime.build.CpuExecutor", failing)
    with pytest.raises(RuntimeError, match="no executor") as caught:
        Engine("tiny", device="cpu", max_model_len=64, max_num_seqs=2)
    assert not loader_threads()
    gc.collect()
    assert made[0]() is None, "the error, still there, keeps the weights"
    assert caught.value
