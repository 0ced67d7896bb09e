"""The SM mask in the CUDA driver's stream object (csrc/smctrl.c): only reads, writes and argument checks.

``stream`` is a CUstream handle; ``offset`` counts bytes from the start of the driver's stream object. In the mask a
set bit *disables* a TPC: ``low`` holds TPCs 0-63, ``high`` TPCs 64-127. These functions touch memory of the driver: a
wrong offset corrupts it. Only registered streams are touched: whoever creates a stream registers it, and forgets it
before it is destroyed.
"""

from os import PathLike

def register_stream(stream: int) -> None:
    """Allow the mask of a created CUstream to be read and written; registering it again changes nothing.

    Raises:
        ValueError: a null stream, or one of the driver's special handles.
        RuntimeError: 64 streams are registered already.
        TypeError: ``stream`` is not an int.
        OverflowError: it is negative or above 64 bits.
    """

def forget_stream(stream: int) -> None:
    """Refuse a stream from now on, registered or not.

    Raises:
        TypeError: ``stream`` is not an int.
        OverflowError: it is negative or above 64 bits.
    """

def set_mask(stream: int, offset: int, disable_low: int, disable_high: int, enabled: int = 1) -> None:
    """Write the mask that the stream's next kernel launches obey.

    Args:
        stream: CUstream handle.
        offset: in bytes, a multiple of 4, inside the stream object.
        disable_low: TPCs 0-63, a set bit disables.
        disable_high: TPCs 64-127.
        enabled: the 32-bit word before the mask, 1 for "in force".

    Raises:
        ValueError: a stream that is not registered, an offset outside the object, or a value too large.
        TypeError: an argument is not an int.
        OverflowError: an argument is negative or above 64 bits.
    """

def get_mask(stream: int, offset: int) -> tuple[int, int, int]:
    """Read (enabled, low, high) as :func:`set_mask` takes them. Raises like :func:`set_mask`."""

def driver_version(libcuda: str | PathLike[str] = "libcuda.so.1") -> int:
    """The CUDA version the driver supports: 13000 for 13.0. Initialises nothing.

    Raises:
        OSError: "no driver": the library cannot be opened, or is not libcuda.
        RuntimeError: "no driver": the library answers with a CUDA error.
    """

def driver_path(libcuda: str | PathLike[str] = "libcuda.so.1") -> str:
    """The file that libcuda was loaded from. Raises OSError where there is none."""
