"""The project's exceptions: each message names what was required, what was found and what to do.

Errors that the caller can mend also derive from :class:`ValueError`. The command line turns every
:class:`BulletGraphError` into exit code 2.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class BulletGraphError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(BulletGraphError, ValueError):
    """An engine or command setting is wrong, or two settings contradict each other."""


class DeviceError(BulletGraphError, RuntimeError):
    """The requested device, or a library that it needs, is missing."""


class InsufficientMemoryError(BulletGraphError, RuntimeError):
    """The memory ledger does not fit the device; the message says by how much and which setting to change."""


class ModelError(BulletGraphError, ValueError):
    """A model folder, its config.json, its weights or its tokenizer cannot be used."""


class UnsupportedModelError(ModelError):
    """The architecture, or a feature of it, is not implemented."""


class CheckpointError(ModelError):
    """A safetensors file is missing or broken, or a tensor in it is not what config.json calls for."""


class PartitionError(BulletGraphError, RuntimeError):
    """An SM partition is impossible on this machine, or was not honoured; the message names the SMs seen."""


class PerfTableError(BulletGraphError, ValueError):
    """A performance table is missing, damaged, incomplete, or was measured under other conditions."""


class PerfTableWarning(UserWarning):
    """A policy has no performance table to predict from, or one of other library versions; the message says which."""


class CacheError(BulletGraphError, ValueError):
    """A capture cache is damaged, does not fit, is in use, or cannot be written; the message names the part."""


class CaptureCacheWarning(UserWarning):
    """A capture cache, or a part of it, is not used; the message says why and what happens instead."""


class RequestError(BulletGraphError, ValueError):
    """One request is wrong; other requests are not affected."""


class SamplingParamsError(RequestError):
    """A sampling parameter is out of range."""


class PromptError(RequestError):
    """A prompt is empty, too long, or holds a token id outside the vocabulary."""


class LateError(BulletGraphError, RuntimeError):
    """A request is refused, as its first token would come too late; ``wait_s`` is the predicted TTFT."""

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class WorkloadError(BulletGraphError, ValueError):
    """A trace or data set cannot be read; the message gives the file and the line or record number."""


class TraceError(BulletGraphError, ValueError):
    """A decision trace cannot be read or written; the message gives the file and, if it has one, the line."""


class EngineDeadError(BulletGraphError, RuntimeError):
    """The engine was shut down, or failed earlier; the original error is the cause."""


class RankError(BulletGraphError, RuntimeError):
    """A rank of tensor parallelism failed, ended or hangs; the message names it. The engine cannot go on."""


@contextmanager
def io_errors(doing: str, kind: type[BulletGraphError] = CacheError) -> Iterator[None]:
    """Turn an OSError of the block into an error of this kind that begins with ``doing``."""
    try:
        yield
    except OSError as error:
        raise kind(f"{doing}: {error}") from error


def first_problem(error: "ValidationError") -> str:
    """The first of the problems that pydantic found in a record: the field, what was required and what was found."""
    problem = error.errors()[0]
    if problem["type"] == "value_error":
        # One of ours: it says all of this.
        return str(problem["ctx"]["error"])
    field = ".".join(map(str, problem["loc"]))
    return f"{field}{': ' if field else ''}{problem['msg']}, found {problem['input']!r:.80}"
