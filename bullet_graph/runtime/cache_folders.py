"""Folders that outlive the process: where they are, how large, and whether they can be written."""

import os
from dataclasses import dataclass
from pathlib import Path

from bullet_graph.partition import offsets


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """A folder that outlives the process.

    Attributes:
        name: whose it is.
        path: it need not exist yet.
        num_bytes: of the files in it.
        is_writable: it, or the folder that it would be made in.
    """

    name: str
    path: str
    num_bytes: int
    is_writable: bool


def cache_folders() -> dict[str, Path]:
    """Ours and those of the libraries that compile kernels, by owner; nothing is made."""
    # The libraries' own variables decide, but to ask the libraries would make the folders, or import FlashInfer.
    flashinfer = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home())) / ".cache" / "flashinfer"
    return {
        "bullet_graph": offsets.cache_file().parent,
        "FlashInfer": flashinfer,
        "Inductor": Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or _inductors_default()),
        "Triton": Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache")),
    }


def _inductors_default() -> str:
    # Imported here because it imports all of Inductor, which takes seconds.
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # noqa: PLC0415

    folder: str = default_cache_dir()
    return folder


def look_at_cache(name: str, path: Path) -> CacheFolder:
    """Size and permissions of a folder that may not be there yet."""
    size = 0
    for folder, _, files in os.walk(path):
        for file in files:
            try:
                size += os.lstat(os.path.join(folder, file)).st_size
            except OSError:
                continue  # another process cleans up, or the folder is somebody else's
    there = next(parent for parent in (path, *path.absolute().parents) if os.path.exists(parent))
    return CacheFolder(name, str(path), size, os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK))
