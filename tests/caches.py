"""Stores of captures for tests: small entries, and builders in processes of their own."""

import subprocess
import sys
from pathlib import Path

from bullet_graph.captures.builder import open_build
from bullet_graph.captures.entry import ARTIFACTS_NAME, Entry
from bullet_graph.captures.fingerprint import ArtifactKind, Fingerprint
from bullet_graph.captures.store import CaptureStore

FINGERPRINT = Fingerprint.of(
    {
        "device": "cuda",
        "platform": "Linux x86_64 glibc 2.36",
        "gpu": "NVIDIA H200",
        "num_sms": "132",
        "driver": "580.159.04",
        "cuda": "13.0",
        "python": "CPython 3.11",
        "torch": "2.13.0",
        "triton": "3.9.0",
        "flashinfer": "0.6.12",
        "code_kernels": "aaaa",
        "code_graphs": "bbbb",
        "model": "LlamaForCausalLM 32x4096 cccc",
        "head_dim": "128",
        "dtype": "bfloat16",
    }
)
PLAN = {"model": "llama-3.1-8b", "batch_sizes": [1, 2, 4]}

PARTS = {
    "inductor": (ArtifactKind.TORCH_COMPILE, b"inductor" * 40_000, 60.0),
    "triton/gemm": (ArtifactKind.TRITON, b"cubin" * 1000, 20.0),
    "flashinfer/prefill": (ArtifactKind.FLASHINFER, b"module" * 3000, 90.0),
    "perf_table": (ArtifactKind.PERF_TABLE, b"{}", 180.0),
    "empty": (ArtifactKind.CAPTURE, b"", 0.5),
}
"""By name: kind, content, seconds."""

SCRIPT = """
import sys, types
from pathlib import Path
# Without the package's own __init__, which imports torch.
package = types.ModuleType("bullet_graph")
package.__path__ = [sys.argv[1]]
sys.modules["bullet_graph"] = package
from bullet_graph.captures.builder import open_build
from bullet_graph.captures.fingerprint import ArtifactKind, Fingerprint
from bullet_graph.captures.store import CaptureStore
assert "torch" not in sys.modules
store = CaptureStore(Path(sys.argv[2]))
fingerprint = Fingerprint.of({"device": "cpu"})
say = lambda line: print(line, flush=True)
say("ready")
with open_build(store, fingerprint, {}, tell=say) as build:
    say("finished" if build.entry else "building")
    if not build.entry:
        for index in range(int(sys.argv[3])):
            if f"part{index}" not in build:
                data = bytes([index]) * 100_000
                path = f"{index % 3}/{index}.bin"
                build.add_bytes(f"part{index}", ArtifactKind.TRITON, data, path=path, build_seconds=1)
                say(f"added {index}")
        build.commit(self_check=None, provenance={})
        say("committed")
"""
SCRIPT_FINGERPRINT = Fingerprint.of({"device": "cpu"})


def quiet(line: str) -> None:
    """For who has nothing to say."""
    raise AssertionError(line)


def build_entry(
    store: CaptureStore, fingerprint: Fingerprint = FINGERPRINT, plan: dict[str, object] | None = None
) -> Entry:
    """An entry of all :data:`PARTS`."""
    with open_build(store, fingerprint, PLAN if plan is None else plan, tell=quiet) as build:
        for name, (kind, data, seconds) in PARTS.items():
            build.add_bytes(name, kind, data, path=f"{name}.bin", build_seconds=seconds)
        return build.commit(self_check={"logits": [0.5, 1]}, provenance={"host": "h"})


def artifact_file(entry: Entry, name: str) -> Path:
    """Where a part lies."""
    return entry.folder / ARTIFACTS_NAME / f"{name}.bin"


def flip_byte(path: Path, index: int = 0) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[index] ^= 1
    path.write_bytes(data)


def start_builder(root: Path, num_parts: int) -> subprocess.Popen[str]:
    """A builder in a process of its own, which tells on stdout what it does."""
    package = Path(sys.modules["bullet_graph"].__path__[0])
    command = [sys.executable, "-c", SCRIPT, str(package), str(root), str(num_parts)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
