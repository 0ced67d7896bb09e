"""Files of a Hugging Face model folder; JSON is read key by key: errors name file, key, value and what is required.

A model folder may come from anybody: what is read from it is bounded, and every error is a ModelError.
"""

import json
import math
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from bullet_graph.errors import ModelError, UnsupportedModelError
from bullet_graph.files import open_regular

MAX_FILE_BYTES = 256 * 1024**2
"""Most bytes of a file that is read as a whole; the largest tokenizer published has about 35 MB."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100

T = TypeVar("T", bool, int, float, dict[str, Any])

MAX_INT = 2**31 - 1

_REQUIRED: Mapping[type, str] = {
    bool: "true or false",
    int: "an integer of at least 1",
    float: "a finite number above 0",
    dict: "an object",
}


@dataclass(frozen=True, slots=True)
class JsonObject:
    """An object of a JSON file; null counts as missing, as in Hugging Face's libraries.

    ``prefix`` precedes its keys in messages, such as ``rope_scaling.``; a wrong value raises ``error``.
    """

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""
    error: type[ModelError] = ModelError

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def read(self, key: str, kind: type[T], default: T | None = None, *, at_most: int | None = None) -> T:
        """The value: a bool, an int of at least 1, a finite float above 0 (an int counts), or a dict.

        ``at_most`` bounds an int; None: by what 32 bits hold.
        """
        value = default if self.get(key) is None else self.get(key)
        if kind is float and type(value) is int and abs(value) < 2**63:
            value = float(value)
        if type(value) is not kind or (kind in (int, float) and not 0 < value < math.inf):
            self.fail(key, _REQUIRED[kind])
        limit = MAX_INT if at_most is None else at_most
        if kind is int and value > limit:
            self.fail(key, f"at most {limit}")
        return value

    def read_floats(self, key: str, count: int) -> tuple[float, ...]:
        """A list of ``count`` finite floats above 0."""
        values = self.get(key)
        if not isinstance(values, list) or len(values) != count:
            self.fail(key, f"a list of {count} numbers")
        entries = replace(self, values={f"{key}[{i}]": value for i, value in enumerate(values)})
        return tuple(entries.read(name, float) for name in entries.values)

    def with_defaults(self, **defaults: object) -> "JsonObject":
        """The object with a value for each of these keys that is missing."""
        return self.with_values(**{key: value for key, value in defaults.items() if self.get(key) is None})

    def with_values(self, /, **values: object) -> "JsonObject":
        """The object with these values, whatever it has for their keys; None: as if the key were missing."""
        return replace(self, values={**self.values, **values})

    def nested(self, key: str) -> "JsonObject":
        return JsonObject(self.path, self.read(key, dict), f"{self.prefix}{key}.", self.error)

    def refuse(self, *keys: str) -> None:
        """Raise UnsupportedModelError if one of these switches is on."""
        for key in keys:
            if self.read(key, bool, default=False):
                self.fail(key, "false: it is not implemented", UnsupportedModelError)

    def fail(self, key: str, required: str, error: type[ModelError] | None = None) -> NoReturn:
        """Raise ``error`` (None: the object's own) with the file, the key, and the required and found values."""
        found = _SHORT.repr(self.values[key]) if key in self.values else "no such key"
        raise (error or self.error)(f"{self.path}: {self.prefix}{key} must be {required}; found {found}")


def read_model_file(path: Path, error: type[ModelError] = ModelError) -> bytes:
    """The content of a regular file; links are followed, since a hub's cache holds links.

    Raises ``error`` where the file is missing, unreadable, a pipe or a device, or above ``MAX_FILE_BYTES``.
    """
    try:
        with open_regular(path, follow_links=True) as file:
            content, num_bytes = file.read(MAX_FILE_BYTES + 1), os.fstat(file.fileno()).st_size
    except FileNotFoundError as cause:
        raise error(f"{path} is missing; a Hugging Face model folder must hold it") from cause
    except OSError as cause:
        raise error(f"{path} cannot be read: {cause}") from cause
    if len(content) > MAX_FILE_BYTES:
        raise error(f"{path} must have at most {MAX_FILE_BYTES} bytes; found {num_bytes}")
    return content


def read_json_object(path: Path, error: type[ModelError] = ModelError) -> JsonObject:
    """Read a JSON file whose top level is an object; raises ``error`` for any other file."""
    content = read_model_file(path, error)
    try:
        values = json.loads(content)
    except RecursionError as cause:
        raise error(f"{path} is nested too deeply for JSON of a model; download it again") from cause
    except ValueError as cause:
        raise error(f"{path} is not valid JSON ({cause}); download it again") from cause
    if not isinstance(values, dict):
        raise error(f"{path} must hold a JSON object; found {type(values).__name__}")
    return JsonObject(path, values, error=error)
