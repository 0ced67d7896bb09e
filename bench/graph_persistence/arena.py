"""Device memory at fixed addresses, from which torch takes all of its own, in order and never twice."""

import ctypes
from dataclasses import dataclass, field
from typing import Any

from bullet_graph.errors import DeviceError
from bullet_graph.partition.driver import CudaDriver

BASE_ADDRESS = 0x2F00_0000_0000
"""Far below where Linux puts libraries and stacks, and above a small heap: nothing else wants it."""
ALIGNMENT = 512
_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


def enter_primary_context(driver: CudaDriver, device: int = 0) -> Any:
    """Make torch's context current before torch is asked for anything: its allocator must be set first."""
    context = driver.call("cuDevicePrimaryCtxRetain", driver.call("cuDeviceGet", device))
    driver.call("cuCtxSetCurrent", context)
    return context


def allocation_properties(driver: CudaDriver, device: int = 0) -> Any:
    """``CUmemAllocationProp`` of plain device memory."""
    api = driver.api
    properties = api.CUmemAllocationProp()
    properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    return properties


def reserve(driver: CudaDriver, num_bytes: int, address: int) -> int:
    """Reserve a range of addresses; returns where, which is the wish only if the driver can."""
    return int(driver.call("cuMemAddressReserve", num_bytes, 0, address, 0))


def map_memory(driver: CudaDriver, address: int, num_bytes: int, device: int = 0) -> None:
    """Put new memory, readable and writable, behind a reserved range."""
    api = driver.api
    handle = driver.call("cuMemCreate", num_bytes, allocation_properties(driver, device), 0)
    driver.call("cuMemMap", address, num_bytes, 0, handle, 0)
    access = api.CUmemAccessDesc()
    access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    driver.call("cuMemSetAccess", address, num_bytes, [access], 1)


@dataclass
class Arena:
    """A mapped range; allocations follow one another, so the same requests get the same addresses in any process.

    Nothing is reused: a graph's temporaries stay its own. That takes memory, which an experiment has.

    Attributes:
        base: first address.
        num_bytes: mapped.
        end: first address not yet given away.
        log: (address, bytes) of each allocation, in order.
        refused: requests that did not fit.
    """

    base: int
    num_bytes: int
    end: int = 0
    log: list[tuple[int, int]] = field(default_factory=list)
    refused: int = 0

    @classmethod
    def create(cls, driver: CudaDriver, num_bytes: int, base: int = BASE_ADDRESS) -> "Arena":
        """Reserve and map.

        Args:
            num_bytes: a multiple of 2 MiB.

        Raises:
            DeviceError: the addresses cannot be had.
            PartitionError: the driver refused.
        """
        if (found := reserve(driver, num_bytes, base)) != base:
            driver.call("cuMemAddressFree", found, num_bytes)
            raise DeviceError(
                f"graphs need {num_bytes} bytes at {base:#x}, but the driver gives {found:#x}: choose another base"
            )
        map_memory(driver, base, num_bytes)
        return cls(base, num_bytes, base)

    def allocate(self, size: int) -> int:
        """The address of so many bytes, 0 where they do not fit."""
        rounded = max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
        if self.end + rounded > self.base + self.num_bytes:
            self.refused += 1
            return 0
        address, self.end = self.end, self.end + rounded
        self.log.append((address, rounded))
        return address

    def skip_to(self, address: int) -> None:
        """Give away nothing below an address: that memory is a saved graph's."""
        self.end = max(self.end, address)


def torch_callbacks(arena: Arena) -> tuple[Any, Any]:
    """What torch's pluggable allocator calls, to allocate and to free."""

    def allocate(size: int, device: int, stream: int | None) -> int:  # noqa: ARG001 - torch's signature
        return arena.allocate(size)

    def free(address: int | None, size: int, device: int, stream: int | None) -> None:  # noqa: ARG001 - likewise
        return None

    return _ALLOCATE(allocate), _FREE(free)


def as_torch_allocator(arena: Arena) -> tuple[Any, Any]:
    """The arena as torch's allocators know them, for a MemPool too.

    Returns:
        (allocator, what must be kept alive until the process ends, by ``os._exit``: torch frees memory until then).
    """
    import torch  # noqa: PLC0415 - the arena's arithmetic is tested without it

    callbacks = torch_callbacks(arena)
    allocate, free = (ctypes.cast(callback, ctypes.c_void_p).value or 0 for callback in callbacks)
    return torch._C._cuda_customAllocator(allocate, free), callbacks


def use_in_torch(arena: Arena) -> Any:
    """Let torch take all device memory from the arena; before it has initialized CUDA.

    Returns:
        What must be kept alive until the process ends.
    """
    import torch  # noqa: PLC0415 - likewise

    allocator, keep = as_torch_allocator(arena)
    torch.cuda.memory.change_current_allocator(torch.cuda.memory._CUDAAllocator(allocator))
    return keep
