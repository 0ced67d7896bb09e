"""Collects this machine's side of a fingerprint, for comparing with that of a cache."""

import dataclasses
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch

from bullet_graph.captures.fingerprint import MODEL_COMPONENTS, Fingerprint, digest
from bullet_graph.errors import DeviceError
from bullet_graph.graphs.capture_plan import CapturePlan
from bullet_graph.models.config import ModelConfig
from bullet_graph.perf.energy import nvml_driver_version
from bullet_graph.perf.provenance import host_cpu, installed_version
from bullet_graph.runtime.resolve import Runtime

DeviceType = Literal["cuda", "cpu"]

_PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
_COMPILER_TIMEOUT_S = 20
_NONE = "none"

KERNEL_SOURCES = (
    "config.py",
    *("graphs/aot.py", "graphs/compiled.py", "graphs/halves.py"),
    "kernels/*.py",
    "models/*.py",
)
"""What decides which kernels there are and how they are compiled; whole files, for Triton's keys hold line numbers."""

GRAPH_SOURCES = (
    "graphs/*.py",
    "partition/masks.py",
    *("runtime/cuda.py", "runtime/eager_lane.py", "runtime/rows.py"),
)
"""What decides, besides, what is captured."""

_WITHOUT_KERNELS = frozenset(f"models/{name}.py" for name in ("checkpoint", "progress", "tokenizer"))


def fingerprint_of(runtime: Runtime) -> Fingerprint:
    """What captures for this runtime depend on, on this machine.

    Raises:
        DeviceError: the driver does not tell its version.
    """
    return Fingerprint.of(
        {
            **machine_components("cuda" if runtime.device.type == "cuda" else "cpu"),
            **model_components(runtime.model, runtime.dtype),
        }
    )


def plan_mapping(plan: CapturePlan) -> dict[str, Any]:
    """A capture plan as the JSON object that a cache's manifest names it by."""
    mapping: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(plan)))
    return mapping


def on_this_machine(fingerprint: Fingerprint) -> Fingerprint:
    """What a cache for the same model and dtype would depend on, were it built here.

    Args:
        fingerprint: of a cache, which may be of another machine.

    Raises:
        DeviceError: the driver does not tell its version.
    """
    theirs = fingerprint.values
    device: DeviceType = "cuda" if theirs.get("device") != "cpu" and torch.cuda.is_available() else "cpu"
    model = {name: theirs[name] for name in MODEL_COMPONENTS if name in theirs}
    return Fingerprint.of({**machine_components(device), **model})


def model_components(model: ModelConfig, dtype: torch.dtype) -> dict[str, str]:
    """The components that say what a cache is for.

    Args:
        dtype: of weights, activations and cache.
    """
    shape = dataclasses.asdict(model)
    # They change no kernel: which tokens end an output, and what the checkpoint was stored in.
    del shape["eos_token_ids"], shape["dtype"]
    return {
        "model": f"{model.architecture} {model.num_layers}x{model.hidden_size} {digest(shape)}",
        "head_dim": str(model.head_dim),
        "dtype": str(dtype).removeprefix("torch."),
    }


def machine_components(device: DeviceType) -> dict[str, str]:
    """The components that say what a cache is built with, on one of this machine's devices.

    Raises:
        DeviceError: the driver does not tell its version.
    """
    libc, libc_version = platform.libc_ver()
    components = {
        "device": device,
        "platform": f"{platform.system()} {platform.machine()} {libc} {libc_version}".strip(),
        "python": f"{platform.python_implementation()} {'.'.join(platform.python_version_tuple()[:2])}",
        "torch": torch.__version__,
        "triton": installed_version("triton") or _NONE,
        "code_kernels": source_digest(KERNEL_SOURCES, without=_WITHOUT_KERNELS),
        "code_graphs": source_digest(GRAPH_SOURCES),
    }
    return components | (_gpu_components() if device == "cuda" else _cpu_components())


def source_digest(patterns: Iterable[str], *, without: frozenset[str] = frozenset()) -> str:
    """SHA-256, shortened, over the package's source files that match, by name and content.

    Args:
        patterns: globs, relative to the package.
        without: paths to leave out, relative to the package.
    """
    files = {
        path.relative_to(_PACKAGE_FOLDER).as_posix() for p in patterns for path in _PACKAGE_FOLDER.glob(p)
    }
    return digest(
        {name: hashlib.sha256((_PACKAGE_FOLDER / name).read_bytes()).hexdigest() for name in files - without}
    )


def _gpu_components() -> dict[str, str]:
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    driver = nvml_driver_version()
    if driver is None:
        raise DeviceError(
            "a cache of captures holds for one version of the NVIDIA driver, which NVML does not tell here: "
            "pip install 'bullet-graph[cuda]', and check `nvidia-smi`"
        )
    return {
        "gpu": gpu.name,
        "num_sms": str(gpu.multi_processor_count),
        "driver": driver,
        "cuda": torch.version.cuda or _NONE,
        # AOTInductor's code around the kernels is C++ for the builder's kind of processor.
        "host_isa": torch.backends.cpu.get_cpu_capability(),
        "flashinfer": installed_version("flashinfer-python") or _NONE,
    }


def _cpu_components() -> dict[str, str]:
    # Inductor writes C++ for this processor's vector instructions and for this many threads.
    return {
        "host_cpu": f"{host_cpu() or 'unknown'} ({torch.backends.cpu.get_cpu_capability()})",
        "cpu_threads": str(torch.get_num_threads()),
        "cxx_compiler": _cxx_compiler(),
    }


def _cxx_compiler() -> str:
    # As Inductor's setting cpp.cxx has it; to ask Inductor takes seconds, since all of torch's compiler is imported.
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    try:
        command = [compiler, "--version"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILER_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return _NONE
    first_line = done.stdout.partition("\n")[0].strip()
    return f"{os.path.basename(compiler)}: {first_line}" if first_line else _NONE
