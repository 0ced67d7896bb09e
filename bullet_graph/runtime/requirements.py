"""What an engine needs of its device and of the libraries there, checked before anything is allocated."""

from importlib.metadata import version
from importlib.util import find_spec

from bullet_graph.config import EngineConfig
from bullet_graph.errors import ConfigError, DeviceError, UnsupportedModelError
from bullet_graph.runtime.capture_plan import named_plan
from bullet_graph.runtime.resolve import Runtime

FLASHINFER_RELEASE = "0.6.12"
"""The release whose compiled modules ``kernels.flashinfer_attention`` calls; pyproject.toml pins the same."""

GPU_HEAD_DIMS = (64, 128, 256)
"""Head sizes that FlashInfer's fa2 and fa3 kernels are written for."""


def check_device(config: EngineConfig, runtime: Runtime) -> None:
    """Refuse what the device, its libraries or its kernels cannot do at all.

    Raises:
        ConfigError: a setting is for the other kind of device.
        DeviceError: a library that the GPU path needs is missing.
        UnsupportedModelError: the GPU path has no kernels for the model.
    """
    if runtime.device.type == "cpu":
        if (
            config.decode_sms
            or config.partition_backend not in ("auto", "none")
            or config.policy.name == "split"
        ):
            raise ConfigError(
                "SM partitions need a GPU, but the device is the CPU: leave out decode_sms, partition_backend and "
                "the policy split"
            )
        named_plan(config, runtime)  # raises for any: there is nothing to capture
        if config.capture_cache is not None and not config.compile:
            raise ConfigError(
                "capture_cache keeps what is compiled, and on the CPU nothing is: pass compile=True (--compile), or "
                "leave out capture_cache"
            )
        return
    if config.compile:
        raise ConfigError(
            "compile is for the CPU, and the device is a GPU, whose captured decode steps always are compiled: "
            "leave it out"
        )
    _require_cuda_libraries()
    if runtime.model.head_dim not in GPU_HEAD_DIMS:
        raise UnsupportedModelError(
            f"the GPU's attention kernels need heads of {', '.join(map(str, GPU_HEAD_DIMS))}, the model's have "
            f"{runtime.model.head_dim}: pass device=cpu"
        )


def _require_cuda_libraries() -> None:
    """Check for the libraries of the ``cuda`` extra; FlashInfer's internals are called, so its release counts."""
    missing = [name for name in ("triton", "flashinfer", "tvm_ffi") if find_spec(name) is None]
    if missing:
        raise DeviceError(
            f"the GPU path needs {' and '.join(missing)}, not installed here: "
            "pip install 'bullet-graph[cuda]', or pass device=cpu"
        )
    found = version("flashinfer-python")
    if found != FLASHINFER_RELEASE:
        raise DeviceError(
            f"the GPU path needs flashinfer-python {FLASHINFER_RELEASE}, found {found}: "
            f"pip install flashinfer-python=={FLASHINFER_RELEASE}"
        )
