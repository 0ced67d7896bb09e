"""A capture cache on the GPU: built in one process, started from in another, which compiles nothing."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from capture_processes import PROMPTS, START
from programs import json_printed_by

OPTIONS = (
    *("--model", "llama-3.2-1b", "--max-num-seqs", "32", "--max-model-len", "4096"),
    *("--kv-cache-bytes", "1GiB", "--partition-backend", "none"),
)
SETTINGS = {
    "model": "llama-3.2-1b",
    "device": "cuda",
    "max_num_seqs": 32,
    "max_model_len": 4096,
    "kv_cache_bytes": 2**30,
    "partition_backend": "none",
}


def run(libraries: Path, *arguments: str) -> Any:
    """A process whose libraries' caches begin empty, but for FlashInfer's, which takes minutes."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TORCHINDUCTOR_CACHE_DIR": str(libraries / "inductor"),
        "TRITON_CACHE_DIR": str(libraries / "triton"),
    }
    return json_printed_by(*arguments, environment=environment)


def start(libraries: Path, **settings: Any) -> Any:
    return run(libraries, "-c", START, json.dumps(SETTINGS | settings), json.dumps([*PROMPTS, [5] * 1500]))


def test_the_second_start_compiles_nothing(tmp_path: Path, record_property: Any) -> None:
    store = tmp_path / "store"
    built = run(
        tmp_path / "first", *("-m", "bullet_graph", "capture", "build", *OPTIONS, "--cache-dir", str(store), "--json")
    )
    record_property("built", built)
    assert {"layers", "triton", "flashinfer", "measured.json"} <= {part["part"] for part in built["parts"]}
    assert built["compiles"]["inductor"] == 2
    assert built["compiles"]["cpp"] > 0
    assert built["compiles"]["triton"] > 0
    self_check = built["self_check"]
    assert self_check["relative_error"].keys() == {"1", "2", "4", "8", "16", "24", "32"}
    assert max(self_check["relative_error"].values()) < self_check["tolerance"]

    cached = start(tmp_path / "second", capture_cache=str(store), self_check="all")
    record_property("started", cached)
    assert cached["use"]["entry_id"] == built["entry_id"]
    assert cached["use"]["problems"] == []
    assert set(cached["start"].values()) == {0}
    assert not cached["imports_flashinfer"], "its import takes nearly a second"
    assert "torch._dynamo" not in cached["compilers"], "to import it takes seconds"
    assert set(cached["serving"].values()) == {0}, "kernels that no start runs were compiled by the build"

    compiled = start(tmp_path / "third")
    record_property("compiled", compiled)
    assert compiled["start"]["dynamo_frames"] > 0
    assert compiled["imports_flashinfer"]
    assert cached["tokens"] == compiled["tokens"]
