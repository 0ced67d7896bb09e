"""Where each driver keeps a stream's SM mask: the known offsets, and those proven on this machine.

An offset counts bytes from the start of the driver's stream object, and leads to a word that enables the mask and 128
mask bits (from CUDA 12.0 on).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from platformdirs import user_cache_path
from pydantic import Field, TypeAdapter, ValidationError

from bullet_graph.errors import PartitionError, first_problem
from bullet_graph.files import draft_of

OFFSET_ALIGNMENT = 4
"""The mask's words are 32 bits wide."""

# Up to 12.8: published by libsmctrl (Bakita and Anderson, RTAS 2023). 13.0: calibrated on an H200.
# No aarch64: the offsets published for it differ between boards of one CUDA version (13.0: 0x53c and 0x54c), so such
# a machine has to be calibrated.
KNOWN_OFFSETS: Mapping[tuple[int, str], int] = MappingProxyType(
    {
        (12000, "x86_64"): 0x4CC,
        (12010, "x86_64"): 0x4CC,
        (12020, "x86_64"): 0x4E4,
        (12030, "x86_64"): 0x49C,
        (12040, "x86_64"): 0x4AC,
        (12050, "x86_64"): 0x4EC,
        (12060, "x86_64"): 0x4EC,
        (12070, "x86_64"): 0x4FC,
        (12080, "x86_64"): 0x4FC,
        (13000, "x86_64"): 0x51C,
    }
)
"""By (CUDA version of the driver, CPU architecture)."""


@dataclass(frozen=True, slots=True)
class DriverId:
    """One build of the driver: 13000 for CUDA 13.0, a release such as "580.159.04", and the CPU's architecture."""

    cuda_version: int
    release: str
    machine: str


@dataclass(frozen=True, slots=True)
class _Entry(DriverId):
    """A driver, and the offset in bytes that was proven for it."""

    offset: Annotated[int, Field(ge=0, multiple_of=OFFSET_ALIGNMENT)]


@dataclass(frozen=True, slots=True)
class TrustedOffset:
    """An offset that may be written at, and its source: proven on this machine, or the table."""

    offset: int
    source: Literal["calibration", "table"]


def lookup(driver: DriverId) -> int | None:
    """The table's offset for the driver, or None."""
    return KNOWN_OFFSETS.get((driver.cuda_version, driver.machine))


def find(driver: DriverId, path: Path | None = None) -> TrustedOffset | None:
    """The offset proven on this machine for exactly this driver, else the table's, else None.

    Raises PartitionError where ``path``, by default :func:`cache_file`, cannot be read or is not :func:`remember`'s.
    """
    proven = remembered(driver, path)
    if proven is not None:
        return TrustedOffset(proven, "calibration")
    known = lookup(driver)
    return None if known is None else TrustedOffset(known, "table")


def cache_file() -> Path:
    """The file of this user's calibrations."""
    return user_cache_path("bullet_graph") / "partition_offsets.json"


def remembered(driver: DriverId, path: Path | None = None) -> int | None:
    """The offset proven on this machine for exactly this driver, or None; as :func:`find`."""
    return _read(path or cache_file()).get(driver)


def remember(driver: DriverId, offset: int, path: Path | None = None) -> Path:
    """Keep a proven offset for this driver, in place of an earlier one; replaces the whole file and returns it."""
    path = path or cache_file()
    entries = {**_read(path), driver: offset}
    text = json.dumps([{**asdict(one), "offset": at} for one, at in entries.items()], indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft_of(path) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PartitionError(
            f"the proven offset has to be remembered in {path}, but that cannot be written ({error}): "
            "make the folder writable and run `bullet-graph doctor --calibrate` again"
        ) from error
    return path


def _read(path: Path) -> dict[DriverId, int]:
    try:
        entries = TypeAdapter(list[_Entry]).validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else error
        raise PartitionError(
            f"the SM-mask offsets proven on this machine are kept in {path}, but it cannot be used ({problem}): "
            "delete it and run `bullet-graph doctor --calibrate`"
        ) from error
    return {DriverId(entry.cuda_version, entry.release, entry.machine): entry.offset for entry in entries}
