"""A capture cache of the tiny model, built once for all tests; and processes and engines that start from it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from bullet_graph import Engine, SamplingParams
from bullet_graph.captures.store import CaptureStore, Entry
from bullet_graph.graphs.compiled import CompiledPart, LayerPart, load_package
from bullet_graph.runtime import capture_cache

SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "kv_cache_bytes": 4 * 2**20}
OPTIONS = (
    *("--model", "tiny", "--device", "cpu", "--max-num-seqs", "4", "--max-model-len", "256"),
    *("--kv-cache-bytes", "4MiB"),
)
PROMPTS = [[1, 2, 3, 4, 5], [9] * 40, [7]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

COMPILERS = ("torch._dynamo", "torch._inductor", "sympy", "triton")
START = f"""
import dataclasses, json, sys
from bullet_graph import Engine, SamplingParams
from bullet_graph.graphs.compile_counts import CompileCounter
settings, prompts = json.loads(sys.argv[1]), json.loads(sys.argv[2])
sampling = SamplingParams(temperature=0, max_tokens={GREEDY.max_tokens}, ignore_eos=True)
with Engine(**settings) as engine, CompileCounter(gpu=settings["device"] == "cuda") as serving:
    compilers = [name for name in {COMPILERS} if name in sys.modules]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
print(json.dumps({{
    "compilers": compilers,
    "start": dataclasses.asdict(engine.compiles),
    "serving": dataclasses.asdict(serving.counts),
    "use": dataclasses.asdict(engine.cache_use),
    "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    "imports_flashinfer": "flashinfer" in sys.modules,
}}))
"""


def environment(libraries: Path) -> dict[str, str]:
    """Of a process whose compilers keep their caches in a folder of its own."""
    return os.environ | {
        "PYTHONPATH": f"{Path(sys.modules['bullet_graph'].__path__[0]).parent}{os.pathsep}{Path(__file__).parent}",
        # Scalar code: to find the processor's vector instructions takes Inductor longer than all the rest.
        "TORCHINDUCTOR_VEC_ISA_OK": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(libraries / "inductor"),
        "TRITON_CACHE_DIR": str(libraries / "triton"),
    }


def run_process(environment: Mapping[str, str], *arguments: str) -> Any:
    """What Python prints in a process of its own, as JSON."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def start_engine(libraries: Path, **settings: Any) -> Any:
    """Start an engine in a process of its own and let it serve."""
    chosen = {"model": "tiny", "device": "cpu", "compile": True, **SETTINGS, **settings}
    return run_process(environment(libraries), "-c", START, json.dumps(chosen), json.dumps(PROMPTS))


def engine_from(store: CaptureStore, **settings: Any) -> Engine:
    """An engine in this process that starts from a store."""
    return Engine("tiny", device="cpu", compile=True, capture_cache=store.root, **SETTINGS | settings)


def tokens_of(engine: Engine) -> list[list[int]]:
    """What it generates."""
    return [list(output.outputs[0].token_ids) for output in engine.generate(PROMPTS, GREEDY, use_tqdm=False)]


def only_entry(store: CaptureStore) -> Entry:
    """The one that is there."""
    (entry,), damaged = store.entries()
    assert not damaged
    return entry


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[CaptureStore, Any]:
    """A store with one entry, and what the build printed; read it only. Shared with the other processes of pytest."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "built_captures"
    shared.mkdir(exist_ok=True)
    printed = shared / "printed.json"
    with FileLock(shared / "lock"):
        if not printed.exists():
            arguments = ("capture", "build", *OPTIONS, "--json", "--cache-dir", str(shared / "store"))
            told = run_process(environment(shared / "libraries"), "-m", "bullet_graph", *arguments)
            printed.write_text(json.dumps(told))
    return CaptureStore(shared / "store"), json.loads(printed.read_text())


@pytest.fixture
def store(built: tuple[CaptureStore, Any], tmp_path: Path) -> CaptureStore:
    """A copy of that store, to be damaged."""
    shutil.copytree(built[0].root, tmp_path / "store")
    return CaptureStore(tmp_path / "store")


@pytest.fixture
def quickly(built: tuple[CaptureStore, Any]) -> Iterator[list[str]]:
    """Compiles without Inductor, and takes the built store's package for a part compiled ahead; yields their names."""
    compile_part = torch.compile
    ahead: list[str] = []

    def compiled(part: Any, **settings: Any) -> Any:
        return compile_part(part, backend="eager", **settings)

    def compiled_ahead(part: LayerPart, package: Path) -> CompiledPart:
        shutil.copyfile(only_entry(built[0]).files / "layers" / f"{part.name}.pt2", package)
        ahead.append(part.name)
        return load_package(package, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", compiled)
        patch.setattr(capture_cache, "compile_ahead", compiled_ahead)
        _forget_compiled()
        yield ahead
    _forget_compiled()


def _forget_compiled() -> None:
    """Drop Dynamo's state where Dynamo is imported, which takes seconds."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
