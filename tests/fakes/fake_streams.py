"""A libcuda of our own, compiled on the spot, and what a GPU would make of the masks in its streams."""

import ctypes
import struct
import subprocess
from pathlib import Path

OBJECT_BYTES = 0x1000
RELEASE = "999.12.34"


class FakeLibcuda:
    """fake_cuda.c as a library of its own in ``folder``, named as the driver names its library."""

    def __init__(self, folder: Path, release: str = RELEASE) -> None:
        source = Path(__file__).with_name("fake_cuda.c")
        self.path = folder / f"libcuda.so.{release}"
        flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, str(source), "-o", str(self.path)], check=True)
        self._library = ctypes.CDLL(str(self.path))
        self._library.fake_stream_create.restype = ctypes.c_void_p
        self._library.fake_stream_create.argtypes = [ctypes.c_size_t, ctypes.c_int]

    def answer(self, version: int, result: int = 0) -> None:
        """What cuDriverGetVersion says from now on."""
        self._library.fake_answer(version, result)

    def stream(self, *, num_bytes: int = OBJECT_BYTES, fill: int = 0) -> int:
        """The handle of a stream with an object of its own."""
        return int(self._library.fake_stream_create(num_bytes, fill))


def object_address(stream: int) -> int:
    return ctypes.c_uint64.from_address(stream).value


def point_to(stream: int, address: int) -> None:
    """Make the handle point to another object."""
    ctypes.c_uint64.from_address(stream).value = address


def object_bytes(stream: int, num_bytes: int = OBJECT_BYTES) -> bytes:
    return ctypes.string_at(object_address(stream), num_bytes)


def honoured_sms(stream: int, offset: int, *, num_sms: int) -> frozenset[int]:
    """The SMs on which a GPU of a driver with the 128-bit layout at ``offset`` would run the stream's kernels."""
    enabled, *words = struct.unpack_from("<5I", object_bytes(stream), offset)
    disabled = sum(word << 32 * i for i, word in enumerate(words)) if enabled else 0
    return frozenset(sm for sm in range(num_sms) if not disabled >> sm // 2 & 1)
