"""JSON schemas at random, of all the keywords that structured outputs follow; their documents are short."""

from collections.abc import Mapping
from random import Random
from typing import Any

Schema = dict[str, Any]

_PATTERNS = (r"^[A-Z]{2}-[0-9]{3}$", r"^(red|green|blue)$", r"^\d{1,3}(\.\d{2})?$", r"^[^\"x]{1,4}$", "^é[à-ü]{0,3}$")
_CONSTANTS = ("on", 'a "quoted"\ntext', "日本", 7, -2.5, None, True, [1, "x"], {"k": [None]})


def random_schema(seed: int) -> Schema:
    """A schema of objects, mostly; every document is some hundred tokens at most."""
    rng = Random(seed)
    schema = _object(rng, depth=3) if rng.random() < 0.7 else _schema(rng, depth=3)
    if rng.random() < 0.3:
        # A list through references: the recursion ends with null.
        node = {"value": _scalar(rng), "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}
        schema = {
            "$defs": {"node": _closed(node), "leaf": _scalar(rng)},
            **_closed({"head": {"$ref": "#/$defs/node"}, "one": {"$ref": "#/$defs/leaf"}, "own": schema}),
        }
    return schema | {"title": f"schema {seed}", "description": "ignored", "default": None}


def _closed(properties: Mapping[str, Schema]) -> Schema:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def _schema(rng: Random, depth: int) -> Schema:
    kind = rng.choice(("scalar", "scalar", "object", "array", "any of", "types") if depth else ("scalar",))
    if kind == "object":
        return _object(rng, depth)
    if kind == "array":
        return _array(rng, depth)
    if kind == "any of":
        return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind == "types":
        return {"type": rng.sample(["null", "boolean", "integer"], k=2), "minimum": 0, "maximum": 99}
    return _scalar(rng)


def _object(rng: Random, depth: int) -> Schema:
    names = rng.sample(["id", "name", "größe", 'with "quotes"', "a b", "tags", "x"], k=rng.randint(1, 4))
    schema = _closed({name: _schema(rng, depth - 1) for name in names})
    # What is not required is left out sometimes.
    schema["required"] = rng.sample(names, k=rng.randint(0, len(names)))
    if rng.random() < 0.2:
        schema = {"type": "object", "additionalProperties": _scalar(rng), "maxProperties": 2}
    elif rng.random() < 0.2:
        schema = {
            "type": "object",
            "patternProperties": {"^p[0-9]$": _scalar(rng)},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 2,
        }
    return schema


def _array(rng: Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    schema: Schema = {"type": "array", "items": _schema(rng, depth - 1), "minItems": least}
    schema["maxItems"] = least + rng.randint(0, 2)
    if rng.random() < 0.3:
        first = [_scalar(rng) for _ in range(rng.randint(1, 2))]
        schema = {"type": "array", "prefixItems": first, "minItems": len(first), "items": False}
    return schema


def _scalar(rng: Random) -> Schema:
    low = rng.randint(-50, 50)
    return rng.choice(
        [
            {"type": "string", "minLength": (least := rng.randint(0, 3)), "maxLength": least + rng.randint(0, 6)},
            {"type": "string", "pattern": rng.choice(_PATTERNS)},
            {"type": "string", "format": rng.choice(("date", "date-time", "ipv4", "ipv6", "uuid"))},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + rng.randint(2, 500)},
            {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": rng.choice((2, 5, 7))},
            {"type": "number", "minimum": low, "maximum": low + 1},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": rng.sample(_CONSTANTS, k=rng.randint(1, 4))},
            {"const": rng.choice(_CONSTANTS)},
        ]
    )
