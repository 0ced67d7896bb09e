"""Settles what a profile will measure before anything is allocated; imports no library of kernels."""

import dataclasses
from dataclasses import dataclass

import torch

from bullet_graph.config import EngineConfig
from bullet_graph.errors import DeviceError
from bullet_graph.perf.profile_point import ProfileLimits
from bullet_graph.runtime.build import plan_ledger
from bullet_graph.runtime.memory import MemoryLedger
from bullet_graph.runtime.resolve import Runtime, resolve

PROFILED_SMS = (16, 24, 32, 48, 64, 80, 96)
"""Sizes of the decode lane that are measured unless others are asked for, as far as the GPU goes."""
_MOST_OF_GPU = 0.75
_MAX_MODEL_LEN = 16384
"""Longest sequence measured; a longer limit would only take memory."""
_MEMORY_UTILIZATION = 0.85
"""Less than an engine takes: each lane's stream keeps activations of its own."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a profile will measure, settled before anything is allocated.

    Attributes:
        config: with the sizes of the decode lane.
        runtime: with a length limit no longer than what is measured.
        ledger: of the memory.
    """

    config: EngineConfig
    runtime: Runtime
    ledger: MemoryLedger

    @property
    def limits(self) -> ProfileLimits:
        """Of the points that can be measured."""
        return ProfileLimits(
            self.config.max_num_seqs,
            self.config.max_num_batched_tokens,
            self.runtime.max_model_len,
            self.ledger.kv_cache_tokens,
        )


def prepare_profile(config: EngineConfig) -> Prepared:
    """Settle what the configuration leaves open: sizes of the decode lane, length limit, share of the memory.

    Raises:
        DeviceError: there is no GPU, or a library it needs is missing.
        BulletGraphError: whatever else an engine of this configuration would raise.
    """
    if not torch.cuda.is_available():
        raise DeviceError(
            f"a profile measures a GPU, but torch {torch.__version__} sees no CUDA device: check `nvidia-smi` and "
            "that torch is a CUDA build, or take a table that was measured on such a GPU"
        )
    config = dataclasses.replace(config, device="cuda", gpu_memory_utilization=_MEMORY_UTILIZATION)
    runtime = resolve(config)
    runtime = dataclasses.replace(runtime, max_model_len=min(runtime.max_model_len, _MAX_MODEL_LEN))
    if not config.decode_sms and config.partition_backend != "none":
        num_sms = torch.cuda.get_device_properties(runtime.device).multi_processor_count
        sizes = tuple(size for size in PROFILED_SMS if size <= _MOST_OF_GPU * num_sms)
        config = dataclasses.replace(config, decode_sms=sizes)
    return Prepared(config, runtime, plan_ledger(config, runtime))
