"""Dynamo's requests as the engine takes them, and its outputs and events as Dynamo takes those; knows no Dynamo."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.engine.block_pool import BlocksRemoved, BlocksStored
from bullet_graph.engine.output import RequestOutput, TokenLogprobs
from bullet_graph.errors import RequestError
from bullet_graph.sampling_params import SamplingParams, StructuredOutputs

Message = Mapping[str, Any]

_SAME_NAMES = {
    "sampling_options": (
        *("temperature", "top_p", "top_k", "min_p", "seed"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    ),
    "stop_conditions": ("max_tokens", "min_tokens", "stop", "ignore_eos"),
    "output_options": ("logprobs", "prompt_logprobs"),
    "routing": ("cache_salt",),
}
"""Where a request has what SamplingParams calls by the same name. The frontend writes the text."""

_STOP_TOKENS = {"stop_conditions": ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")}
_STRUCTURES = ("json", "regex", "choice", "grammar", "structural_tag")

_NOT_SERVED = {
    # Dynamo's worker ends a request's stream at the end of its first output.
    "sampling_options": ("n", "best_of", "use_beam_search", "length_penalty"),
    "stop_conditions": ("max_thinking_tokens",),
    "": ("multi_modal_data", "prompt_embeds", "prefill_result", "bootstrap_info"),
}
_NOTHING_AT_ONE = ("n", "best_of", "length_penalty")

_LOAD_INTERVAL_S = 0.1
_MOST_EVENTS = 256
"""Events of one batch: the publisher checks a batch as a whole before it sends any of it."""

logger = logging.getLogger(__name__)


def read_request(
    request: Message, *, max_model_len: int, defaults: Mapping[str, Any]
) -> tuple[list[int], SamplingParams]:
    """The prompt's token ids and the sampling settings of a request of Dynamo's frontend.

    ``defaults`` are for what it leaves open; without a limit, an output may be as long as ``max_model_len`` allows.
    Raises RequestError for what the engine does not do, SamplingParamsError for a wrong value.
    """
    for name, value in _given(request, _NOT_SERVED):
        asks_for_nothing = value is None or value is False or value in ([], {})
        if not (asks_for_nothing or (name in _NOTHING_AT_ONE and value == 1)):
            raise RequestError(f"`{name}` is not supported by this worker, found {value!r:.80}: leave it out")
    prompt = [*request["token_ids"]]
    own = {name: value for name, value in _given(request, _SAME_NAMES) if value is not None}
    if "seed" in own:
        own["seed"] %= 2**63  # as on the server: the API's seeds may be negative
    own["stop_token_ids"] = tuple(dict.fromkeys(i for _, ids in _given(request, _STOP_TOKENS) for i in ids or ()))
    own["structured_outputs"] = _structured_outputs((request.get("sampling_options") or {}).get("guided_decoding"))
    room = max(max_model_len - len(prompt), 1)
    # As on the server, min_tokens raises the default.
    limit = min(max(defaults.get("max_tokens", room), own.get("min_tokens", 1)), room)
    return prompt, SamplingParams(**{**defaults, "max_tokens": limit, **own})


def _given(request: Message, wanted: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Any]]:
    """The names wanted of each group of a request, and their values; the group "" is the request itself."""
    for group, names in wanted.items():
        found = (request.get(group) or {}) if group else request
        for name in names:
            yield name, found.get(name)


def _structured_outputs(wanted: Message | None) -> StructuredOutputs | None:
    if wanted is None:
        return None
    if wanted.get("whitespace_pattern") is not None:
        raise RequestError("`whitespace_pattern` is not supported by this worker: leave it out")
    found = {name: wanted[name] for name in _STRUCTURES if wanted.get(name) is not None}
    return StructuredOutputs(**found) if found else None


def write_chunk(output: RequestOutput, num_tokens: int) -> dict[str, Any]:
    """A delta of one output as Dynamo's chunk; ``num_tokens`` are those of the output so far, these included.

    The last chunk has the usage, and the log-probabilities of the prompt.
    """
    (sample,) = output.outputs
    chunk: dict[str, Any] = {"token_ids": list(sample.token_ids), "index": 0}
    if sample.logprobs is not None:
        chunk["log_probs"] = [entry.logprob for entry in sample.logprobs]
        chunk["top_logprobs"] = [
            [{"rank": rank, "token_id": i, "token": None, "logprob": p} for rank, (i, p) in enumerate(entry.top, 1)]
            for entry in sample.logprobs
        ]
    if output.finished:
        num_prompt_tokens = len(output.prompt_token_ids)
        chunk["finish_reason"] = sample.finish_reason
        chunk["completion_usage"] = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        }
        if output.prompt_logprobs is not None:
            chunk["engine_data"] = {"prompt_logprobs": _prompt_logprobs(output.prompt_logprobs)}
    return chunk


CANCELLED: Message = MappingProxyType({"token_ids": [], "index": 0, "finish_reason": "cancelled"})
"""The last chunk of a request that was aborted."""


def _prompt_logprobs(entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    return [
        None
        if entry is None
        else {str(entry.token_id): {"logprob": entry.logprob}}
        | {str(i): {"logprob": p, "rank": rank} for rank, (i, p) in enumerate(entry.top, 1)}
        for entry in entries
    ]


# ---- what the prefix cache holds ----


def hash_of(key: bytes) -> int:
    """The signed 64-bit number that names a block of this worker: the beginning of its key.

    Dynamo's router hashes the token ids of each block by itself.
    """
    return int.from_bytes(key[:8], "little", signed=True)


def event_of(change: BlocksStored | BlocksRemoved) -> Message:
    """A change of the prefix cache as an item of ``publish_batch``."""
    hashes = [hash_of(key) for key in change.keys]
    if isinstance(change, BlocksRemoved):
        return {"type": "removed", "block_hashes": hashes}
    event: dict[str, Any] = {
        "type": "stored",
        "token_ids": change.token_ids.tolist(),
        "num_block_tokens": [KV_BLOCK_TOKENS] * len(hashes),
        "block_hashes": hashes,
        "parent_hash": None if change.parent is None else hash_of(change.parent),
    }
    return event if change.cache_salt is None else event | {"cache_salt": change.cache_salt}


class CacheEvents:
    """Takes changes of the prefix cache from the engine's thread, and publishes them from a thread of its own.

    That thread also calls ``publish_load``, about ten times a second. Both start with :meth:`start`; what came before
    is kept until then.
    """

    def __init__(self, publish_load: Callable[[], None]) -> None:
        self._publish_load = publish_load
        self._changes: queue.SimpleQueue[BlocksStored | BlocksRemoved | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.put = self._changes.put
        """Take a change; a :data:`~bullet_graph.engine.block_pool.CacheListener`."""

    def start(self, publisher: Any) -> None:
        """Begin to publish by Dynamo's ``KvEventPublisher``; with None in its place, the load alone."""
        self._thread = threading.Thread(target=self._run, args=(publisher,), name="bullet-graph-dynamo", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, once it has published what came before."""
        self._changes.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self, publisher: Any) -> None:
        running, load_s = True, 0.0
        while running:
            changes = self._next_changes()
            running = None not in changes
            events = [event_of(change) for change in changes if change is not None]
            try:
                if events and publisher is not None:
                    publisher.publish_batch(events)
                if time.monotonic() >= load_s:
                    self._publish_load()
                    load_s = time.monotonic() + _LOAD_INTERVAL_S
            except Exception:
                # The router then sends some requests to the wrong worker, which answers them all the same.
                logger.exception("%d events of the prefix cache, or the load, could not be published", len(events))

    def _next_changes(self) -> list[BlocksStored | BlocksRemoved | None]:
        """What has come, at most a batch; nothing if none comes in time."""
        changes: list[BlocksStored | BlocksRemoved | None] = []
        try:
            changes.append(self._changes.get(timeout=_LOAD_INTERVAL_S))
            while len(changes) < _MOST_EVENTS:
                changes.append(self._changes.get_nowait())
        except queue.Empty:
            pass
        return changes
