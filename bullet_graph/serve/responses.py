"""Answers as the server's OpenAPI description has them; the answers themselves are put together by hand, for speed."""

from typing import Any, Literal

from pydantic import BaseModel


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a completion's tokens."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One output."""

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
    """One alternative."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """One token and its alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a message's tokens."""

    content: list[TokenLogprob]


class AssistantMessage(BaseModel):
    """What the model said."""

    role: Literal["assistant"]
    content: str


class ChatChoice(BaseModel):
    """One output."""

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
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The answer of a request that is refused, or fails."""

    error: ErrorInfo


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int


class ModelList(BaseModel):
    """The models that are served: one."""

    object: Literal["list"]
    data: list[Model]


class Health(BaseModel):
    """Whether the engine lives."""

    status: Literal["ok"]


class Version(BaseModel):
    """The program's version."""

    version: str


def answers(model: type[BaseModel], *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """What a path may answer: this model, events where it streams, or an error."""
    success: dict[str, Any] = {"model": model}
    if streams:
        success["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    error = {"model": ErrorAnswer, "description": "An error"}
    return {200: success, "4XX": error, "5XX": error}
