"""What kernels ask about the device they run on, so that no kernel queries it at each launch."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its kernels see it.

    Attributes:
        num_sms: SMs of the whole device.
        capability: compute capability, (major, minor).
    """

    num_sms: int
    capability: tuple[int, int]

    @classmethod
    def of(cls, device: torch.device) -> "Gpu":
        """The properties of a CUDA device."""
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(num_sms, torch.cuda.get_device_capability(device))

    @property
    def is_hopper(self) -> bool:
        """FlashInfer's fa3 and the fused SwiGLU product are written for compute capability 9.0 alone."""
        return self.capability == (9, 0)

    @property
    def overlaps_launches(self) -> bool:
        """Programs of a launch can start while the one before runs (programmatic dependent launch)."""
        return self.capability >= (9, 0)
