"""What any peer in this process needs: its messages in a file, settings as JSON, and checks before it starts."""

import dataclasses
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from bullet_graph.errors import ConfigError, DeviceError
from bullet_graph.perf.provenance import installed_version, without_folder


def require_peer(name: str, release: str) -> None:
    """Raise a DeviceError where a peer's distribution is not installed; ``release`` is what to install."""
    if installed_version(name) is None:
        raise DeviceError(
            f"{name} is not installed in this environment: pip install {name}=={release}, or leave this system out"
        )


def require_options(peer: str, options: Iterable[str], arguments: type, example: str) -> None:
    """Raise a ConfigError for options that are no fields of a peer's dataclass of arguments."""
    unknown = sorted(set(options) - {field.name for field in dataclasses.fields(arguments)})
    if unknown:
        found = f"this {peer} has no option {', '.join(unknown)}"
        raise ConfigError(f"{found}: give arguments of its {arguments.__name__}, such as {example}")


@contextmanager
def output_to(log: Path | None) -> Iterator[None]:
    """Redirect stdout and stderr of this process and its children to a file; None: stdout to stderr.

    The descriptors too, which the peer's processes inherit: stdout is left for the results.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Never closed: the peer's loggers keep it.
    stream = sys.stderr if log is None else log.open("a", buffering=1, encoding="utf-8")
    kept = os.dup(1), os.dup(2)
    target = os.dup(2 if log is None else stream.fileno())
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        with redirect_stdout(stream), redirect_stderr(stream):
            yield
    finally:
        for descriptor, number in zip(kept, (1, 2), strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(target)


def plain(value: Any) -> Any:
    """A value for JSON; text for one of the peer's own types, and no home folder in text."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    return value if value is None or type(value) in (bool, int, float) else without_folder(str(value))


def environment(prefix: str) -> dict[str, str]:
    """The peer's environment variables, without secrets."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(prefix) and not name.endswith(("_KEY", "_TOKEN"))
    }
