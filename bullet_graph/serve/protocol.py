"""Requests and answers of OpenAI's interface, with vLLM's extensions and ours.

Docstrings and answer types make the OpenAPI description; ``formats.py`` writes the answers.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from bullet_graph.sampling_params import MAX_BIASED_TOKENS, MAX_LOGPROBS, MAX_TEMPERATURE, SamplingParams

MAX_OUTPUTS = 128
"""Most outputs of a request (``n`` times its prompts); OpenAI limits ``n`` to the same number."""

OWN_ERROR = "request"
"""Type of validation errors whose message is complete."""

_MOST_FIELDS = 100
"""Fields of any object of a request."""

_HARMLESS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "session_id"}
    | {"prompt_cache_retention", "cache_salt", "truncation_side", "return_mm_kwargs", "return_token_offsets"}
)
"""Fields without effect on the answer: accepted and ignored."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    name: values
    for names, values in (
        ("audio prediction reasoning_effort verbosity web_search_options", ()),
        ("allowed_token_ids chat_template logprob_token_ids prompt_embeds prompt_logprobs request_id", ()),
        ("guided_choice guided_grammar guided_json guided_regex structural_tag structured_outputs", ()),
        ("guided_decoding_backend guided_whitespace_pattern repetition_detection truncate_prompt_tokens", ()),
        ("echo include_stop_str_in_output return_tokens_as_token_ids use_beam_search watermarking", (False,)),
        ("skip_special_tokens spaces_between_special_tokens", (True,)),
        ("priority routed_experts_prompt_start", (0,)),
        ("best_of length_penalty stream_interval", (1,)),
        ("functions logits_processors tools", ([],)),
        ("ec_transfer_params kv_transfer_params vllm_xargs", ({},)),
        ("parallel_tool_calls", (True, False)),
        ("thinking_token_budget", (-1,)),
        ("function_call tool_choice", ("none",)),
        ("modalities", (["text"],)),
        ("response_format", ({"type": "text"},)),
        ("suffix", ("",)),
    )
    for name in names.split()
}
"""Fields of OpenAI's and vLLM's interfaces that this server lacks, and their values that ask for nothing."""


class _Strict(BaseModel):
    # Unknown fields are refused: a client would believe that an ignored field has an effect.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, data: Any) -> Any:
        # Each unknown field would be an error of its own.
        if isinstance(data, dict) and len(data) > _MOST_FIELDS:
            raise PydanticCustomError(
                OWN_ERROR,
                "an object may have at most {most} fields here, found {found}: leave out the unknown ones",
                {"most": _MOST_FIELDS, "found": len(data)},
            )
        return data


class Targets(_Strict):
    """Latency targets of one request, in milliseconds; the server's replace those that are missing."""

    ttft_ms: Annotated[float, Field(gt=0, le=1e9)] | None = None
    ttft_ms_per_token: Annotated[float, Field(gt=0, le=1e9)] | None = None
    tpot_ms: Annotated[float, Field(gt=0, le=1e9)] | None = None


class StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


T = TypeVar("T")
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
BiasedId = Annotated[int, Field(ge=0, lt=2**31, strict=False)]
"""A token id as a key of JSON, which is a text."""
Bias = Annotated[float, Field(ge=-100, le=100)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
Few = Annotated[list[T], Field(min_length=1, max_length=MAX_OUTPUTS, fail_fast=True)]
Many = Annotated[list[T], Field(min_length=1, fail_fast=True)]
"""Only the first wrong item is told: there may be millions."""


TemplateKwargs = Annotated[
    dict[str, Any],
    Field(
        max_length=_MOST_FIELDS,
        description="Variables of the model's chat template, such as enable_thinking.",
    ),
]


class _Request(_Strict):
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = _NEUTRAL

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict) or len(data) > _MOST_FIELDS:
            return data
        for name, neutral in cls.neutral.items():
            value = data.get(name)
            # JSON's true equals Python's 1.
            if value is not None and not any(
                value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral
            ):
                raise PydanticCustomError(
                    OWN_ERROR,
                    "`{field}` is not supported by this server: leave it out{neutral}",
                    {"field": name, "neutral": "".join(f", or give {json.dumps(v)}" for v in neutral[:1])},
                )
        return {name: value for name, value in data.items() if name not in cls.neutral.keys() | _HARMLESS}


class GenerationRequest(_Request):
    """The fields of both kinds of request; null means the default."""

    default_tokens: ClassVar[int | None] = None
    """Output limit of requests that name none; None: the model's limit."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_OUTPUTS)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] | None = None
    logit_bias: Annotated[dict[BiasedId, Bias], Field(max_length=MAX_BIASED_TOKENS)] | None = None
    bad_words: Annotated[list[StopText], Field(max_length=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(
        default=None, description="Also return the token ids of prompt and output."
    )
    slo: Targets | None = Field(default=None, description="Latency targets of this request.")

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                OWN_ERROR, "`stream_options` are for streams: leave them out, or set `stream` to true"
            )
        return self

    @property
    def num_outputs(self) -> int:
        """Sequences to generate."""
        return self.n or 1

    @property
    def wanted_tokens(self) -> int | None:
        """Most tokens to generate; None: the server decides."""
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives to report per token; None: no log-probabilities."""
        raise NotImplementedError

    def sampling_params(self, max_tokens: int) -> SamplingParams:
        """The engine's settings for one prompt; SamplingParamsError if they contradict each other."""
        names = SamplingParams.__dataclass_fields__.keys() - {"max_tokens", "logprobs"}
        given = self.model_dump(include=set(names), exclude_none=True)
        if self.seed is not None:
            given["seed"] = self.seed % 2**63
        return SamplingParams(**given, max_tokens=max_tokens, logprobs=self.wanted_logprobs)


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    default_tokens = 16  # OpenAI's
    neutral = {**_NEUTRAL, "add_special_tokens": (True,)}

    prompt: str | Many[TokenId] | Few[str] | Few[Many[TokenId]] = Field(
        description="A text, token ids, or a list of either.", examples=["The sea"]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _outputs_are_not_too_many(self) -> "CompletionRequest":
        if self.num_outputs > MAX_OUTPUTS:
            raise PydanticCustomError(
                OWN_ERROR,
                "a request may have at most {most} outputs, found {prompts} prompts with `n`={n}: send several",
                {"most": MAX_OUTPUTS, "prompts": len(self.prompts), "n": self.n or 1},
            )
        return self

    @property
    def num_outputs(self) -> int:
        return len(self.prompts) * (self.n or 1)

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, at least one."""
        prompt = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)


class _Said(BaseModel):
    # Clients send messages back with whatever servers have added to them.
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class TextPart(_Said):
    type: Literal["text"]
    text: str


class Message(_Said):
    """One turn of a conversation; only an assistant's ``content`` may be null."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Many[TextPart] | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError(OWN_ERROR, "a message's `content` is required", {"field": "messages"})
        return self

    def for_template(self) -> dict[str, str]:
        """The form of chat templates; ``developer`` is OpenAI's newer name of ``system``."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content} | ({} if self.name is None else {"name": self.name})


class ChatCompletionRequest(GenerationRequest):
    """``POST /v1/chat/completions``."""

    neutral = {
        **_NEUTRAL,
        **dict.fromkeys(("add_special_tokens", "continue_final_message", "return_prompt_text"), (False,)),
        **dict.fromkeys(("add_generation_prompt", "include_reasoning"), (True,)),
        **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs"), ({},)),
        "documents": ([],),
    }

    messages: Many[Message] = Field(examples=[[{"role": "user", "content": "Why is the sea salt?"}]])
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(OWN_ERROR, "`top_logprobs` needs `logprobs` set to true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise PydanticCustomError(
                OWN_ERROR, "`max_tokens` is the old name of `max_completion_tokens`: give one of them"
            )
        return self

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(_Request):
    """``POST /tokenize``: a text as ``prompt``, or a conversation as ``messages``; null means the default."""

    neutral = {
        name: values
        for name, values in ChatCompletionRequest.neutral.items()
        if name not in ("add_generation_prompt", "add_special_tokens")
    }

    prompt: str | None = Field(default=None, examples=["The sea"])
    messages: Many[Message] | None = None
    add_special_tokens: bool | None = Field(default=None, description="By default only around a text.")
    add_generation_prompt: bool | None = Field(default=None, description="End with what opens an answer.")
    chat_template_kwargs: TemplateKwargs | None = None
    return_token_strs: bool | None = Field(default=None, description="Also return the tokens' own names.")

    @model_validator(mode="after")
    def _has_one_text(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError(OWN_ERROR, "either `prompt` or `messages` is required")
        return self


class DetokenizeRequest(_Request):
    """``POST /detokenize``."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True, examples=[[72, 105]])]


# ---- answers ----


class Tokens(BaseModel):
    """The answer of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class Text(BaseModel):
    """The answer of ``/detokenize``."""

    prompt: str


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    """The answer of ``/v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorInfo


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


def answers(model: Any, *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """A path's possible answers for OpenAPI: this model, events if it streams, or an error."""
    success: dict[str, Any] = {"model": model}
    if streams:
        success["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    error = {"model": ErrorAnswer, "description": "An error"}
    return {200: success, "4XX": error, "5XX": error}
