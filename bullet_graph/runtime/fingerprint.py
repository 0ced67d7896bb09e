"""The fingerprint of this machine and model: all that compiled code and captured graphs depend on."""

import dataclasses
import hashlib
import os
import platform
import sys
from collections.abc import Mapping

import torch

from bullet_graph.captures.manifest import digest
from bullet_graph.errors import DeviceError
from bullet_graph.files import PACKAGE_FOLDER
from bullet_graph.models.config import ModelConfig
from bullet_graph.perf.energy import nvml_driver_version
from bullet_graph.perf.provenance import host_cpu, installed_version, output_of
from bullet_graph.runtime.resolve import Runtime, find_device

_NONE = "none"

SOURCES = (
    "config.py",
    "graphs/*.py",
    "kernels/*.py",
    "models/**/*.py",
    "partition/masks.py",
    *("runtime/cuda.py", "runtime/eager_lane.py", "runtime/rows.py"),
)
"""Files that decide which kernels there are and what is captured. Whole files: Triton's keys hold line numbers."""

_NO_KERNELS = frozenset(f"models/{name}.py" for name in ("checkpoint", "hub", "json_files", "progress", "tokenizer"))


def fingerprint_of(runtime: Runtime) -> dict[str, str]:
    """The fingerprint that an entry for this runtime needs here; DeviceError where the driver's version is unknown."""
    return {**machine_components(runtime.device), **model_components(runtime.model, runtime.dtype_name)}


def on_this_machine(fingerprint: Mapping[str, str]) -> dict[str, str]:
    """The fingerprint of an entry for the same model and dtype, if it were built here; raises likewise."""
    device = find_device("cpu" if fingerprint.get("device") == "cpu" else "auto")
    model = {name: fingerprint[name] for name in ("model", "dtype", "rank") if name in fingerprint}
    return {**machine_components(device), **model}


def model_components(model: ModelConfig, dtype: str) -> dict[str, str]:
    """The components that say what an entry is for; ``dtype`` is that of weights, activations and KV cache."""
    shape = dataclasses.asdict(model)
    # They change no kernel: the tokens that end an output, and the checkpoint's own dtype.
    del shape["eos_token_ids"], shape["dtype"]
    del shape["num_ranks"], shape["expert_parallel"], shape["rank"], shape["whole"]
    named = {"model": f"{model.architecture} {model.num_layers}x{model.hidden_size} {digest(shape)}", "dtype": dtype}
    if model.num_ranks > 1:
        named["rank"] = f"{model.rank} of {model.num_ranks}{', with whole experts' * model.expert_parallel}"
    return named


def machine_components(device: torch.device) -> dict[str, str]:
    """The components that say what an entry is built with on this machine; raises as :func:`fingerprint_of`."""
    libc, libc_version = platform.libc_ver()
    components = {
        "device": device.type,
        "platform": f"{platform.system()} {platform.machine()} {libc} {libc_version}".strip(),
        "python": f"{platform.python_implementation()} {'.'.join(platform.python_version_tuple()[:2])}",
        "torch": torch.__version__,
        "triton": installed_version("triton") or _NONE,
        "code": code_digest(),
    }
    if device.type != "cpu":
        return components | _gpu_components(device)
    # Inductor writes C++ for this processor's vector instructions and for this many threads.
    return components | {
        "host_cpu": f"{host_cpu() or 'unknown'} ({torch.backends.cpu.get_cpu_capability()})",
        "cpu_threads": str(torch.get_num_threads()),
        "cxx_compiler": _cxx_compiler(),
    }


def code_digest() -> str:
    """Shortened SHA-256 over the package's :data:`SOURCES`, by name and content."""
    hashes = {}
    for path in (path for pattern in SOURCES for path in PACKAGE_FOLDER.glob(pattern)):
        name = path.relative_to(PACKAGE_FOLDER).as_posix()
        if name not in _NO_KERNELS:
            hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digest(hashes)


def _gpu_components(device: torch.device) -> dict[str, str]:
    gpu = torch.cuda.get_device_properties(device)
    driver = nvml_driver_version()
    if driver is None:
        raise DeviceError(
            "a capture cache holds for one version of the NVIDIA driver, but NVML does not report it here: "
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


def _cxx_compiler() -> str:
    # As in Inductor's setting cpp.cxx; asking Inductor would import torch's compiler for seconds.
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    first_line = (output_of(compiler, "--version") or "").partition("\n")[0].strip()
    return f"{os.path.basename(compiler)}: {first_line}" if first_line else _NONE
