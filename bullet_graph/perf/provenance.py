"""The origin of a measurement: versions, commit, host and device. Unknown values are None."""

import importlib.metadata
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bullet_graph._version import __version__
from bullet_graph.files import PACKAGE_FOLDER
from bullet_graph.perf.energy import nvml_driver_version

if TYPE_CHECKING:
    import torch

_DISTRIBUTIONS = {"torch": "torch", "triton": "triton", "flashinfer": "flashinfer-python"}
COMMIT_STAMP = "_commit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The data needed to judge or repeat a measurement.

    Attributes:
        date_utc: ISO 8601, to the second.
        versions: of this package, Python and the kernel libraries; None where not installed.
        git_commit, git_dirty: of the checkout that holds the package, and whether the package's folder differs from it.
        device_uuid: of the GPU; cards of one name differ under their power cap.
        cuda_version: that torch was built with.
    """

    date_utc: str
    versions: dict[str, str | None]
    git_commit: str | None
    git_dirty: bool | None
    host_cpu: str | None
    host_num_cpus: int
    device_name: str
    device_uuid: str | None
    device_memory_bytes: int | None
    driver_version: str | None
    cuda_version: str | None


def collect_provenance(device: "torch.device | str") -> Provenance:
    """The provenance of a measurement on ``device``; "cuda" is the current GPU."""
    # Others read versions here without torch.
    import torch  # noqa: PLC0415

    commit, is_dirty = git_state(PACKAGE_FOLDER) or (None, None)
    device = torch.device(device)
    gpu = None if device.type == "cpu" else torch.cuda.get_device_properties(device)
    return Provenance(
        date_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"bullet_graph": __version__, "python": platform.python_version(), **library_versions()},
        git_commit=commit,
        git_dirty=is_dirty,
        host_cpu=host_cpu(),
        host_num_cpus=len(os.sched_getaffinity(0)),
        device_name="cpu" if gpu is None else gpu.name,
        device_uuid=None if gpu is None else str(gpu.uuid),
        device_memory_bytes=None if gpu is None else gpu.total_memory,
        driver_version=None if gpu is None else nvml_driver_version(),
        cuda_version=None if gpu is None else torch.version.cuda,
    )


def git_state(folder: Path) -> tuple[str, bool] | None:
    """The commit of the checkout that tracks ``folder``, and whether the folder differs from it; None: no checkout.

    A copy of the tree without its history may have the commit in the file ``_commit``, which ``make stamp`` writes
    (with the suffix ``-dirty`` where the tree was). A package installed inside another project's checkout must not
    get that project's commit.
    """
    git = partial(output_of, "git", "-C", str(folder))
    if not git("ls-files", "--", "."):
        stamp = folder / COMMIT_STAMP
        if not stamp.is_file():
            return None
        stamped, _, dirty = stamp.read_text(encoding="ascii").strip().partition("-")
        return stamped, bool(dirty)
    commit = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--", ".")
    return None if not commit or changes is None else (commit, bool(changes))


def without_folder(text: str, folder: Path | None = None, short: str = "~/") -> str:
    """Write ``short`` for a folder's path: ``~/`` for the home folder, so that a kept result names no user."""
    return re.sub(rf"(?<![\w./-]){re.escape(str(folder or Path.home()))}/", short, text)


def output_of(*command: str) -> str | None:
    """What a program prints; None where it cannot be run, or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def library_versions() -> dict[str, str | None]:
    """Versions of torch and the kernel libraries; None where not installed."""
    return {name: installed_version(distribution) for name, distribution in _DISTRIBUTIONS.items()}


def host_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Model name of the processor, or None."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    # Kernels on ARM list no model name.
    return next(names, None) or platform.processor() or None
