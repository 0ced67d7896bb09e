"""Dynamo's requests as the engine takes them, and its outputs as Dynamo takes those; knows no Dynamo."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

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
    stop_ids = dict.fromkeys(i for _, ids in _given(request, _STOP_TOKENS) for i in ids or ())
    structured = _structured_outputs((request.get("sampling_options") or {}).get("guided_decoding"))
    room = {"max_tokens": max(max_model_len - len(prompt), 1)}
    return prompt, SamplingParams(
        **{**room, **defaults, **own}, stop_token_ids=tuple(stop_ids), structured_outputs=structured
    )


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
