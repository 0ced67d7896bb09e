"""One fresh process: which addresses the driver gives, unasked and asked. It imports nothing but cuda.bindings.

python -m bench.graph_persistence.address_process [ADDRESS]
"""

import json
import sys
from typing import Any

from cuda.bindings import driver

GIB = 1 << 30
RESERVED_BYTES = 64 * GIB
HINTS = (0x2F00_0000_0000, 0x6000_0000_0000, 0x7E00_0000_0000)
_PAGE_BYTES = 2 << 20


def call(name: str, *arguments: Any) -> Any:
    """A driver call's result; RuntimeError with the status otherwise."""
    status, *values = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name}: {status.name}")
    return values[0] if len(values) == 1 else tuple(values) or None


def usable(address: int) -> str:
    """ "works", or the error of the call that failed, of memory mapped at a reserved address."""
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    try:
        handle = call("cuMemCreate", _PAGE_BYTES, properties, 0)
        call("cuMemMap", address, _PAGE_BYTES, 0, handle, 0)
        call("cuMemSetAccess", address, _PAGE_BYTES, [access], 1)
        call("cuMemsetD8", address, 1, _PAGE_BYTES)
        call("cuCtxSynchronize")
    except RuntimeError as error:
        return str(error)
    return "works"


def probe(hints: tuple[int, ...]) -> dict[str, Any]:
    """Addresses, in hexadecimal: of an allocation, of a reservation without a hint, and with each hint."""
    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0)))
    found: dict[str, Any] = {
        "allocated": hex(int(call("cuMemAlloc", 64 << 20))),
        "reserved": hex(int(call("cuMemAddressReserve", RESERVED_BYTES, 0, 0, 0))),
        "hints": {},
    }
    for hint in hints:
        try:
            address = int(call("cuMemAddressReserve", RESERVED_BYTES, 0, hint, 0))
        except RuntimeError as error:
            found["hints"][hex(hint)] = {"got": str(error), "memory": "-"}
            continue
        memory = usable(address) if address == hint else "-"
        found["hints"][hex(hint)] = {"got": hex(address), "memory": memory}
    return found


if __name__ == "__main__":
    extra = tuple(int(argument, 16) for argument in sys.argv[1:])
    print(json.dumps(probe(HINTS + extra)), flush=True)
