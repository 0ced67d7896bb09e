"""JSON files of a Hugging Face model folder, read key by key; errors name file, key, value and what is required."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from bullet_graph.errors import ModelError, UnsupportedModelError

T = TypeVar("T", bool, int, float, dict[str, Any])

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

    def read(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value: a bool, an int of at least 1, a finite float above 0 (an int counts), or a dict."""
        value = default if self.get(key) is None else self.get(key)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (kind in (int, float) and not 0 < value < math.inf):
            self.fail(key, _REQUIRED[kind])
        return value

    def nested(self, key: str) -> "JsonObject":
        return JsonObject(self.path, self.read(key, dict), f"{self.prefix}{key}.", self.error)

    def refuse(self, *keys: str) -> None:
        """Raise UnsupportedModelError if one of these switches is on."""
        for key in keys:
            if self.read(key, bool, default=False):
                self.fail(key, "false: it is not implemented", UnsupportedModelError)

    def fail(self, key: str, required: str, error: type[ModelError] | None = None) -> NoReturn:
        """Raise ``error`` (None: the object's own) with the file, the key, and the required and found values."""
        found = repr(self.values[key]) if key in self.values else "no such key"
        raise (error or self.error)(f"{self.path}: {self.prefix}{key} must be {required}; found {found}")


def read_json_object(path: Path, error: type[ModelError] = ModelError) -> JsonObject:
    """Read a JSON file whose top level is an object; raises ``error`` for any other file."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as cause:
        raise error(f"{path} is missing; a Hugging Face model folder must hold it") from cause
    except OSError as cause:
        raise error(f"{path} cannot be read: {cause}") from cause
    except ValueError as cause:
        raise error(f"{path} is not valid JSON ({cause}); download it again") from cause
    if not isinstance(values, dict):
        raise error(f"{path} must hold a JSON object; found {type(values).__name__}")
    return JsonObject(path, values, error=error)
