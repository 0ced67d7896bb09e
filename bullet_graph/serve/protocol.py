"""Requests of OpenAI's interface, with vLLM's extensions and ours; docstrings are in the OpenAPI description."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bullet_graph.errors import SamplingParamsError
from bullet_graph.sampling_params import MAX_BIASES, MAX_LOGPROBS, MAX_TEMPERATURE, SamplingParams, StructuredOutputs
from bullet_graph.serve.messages import Many, Message, NamedTool, T, Tool, Tools
from bullet_graph.serve.tools import forced_calls

MAX_OUTPUTS = 128
"""Most outputs of a request (``n`` times its prompts); OpenAI limits ``n`` to the same number."""

_MOST_FIELDS = 100
"""Fields of any object of a request."""

_HARMLESS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "session_id"}
    | {"request_id", "prompt_cache_retention", "truncation_side", "return_mm_kwargs", "return_token_offsets"}
)
"""Fields without effect on the answer: accepted and ignored."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    name: values
    for names, values in (
        ("audio prediction reasoning_effort verbosity web_search_options", ()),
        ("allowed_token_ids chat_template logprob_token_ids prompt_embeds truncate_prompt_tokens", ()),
        ("guided_decoding_backend guided_whitespace_pattern repetition_detection structural_tag", ()),
        ("include_stop_str_in_output return_tokens_as_token_ids use_beam_search watermarking", (False,)),
        ("spaces_between_special_tokens", (True,)),
        ("priority routed_experts_prompt_start", (0,)),
        ("best_of length_penalty stream_interval", (1,)),
        ("functions logits_processors", ([],)),
        ("ec_transfer_params kv_transfer_params vllm_xargs", ({},)),
        ("thinking_token_budget", (-1,)),
        ("function_call", ("none",)),
        ("modalities", (["text"],)),
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
            raise ValueError(
                f"an object may have at most {_MOST_FIELDS} fields here, found {len(data)}: leave out the unknown ones"
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
    include_obfuscation: Literal[False] | None = Field(default=None, description="Events are never padded.")


class JsonSchema(_Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(default=None, description="The schema is always followed.")


class ResponseFormat(_Strict):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    @model_validator(mode="after")
    def _of_one_type(self) -> "ResponseFormat":
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError("type json_schema needs json_schema, and no other type has it")
        if self.type != "structural_tag" and (self.structures is not None or self.triggers is not None):
            raise ValueError("only structural_tag has structures and triggers")
        return self

    @property
    def structured_outputs(self) -> StructuredOutputs | None:
        """What the engine is to follow; None for free text."""
        if self.type == "json_schema":
            return StructuredOutputs(json=None if self.json_schema is None else self.json_schema.schema_)
        if self.type == "structural_tag":
            return StructuredOutputs(structural_tag=self.model_dump(include={"structures", "triggers"}))
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


class StructuredOutputsField(_Strict):
    """What the output has to be, by exactly one of these."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
BiasedId = Annotated[int, Field(ge=0, lt=2**31, strict=False)]
"""A token id as a key of JSON, which is a text."""
Bias = Annotated[float, Field(ge=-100, le=100)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
Few = Annotated[list[T], Field(min_length=1, max_length=MAX_OUTPUTS, fail_fast=True)]
TemplateKwargs = Annotated[
    dict[str, Any],
    Field(max_length=_MOST_FIELDS, description="Variables of the model's chat template, such as enable_thinking."),
]


class _Request(_Strict):
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = _NEUTRAL

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict) or len(data) > _MOST_FIELDS:
            return data
        # The best n of n are all of them.
        for name, neutral in {**cls.neutral, "best_of": (1, data.get("n"))}.items():
            is_bool = isinstance(value := data.get(name), bool)  # JSON's true equals Python's 1
            if value is not None and not any(value == v and isinstance(v, bool) == is_bool for v in neutral):
                instead = "".join(f", or give {json.dumps(v)}" for v in neutral[:1])
                raise ValueError(f"`{name}` is not supported by this server: leave it out{instead}")
        return {name: value for name, value in data.items() if name not in cls.neutral.keys() | _HARMLESS}


class GenerationRequest(_Request):
    """The fields of both kinds of request; null means the default."""

    default_tokens: ClassVar[int | None] = None
    """Output limit of requests that name none; None: the model's limit."""
    echo: bool | None = None

    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
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
    skip_special_tokens: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] | None = None
    logit_bias: Annotated[dict[BiasedId, Bias], Field(max_length=MAX_BIASES)] | None = None
    bad_words: Annotated[list[StopText], Field(max_length=128)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(default=None, description="Also return the token ids of prompt and output.")
    slo: Targets | None = Field(default=None, description="Latency targets of this request.")
    cache_salt: Annotated[str, Field(min_length=1, max_length=1000)] | None = Field(
        default=None, description="Only requests with the same salt share cached prefixes."
    )

    @model_validator(mode="after")
    def _fields_fit(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` are for streams: leave them out, or set `stream` to true")
        if self.wanted_tokens == 0 and self.prompt_logprobs is None and not self.echo:
            raise ValueError(
                "`max_tokens` of 0 is for prompts alone: give `echo` or `prompt_logprobs`, or ask for 1 token or more"
            )
        if self.stream and self.wanted_prompt_logprobs is not None:
            raise ValueError(
                "`stream` has no log-probabilities of the prompt: set it to false, or leave out `prompt_logprobs`, and "
                "`echo` beside `logprobs`"
            )
        return self

    @property
    def wanted_structure(self) -> StructuredOutputs | None:
        """What the output has to be; SamplingParamsError if that is said twice."""
        fields = {} if self.structured_outputs is None else self.structured_outputs.model_dump(by_alias=True)
        guided = {k: getattr(self, f"guided_{k}") for k in ("json", "regex", "choice", "grammar")}
        wanted = [
            None if self.response_format is None else self.response_format.structured_outputs,
            None if self.structured_outputs is None else StructuredOutputs(**fields),
            *(StructuredOutputs(**{k: value}) for k, value in guided.items() if value is not None),
        ]
        found = [structured for structured in wanted if structured is not None]
        if len(found) > 1:
            raise SamplingParamsError(
                "`structured_outputs`, `response_format` and `guided_…` exclude each other: give only one of them"
            )
        return found[0] if found else None

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

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """The same of the prompt's tokens."""
        counts = self.prompt_logprobs, self.wanted_logprobs if self.echo else None
        return max((count for count in counts if count is not None), default=None)

    def sampling_params(self, max_tokens: int, defaults: Mapping[str, Any]) -> SamplingParams:
        """The engine's settings for one prompt, with the model's ``defaults`` for fields that the request leaves out.

        Raises SamplingParamsError if they contradict each other.
        """
        own = {
            "max_tokens": max_tokens,
            "logprobs": self.wanted_logprobs,
            "prompt_logprobs": self.wanted_prompt_logprobs,
            "structured_outputs": self.wanted_structure,
        }
        names = SamplingParams.__dataclass_fields__.keys() - own.keys()
        given = {**defaults, **self.model_dump(include=set(names), exclude_none=True)}
        if self.seed is not None:
            given["seed"] = self.seed % 2**63
        return SamplingParams(**given | own)


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
            raise ValueError(
                f"a request may have at most {MAX_OUTPUTS} outputs, found {len(self.prompts)} prompts with "
                f"`n`={self.n or 1}: send several"
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
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)


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
    echo: Literal[False] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        default=None, description="By default auto, where there are tools; one that must be called, or `required`."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="False: at most one call.")
    chat_template_kwargs: TemplateKwargs | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs` set to true")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ValueError("`max_tokens` is the old name of `max_completion_tokens`: give one of them")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("`tools` must have different names")
        if self.required_tools == {}:
            raise ValueError("`tool_choice` asks for a tool that `tools` lacks: add it there")
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """What the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def required_tools(self) -> dict[str, dict[str, Any]] | None:
        """The schemas of those of which one must be called, by name; None where none must."""
        if self.tool_choice != "required" and not isinstance(self.tool_choice, NamedTool):
            return None
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        functions = [tool.function for tool in self.offered_tools]
        return {each.name: each.parameters or {} for each in functions if named in (None, each.name)}

    @property
    def wanted_structure(self) -> StructuredOutputs | None:
        given = super().wanted_structure
        if given is not None and self.offered_tools:
            raise SamplingParamsError(
                "`tools` may be called, so an answer of another form cannot be asked for: leave out one of them, or "
                'set `tool_choice` to "none"'
            )
        if self.required_tools is None:
            return given
        parallel = self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool)
        return StructuredOutputs(json=forced_calls(self.required_tools, parallel=parallel))

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(_Request):
    """``POST /tokenize``: a text as ``prompt``, or a conversation as ``messages``; null means the default."""

    neutral = {k: v for k, v in ChatCompletionRequest.neutral.items() if not k.startswith("add_")}

    prompt: str | None = Field(default=None, examples=["The sea"])
    messages: Many[Message] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = Field(default=None, description="By default only around a text.")
    add_generation_prompt: bool | None = Field(default=None, description="End with what opens an answer.")
    chat_template_kwargs: TemplateKwargs | None = None
    return_token_strs: bool | None = Field(default=None, description="Also return the tokens' own names.")

    @model_validator(mode="after")
    def _has_one_text(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("`prompt` or `messages` is required, and not both")
        return self


class DetokenizeRequest(_Request):
    """``POST /detokenize``."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True, examples=[[72, 105]])]
