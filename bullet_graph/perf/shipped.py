"""Performance tables by name: those that come with the package, and those of a user's own."""

import re
from pathlib import Path

from bullet_graph.errors import PerfTableError
from bullet_graph.perf.table import PerfTable
from bullet_graph.perf.table_file import read_table

_PACKAGE_FOLDER = Path(__file__).resolve().parents[1]


def shipped_folder() -> Path:
    """Where shipped tables lie: inside an installed package, or beside the package in a checkout."""
    installed = _PACKAGE_FOLDER / "_capture"
    return installed if installed.is_dir() else _PACKAGE_FOLDER.parent / "capture"


def gpu_nickname(gpu: str) -> str:
    """How files and options call a GPU: ``h200`` for ``NVIDIA H200``."""
    words = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return words.removeprefix("nvidia-")


def table_file_name(gpu: str, model: str, dtype: str) -> str:
    """Name of a table's file, such as ``h200_llama-3.1-8b_bfloat16.json``.

    Args:
        gpu: the device's name or nickname.
        model: a preset's name, or a model folder, whose last part counts.
        dtype: of weights and KV cache.
    """
    return f"{gpu_nickname(gpu)}_{Path(model).name}_{dtype}.json"


def list_tables(folder: Path | None = None) -> tuple[Path, ...]:
    """Tables of a folder by name; None looks into the shipped ones."""
    return tuple(sorted((folder or shipped_folder()).glob("*_*_*.json")))


def find_table(gpu: str, model: str, dtype: str, *, folder: Path | None = None) -> Path:
    """The shipped table (or that of ``folder``) for a GPU, model and dtype.

    Raises:
        PerfTableError: there is none; the message lists those there are.
    """
    folder = folder or shipped_folder()
    path = folder / table_file_name(gpu, model, dtype)
    if path.is_file():
        return path
    there = ", ".join(table.name for table in list_tables(folder)) or "none"
    raise PerfTableError(
        f"no performance table {path.name} is known in {folder} (there: {there}): measure one with "
        "`bullet-graph profile`, or give the path of a table"
    )


def load_table(
    gpu_or_path: str | Path, *, model: str, dtype: str = "bfloat16", folder: Path | None = None
) -> PerfTable:
    """Read the table of a GPU that is named, or of a file.

    Args:
        gpu_or_path: a path that ends in ``.json``, or a GPU such as ``h200``.
        model: looked for under that GPU's name; a file is read whatever its model.
        dtype: likewise.
        folder: of tables; None takes the shipped ones.

    Raises:
        PerfTableError: there is no such table, or it cannot be used.
    """
    if Path(gpu_or_path).suffix == ".json":
        return read_table(Path(gpu_or_path))
    return read_table(find_table(str(gpu_or_path), model, dtype, folder=folder))
