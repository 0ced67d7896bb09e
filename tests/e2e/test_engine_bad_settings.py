"""Models and settings that no engine can be built of."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from engines import GREEDY, make_engine

from bullet_graph import (
    BulletGraphError,
    CheckpointError,
    ConfigError,
    DeviceError,
    InsufficientMemoryError,
    ModelError,
    PerfTableError,
    Slo,
    UnsupportedModelError,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(folder, "llama", shards=2)
    return folder


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint that the test may break."""
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


def edit_config(name: str, value: object) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

    return edit


def test_an_unknown_model_names_the_presets() -> None:
    with pytest.raises(ModelError, match=r"'no-such-model'.*config\.json.*tiny.*llama-3\.1-8b"):
        make_engine("no-such-model")


def test_a_folder_without_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"found neither.*dummy"):
        make_engine(folder)
    with make_engine(folder, load_format="dummy") as engine:
        assert engine.generate("text", GREEDY, use_tqdm=False)[0].error is None


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def cut_first_shard(folder: Path) -> None:
    first_shard(folder).write_bytes(first_shard(folder).read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda f: (f / "config.json").unlink(), ModelError, r"config\.json is missing"),
        (edit_config("architectures", ["Mamba"]), UnsupportedModelError, "LlamaForCausalLM.*Mamba"),
        (
            lambda f: first_shard(f).unlink(),
            CheckpointError,
            "00001-of-00003.safetensors, not in that folder",
        ),
        (cut_first_shard, CheckpointError, "00001-of-00003.safetensors is not a complete safetensors file"),
        (edit_config("intermediate_size", 256), CheckpointError, r"shape \[256, 64\].*found \[128, 64\]"),
        (lambda f: (f / "tokenizer.json").write_text("{"), ModelError, r"tokenizer\.json is not a usable"),
    ],
)
def test_a_damaged_folder(
    folder: Path, damage: Callable[[Path], object], error: type[ModelError], message: str
) -> None:
    damage(folder)
    with pytest.raises(error, match=message):
        make_engine(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_where_there_is_none() -> None:
    with pytest.raises(DeviceError, match=r"device=cuda was asked for.*device=cpu"):
        make_engine(device="cuda")
    with make_engine(device="auto") as engine:
        assert engine.device_name == "cpu"


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"load_format": "safetensors"}, ConfigError, r"'tiny' is a preset of shapes.*load_format=dummy"),
        ({"max_model_len": 16385}, ConfigError, "max_model_len=16385 is more than .* limit of 16384"),
        ({"policy": "mixed:0"}, ConfigError, r"unknown policy 'mixed:0'.*mixed:CHUNK \(in tokens"),
        ({"policy": "split"}, ConfigError, "SM partitions need a GPU.*the policy split"),
        ({"policy": "auto"}, PerfTableError, "perf_table='roofline'"),
        ({"slo": Slo(tpot_ms=5)}, PerfTableError, "the policy mixed under a TPOT target needs.*mixed:CHUNK"),
        ({"perf_table": "/nowhere/table.json"}, PerfTableError, "tables are measured on GPUs"),
        ({"kv_cache_bytes": 1000}, InsufficientMemoryError, r"short by .*MiB.*Raise kv_cache_bytes"),
        ({"kv_cache_bytes": 2**60}, InsufficientMemoryError, r"short by .*GiB.*Lower kv_cache_bytes"),
        (
            {"gpu_memory_utilization": 1e-9},
            InsufficientMemoryError,
            r"raise gpu_memory_utilization \(now 1e-09",
        ),
    ],
)
def test_bad_settings(settings: dict[str, object], error: type[BulletGraphError], message: str) -> None:
    with pytest.raises(error, match=message):
        make_engine(**settings)


def test_nothing_is_allocated_for_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("allocated in spite of the ledger")

    monkeypatch.setattr("bullet_graph.runtime.build.KVCache", forbidden)
    monkeypatch.setattr("bullet_graph.runtime.build.zero_weights", forbidden)
    with pytest.raises(InsufficientMemoryError):
        make_engine(gpu_memory_utilization=1e-9)


def test_the_ledger_is_told_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def check(*_: object, **__: object) -> None:
        assert told
        raise RuntimeError("far enough")

    monkeypatch.setattr("bullet_graph.runtime.build.KVCache", check)
    monkeypatch.setattr("bullet_graph.runtime.build.zero_weights", check)
    with pytest.raises(RuntimeError, match="far enough"):
        make_engine(on_ledger=told.append)
    assert told[0].kv_cache_bytes > 0
