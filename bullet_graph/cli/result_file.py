"""Results: checked before a run, printed as a table or JSON, and written to a file whole or not at all."""

import dataclasses
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from bullet_graph.errors import ConfigError
from bullet_graph.files import draft_of
from bullet_graph.perf.provenance import without_folder

IMAGE_FORMATS = ("svg", "png")


def check_result_file(path: Path | None, *, overwrite: bool | None, option: str = "--output-json") -> None:
    """Make sure, before a long run, that the file that ``option`` names can be written; None: nothing is.

    Raises ConfigError where the folder is missing or takes no file, another option of the command names the file, or it
    exists and ``overwrite`` is False, or None (the command has no such option).
    """
    if path is None:
        return
    try:
        if (ctx := click.get_current_context(silent=True)) is not None:
            kinds = str | Path if path.exists() else Path  # the name of a workload or model may look like a file's
            for other in (p for p in ctx.command.params if option not in (*p.opts, p.human_readable_name)):
                given = ctx.params.get(other.name or "")
                names = [name for name in (given if isinstance(given, tuple) else (given,)) if isinstance(name, kinds)]
                names += [re.split("[=~@]", name)[0] for name in names if isinstance(name, str)]  # --workload NAME~RATE
                if path.resolve() in (Path(name).resolve() for name in names):
                    raise ConfigError(f"{option} {path}: {other.get_error_hint(ctx)} is that file; give another name")
        if not path.parent.is_dir():
            raise ConfigError(f"{option} {path}: the folder {path.parent} does not exist; make it first")
        if path.exists() and not path.is_file():
            raise ConfigError(f"{option} {path}: this is a folder or a device; give a file name")
        if path.exists() and not overwrite:
            remedy = "give another name" if overwrite is None else "add --overwrite or give another name"
            raise ConfigError(f"{option} {path}: the file exists; {remedy}")
        # A full disk, or one that is mounted read-only, is found by writing alone.
        with tempfile.TemporaryFile(dir=path.parent, buffering=0) as file:
            file.write(bytes(64 * 1024))
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: {path.parent} takes no file ({error.strerror}); give another folder"
        ) from error


def check_plot_file(path: Path | None, *, overwrite: bool, option: str = "--plot") -> None:
    """As :func:`check_result_file`, for a picture: matplotlib must be there, and know the name's ending."""
    if path is None:
        return
    if path.suffix[1:].lower() not in IMAGE_FORMATS:
        raise ConfigError(f"{option} {path}: the name must end in .svg or .png")
    check_result_file(path, overwrite=overwrite, option=option)
    require_extra(option, "matplotlib")


def require_extra(what: str, *modules: str, extra: str = "bench") -> None:
    """Make sure that libraries of an extra, which ``what`` needs, are installed; ConfigError where one is not."""
    if missing := ", ".join(name for name in modules if find_spec(name) is None):
        raise ConfigError(f"{what} needs {missing}, not installed here: pip install 'bullet-graph[{extra}]'")


def command_line() -> list[str]:
    """This process's command line as results keep it: without secrets, and with paths relative to here or ``~``."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.parent != "bullet_graph":
        program = ["python", "-m", spec.name.removesuffix(".__main__")]
    elif spec is None and Path(sys.argv[0]).suffix == ".py":
        program = ["python", sys.argv[0]]
    else:
        program = ["bullet-graph"]
    words = [re.sub(r"//[^/\s]+@", "//***@", word) for word in (*program, *sys.argv[1:])]
    for index, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if name == "--api-key":
            if equals:
                words[index] = f"{name}=***"
            elif index + 1 < len(words):
                words[index + 1] = "***"
    for folder, short in {Path.cwd(): "", Path.home(): "~/"}.items():
        if folder != folder.parent:  # not the root
            words = [without_folder(word, folder, short) for word in words]
    return words


def to_json(fields: Mapping[str, Any]) -> str:
    """A result as JSON text, with its own command line as ``argv``; ValueError for a figure that is not finite."""
    return json.dumps({**fields, "argv": fields.get("argv", command_line())}, indent=2, allow_nan=False)


def print_json(value: object) -> None:
    """Print a value, which may hold dataclasses, as JSON."""
    click.echo(json.dumps(value, default=dataclasses.asdict, indent=2, allow_nan=False))


@dataclass(frozen=True, slots=True)
class Output:
    """Where the result of a command goes: into a file, if there is a ``path``, and to stdout as a table or JSON."""

    path: Path | None
    overwrite: bool
    as_json: bool

    def emit(self, fields: Mapping[str, Any], show: Callable[[], object]) -> None:
        """Write a result, and print it: as JSON, or as ``show`` does."""
        text = to_json(fields)
        if self.path is not None:
            write_result_file(self.path, text)
        if self.as_json:
            click.echo(text)
        else:
            show()


def write_result_file(path: Path, content: str | bytes) -> None:
    """Write text, or a picture, as a whole or not at all.

    Where it cannot be written, ConfigError; text is then printed on stdout, so that a long run is not lost.
    """
    try:
        with draft_of(path) as draft:
            draft.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode(errors="replace"))
    except OSError as error:
        printed = ""
        if isinstance(content, str):
            click.echo(content)
            printed = "; what it would hold is on standard output"
        raise ConfigError(f"{path} cannot be written ({error.strerror}){printed}") from error
