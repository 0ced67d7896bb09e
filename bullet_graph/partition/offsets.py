"""Where each driver keeps a stream's SM mask: the known offsets, and those proven on this machine."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeVar

from platformdirs import user_cache_path

from bullet_graph.errors import PartitionError

OFFSET_ALIGNMENT = 4
"""The mask's words are 32 bits wide."""


class MaskLayout(IntEnum):
    """The struct at the offset; the value is the mask's width in bits, as :mod:`bullet_graph._smctrl` takes it."""

    BITS_64 = 64
    BITS_128 = 128


@dataclass(frozen=True, slots=True)
class KnownOffset:
    """Where the mask lies, in bytes from the start of the driver's stream object, and as what."""

    offset: int
    layout: MaskLayout


@dataclass(frozen=True, slots=True)
class DriverId:
    """One build of the driver.

    Attributes:
        cuda_version: what cuDriverGetVersion says: 13000 for CUDA 13.0.
        release: the full version of the driver's libraries, such as "580.159.04".
        machine: the CPU architecture as :func:`platform.machine` gives it.
    """

    cuda_version: int
    release: str
    machine: str


_T = TypeVar("_T")

_64 = MaskLayout.BITS_64
_128 = MaskLayout.BITS_128

# Up to 12.8: published by libsmctrl (Bakita and Anderson, RTAS 2023). 13.0: calibrated on an H200.
# No aarch64: the offsets published for it differ between boards of one CUDA version (13.0: 0x53c and 0x54c),
# so the version does not tell which is right, and such a machine has to be calibrated.
KNOWN_OFFSETS: Mapping[tuple[int, str], KnownOffset] = MappingProxyType(
    {
        (11000, "x86_64"): KnownOffset(0x274, _64),
        (11010, "x86_64"): KnownOffset(0x2C4, _64),
        (11020, "x86_64"): KnownOffset(0x37C, _64),
        (11030, "x86_64"): KnownOffset(0x37C, _64),
        (11040, "x86_64"): KnownOffset(0x37C, _64),
        (11050, "x86_64"): KnownOffset(0x37C, _64),
        (11060, "x86_64"): KnownOffset(0x38C, _64),
        (11070, "x86_64"): KnownOffset(0x3C4, _64),
        (11080, "x86_64"): KnownOffset(0x47C, _64),
        (12000, "x86_64"): KnownOffset(0x4CC, _128),
        (12010, "x86_64"): KnownOffset(0x4CC, _128),
        (12020, "x86_64"): KnownOffset(0x4E4, _128),
        (12030, "x86_64"): KnownOffset(0x49C, _128),
        (12040, "x86_64"): KnownOffset(0x4AC, _128),
        (12050, "x86_64"): KnownOffset(0x4EC, _128),
        (12060, "x86_64"): KnownOffset(0x4EC, _128),
        (12070, "x86_64"): KnownOffset(0x4FC, _128),
        (12080, "x86_64"): KnownOffset(0x4FC, _128),
        (13000, "x86_64"): KnownOffset(0x51C, _128),
    }
)
"""By (CUDA version of the driver, CPU architecture)."""


def lookup(cuda_version: int, machine: str) -> KnownOffset | None:
    """The table's entry, or None where the driver is not in it."""
    return KNOWN_OFFSETS.get((cuda_version, machine))


def table_line(driver: DriverId, known: KnownOffset) -> str:
    """The line that adds ``known`` to :data:`KNOWN_OFFSETS`, for contributing it."""
    return (
        f'({driver.cuda_version}, "{driver.machine}"): KnownOffset(0x{known.offset:X}, _{known.layout:d}),'
        f"  # calibrated on {driver.release}"
    )


def cache_file() -> Path:
    """Where this user's calibrations are remembered."""
    return user_cache_path("bullet_graph") / "partition_offsets.json"


def remembered(driver: DriverId, path: Path | None = None) -> KnownOffset | None:
    """The offset that was proven on this machine for exactly this driver, or None.

    Args:
        path: the file of calibrations; by default :func:`cache_file`.

    Raises:
        PartitionError: the file cannot be read, or is not what :func:`remember` writes.
    """
    return _read(path or cache_file()).get(driver)


@dataclass(frozen=True, slots=True)
class TrustedOffset:
    """An offset that may be written at, and whence: proven on this machine, or the table."""

    known: KnownOffset
    source: Literal["calibration", "table"]


def find(driver: DriverId, path: Path | None = None) -> TrustedOffset | None:
    """The offset proven on this machine for exactly this driver, else the table's; None where neither has it.

    Args:
        path: the file of calibrations; by default :func:`cache_file`.

    Raises:
        PartitionError: the file cannot be read, or is not what :func:`remember` writes.
    """
    proven = remembered(driver, path)
    if proven is not None:
        return TrustedOffset(proven, "calibration")
    known = lookup(driver.cuda_version, driver.machine)
    return None if known is None else TrustedOffset(known, "table")


def remember(driver: DriverId, known: KnownOffset, path: Path | None = None) -> Path:
    """Keep a proven offset for this driver, in place of an earlier one; returns the file.

    The file is replaced as a whole, so a reader never sees half of it.

    Raises:
        PartitionError: the file is there and corrupt, or cannot be written.
    """
    path = path or cache_file()
    entries = {**_read(path), driver: known}
    text = json.dumps([_to_json(*entry) for entry in entries.items()], indent=1) + "\n"
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise PartitionError(
            f"the proven offset has to be remembered in {path}, but that cannot be written ({error}): "
            "make the folder writable and run `bullet-graph doctor --calibrate` again"
        ) from error
    return path


def _read(path: Path) -> dict[DriverId, KnownOffset]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, str(error)) from error
    try:
        entries = json.loads(text)
        if not isinstance(entries, list):
            raise TypeError(f"a list is required, found {type(entries).__name__}")
        return dict(_from_json(entry) for entry in entries)
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error


def _unreadable(path: Path, found: str) -> PartitionError:
    return PartitionError(
        f"the SM-mask offsets proven on this machine are kept in {path}, but it cannot be used ({found}): "
        "delete it and run `bullet-graph doctor --calibrate`"
    )


def _to_json(driver: DriverId, known: KnownOffset) -> dict[str, int | str]:
    return {
        "cuda_version": driver.cuda_version,
        "release": driver.release,
        "machine": driver.machine,
        "offset": known.offset,
        "layout": int(known.layout),
    }


def _from_json(entry: dict[str, object]) -> tuple[DriverId, KnownOffset]:
    if not isinstance(entry, dict):
        raise TypeError(f"an object is required, found {type(entry).__name__}")
    cuda_version, offset, layout = (_typed(entry, name, int) for name in ("cuda_version", "offset", "layout"))
    release, machine = (_typed(entry, name, str) for name in ("release", "machine"))
    if offset < 0 or offset % OFFSET_ALIGNMENT:
        raise ValueError(f"offset {offset} is not a multiple of {OFFSET_ALIGNMENT}")
    return DriverId(cuda_version, release, machine), KnownOffset(offset, MaskLayout(layout))


def _typed(entry: dict[str, object], name: str, kind: type[_T]) -> _T:
    value = entry[name]
    # Not isinstance: true is no number here.
    if type(value) is not kind:
        raise TypeError(f"{name} has to be {kind.__name__}, found {value!r}")
    return value
