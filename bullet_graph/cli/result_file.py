"""Results as JSON files: refused before the run rather than after it, and written whole or not at all."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from bullet_graph.errors import ConfigError

IMAGE_FORMATS = ("svg", "png")


def check_result_file(path: Path | None, *, overwrite: bool | None, option: str = "--output-json") -> None:
    """Make sure, before a long run, that its result can be written; None is nothing to write.

    Args:
        path: of the file.
        overwrite: it may be replaced; None where the command has no ``--overwrite``.
        option: that named it.

    Raises:
        ConfigError: the folder is missing or not writable, or the file exists and ``overwrite`` is unset.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: the folder {path.parent} does not exist; make it first")
    if path.is_dir():
        raise ConfigError(f"{option} {path}: this is a folder; give a file name")
    if path.exists() and not overwrite:
        remedy = "give another name" if overwrite is None else "add --overwrite or give another name"
        raise ConfigError(f"{option} {path}: the file exists; {remedy}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: no permission to write into {path.parent}")


def require_matplotlib(option: str) -> None:
    """Make sure, before a long run, that the pictures an option asks for can be drawn: matplotlib is an extra.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import matplotlib  # noqa: F401, PLC0415
    except ModuleNotFoundError:
        raise ConfigError(
            f"{option} needs matplotlib, which is not installed: pip install 'bullet-graph[bench]'"
        ) from None


def check_plot_file(path: Path | None, *, overwrite: bool) -> None:
    """Make sure, before a long run, that the picture of ``--plot`` can be drawn and written; None is nothing to draw.

    Raises:
        ConfigError: its name has another ending, matplotlib is missing, or as :func:`check_result_file` says.
    """
    if path is None:
        return
    if path.suffix[1:].lower() not in IMAGE_FORMATS:
        raise ConfigError(f"--plot {path}: the name must end in .svg or .png")
    check_result_file(path, overwrite=overwrite, option="--plot")
    require_matplotlib("--plot")


def to_json(result: Any) -> str:
    """A result dataclass as JSON text, the fields of its ``run`` beside its own.

    A figure that is not finite is a bug and raises ValueError.
    """
    fields = dataclasses.asdict(result)
    return json.dumps(fields | fields.pop("run"), indent=2, allow_nan=False)


def write_result_file(path: Path, text: str) -> None:
    """Write through a temporary file beside the target, so that no reader ever sees half a result."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(f"{text}\n", encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
