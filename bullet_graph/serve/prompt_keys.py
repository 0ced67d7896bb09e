"""Keys of a request's prompt, by which a router knows which engine holds its beginning."""

import hashlib
from typing import Any

from pydantic_core import from_json, to_json

_CHARACTERS, _TOKENS = 64, 16
"""Of one block of a prefix: about a KV block of 16 tokens."""
_MOST_BLOCKS = 2048
"""Of a request: later ones decide nothing."""


def prompt_keys(body: bytes) -> list[bytes]:
    """A key for each block of a request's prompt, which stands for the prompt up to its end; none for other bodies.

    The first follows ``cache_salt``, tools and template variables, as requests that differ there share no KV blocks.
    """
    try:
        request = from_json(body)
    except ValueError:
        return []
    if not isinstance(request, dict):
        return []
    prompt, messages = request.get("prompt"), request.get("messages")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    parts: list[bytes] = []
    if isinstance(prompt, list):
        parts = [to_json(prompt[i : i + _TOKENS]) for i in range(0, len(prompt) - _TOKENS + 1, _TOKENS)]
    else:
        text = prompt if isinstance(prompt, str) else ""
        if isinstance(messages, list):
            said = (each if isinstance(each, dict) else {} for each in messages)
            text = "".join(f"[{each.get('role')}]{_text(each.get('content'))}" for each in said)
        ends = range(0, min(len(text), _MOST_BLOCKS * _CHARACTERS) - _CHARACTERS + 1, _CHARACTERS)
        parts = [text[i : i + _CHARACTERS].encode("utf-8", "surrogatepass") for i in ends]
    shared = [request.get(name) for name in ("cache_salt", "tools", "chat_template_kwargs")]
    key, keys = to_json([*shared, prompt is None]), list[bytes]()
    for part in parts[:_MOST_BLOCKS]:
        key = hashlib.blake2b(key + part, digest_size=16).digest()
        keys.append(key)
    return keys


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
