"""A client for servers with OpenAI's completions interface: ``bullet-graph serve``, ``vllm serve``, SGLang.

Needs aiohttp (extra ``bench``), but none of the server's libraries.
"""

import dataclasses
import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Self

import aiohttp

from bullet_graph.engine.replay import TimedRequest
from bullet_graph.errors import ConfigError, RequestError
from bullet_graph.serve.settings import OWNER
from bullet_graph.slo import NO_TARGETS

_SHOWN_CHARACTERS = 300
# A chunk of many tokens is one long line.
_BUFFER_BYTES = 1 << 20


class OpenAiServer:
    """A connection to a running server. Prompts are token ids; outputs are streamed.

    Forced output lengths need ``ignore_eos``, an extension that vLLM and SGLang know. Only ``bullet-graph serve`` gets
    latency targets. ``settings`` is the server's description of itself.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, settings: Mapping[str, Any]) -> None:
        self._url = url
        self._session = session
        self.settings = settings

    @classmethod
    async def connect(cls, url: str, *, api_key: str | None = None) -> Self:
        """Connect and ask for the server's model and version; ``url`` goes up to ``/v1``.

        Raises ConfigError where there is no such server, or it does not name its model.
        """
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=60),
            read_bufsize=_BUFFER_BYTES,
            headers=None if api_key is None else {"Authorization": f"Bearer {api_key}"},
        )
        try:
            async with session.get(f"{url}/models") as response:
                response.raise_for_status()
                model = (await response.json())["data"][0]
            names, shown = ("max_model_len", "vocab_size", "owned_by"), re.sub(r"//[^/\s]+@", "//***@", url)
            settings = {"url": shown, "model": model["id"]} | {name: model.get(name) for name in names}
            async with session.get(f"{url.removesuffix('/v1')}/version") as response:
                told = await response.json(content_type=None) if response.ok else {}
            settings["version"] = told.get("version") if isinstance(told, dict) else None
        except (aiohttp.ClientError, TimeoutError, LookupError, TypeError, ValueError) as error:
            await session.close()
            raise ConfigError(
                f"openai:{url}: GET {url}/models must list the server's model, got {type(error).__name__}: {error}; "
                "start the server, or correct the URL"
            ) from error
        return cls(url, session, settings)

    async def generate(self, request: TimedRequest) -> AsyncGenerator[Sequence[int], None]:
        """Serve a request; yield the new tokens of each chunk, as zeros unless a later turn needs their ids.

        Raises RequestError where the server refuses, breaks off, or does not report how many tokens a chunk has, or
        their ids if they are needed.
        """
        body = {
            "model": self.settings["model"],
            "prompt": list(request.prompt_token_ids),
            "max_tokens": request.params.max_tokens,
            "temperature": request.params.temperature,
            "ignore_eos": request.params.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if request.is_followed:
            body["return_token_ids"] = True
        if self.settings.get("owned_by") == OWNER and request.slo != NO_TARGETS:
            body["slo"] = {name: value for name, value in dataclasses.asdict(request.slo).items() if value is not None}
        num_seen = 0
        async with self._session.post(f"{self._url}/completions", json=body) as response:
            if not response.ok:
                text = (await response.text())[:_SHOWN_CHARACTERS]
                raise RequestError(f"the server answered {response.status}: {text}")
            async for line in response.content:
                data = line.strip().removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    chunk = json.loads(data)
                    if num_tokens := new_tokens(chunk, num_seen):
                        num_seen += num_tokens
                        yield _new_token_ids(chunk, num_tokens) if request.is_followed else [0] * num_tokens

    async def live(self) -> dict[str, Any]:
        """The figures of a ``bullet-graph serve``'s live page; empty for another server, and for several engines."""
        if self.settings.get("owned_by") != OWNER:
            return {}
        # One engine ignores the name; several refuse it, as none has the figures of all.
        async with self._session.get(f"{self._url.removesuffix('/v1')}/live?replica=all") as response:
            return await response.json() if response.ok else {}

    async def close(self) -> None:
        """Close the connections; the server stays up."""
        await self._session.close()


def _new_token_ids(chunk: Mapping[str, Any], num_tokens: int) -> Sequence[int]:
    token_ids: Sequence[int] = chunk["choices"][0].get("token_ids") or ()
    if len(token_ids) != num_tokens:
        raise RequestError(
            f"the next turn needs the ids of {num_tokens} tokens, the server gave {len(token_ids)}: use one that knows "
            "return_token_ids, or a workload without conversations"
        )
    return token_ids


def new_tokens(chunk: Mapping[str, Any], num_seen: int) -> int:
    """Tokens of a stream's next chunk by its usage (``continuous_usage_stats``), after ``num_seen`` before it.

    Without that, a chunk counts as one token, which the usage at the end must confirm. RequestError if it does not, or
    the chunk is an error.
    """
    if chunk.get("error"):
        raise RequestError(f"the server broke off: {str(chunk['error'])[:_SHOWN_CHARACTERS]}")
    choices, usage = chunk.get("choices"), chunk.get("usage")
    if not choices:
        if usage and usage["completion_tokens"] != num_seen:
            raise RequestError(
                f"the server's chunks held {usage['completion_tokens']} tokens, and {num_seen} were counted: "
                "it must give continuous_usage_stats, or one token a chunk"
            )
        return 0
    if usage:
        return int(usage["completion_tokens"]) - num_seen
    # A closing chunk may bring no token; in a text, a token may be no character yet.
    return 0 if choices[0].get("finish_reason") and not choices[0].get("text") else 1
