"""Messages and tools of a conversation: as clients send them, and as chat templates take them."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import from_json

from bullet_graph.errors import PromptError

_MOST_TOOLS = 128
"""Tools of a request, and calls of a message; OpenAI's limit."""

T = TypeVar("T")
Many = Annotated[list[T], Field(min_length=1, fail_fast=True)]
"""Only the first wrong item is told: there may be millions."""


class _Said(BaseModel):
    # Clients send messages back with whatever servers have added to them.
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class TextPart(_Said):
    type: Literal["text"]
    text: str


class RefusalPart(_Said):
    type: Literal["refusal"]
    text: str = Field(alias="refusal")


ToolName = Annotated[str, Field(min_length=1, max_length=128)]


class NamedFunction(_Said):
    name: ToolName


class Function(NamedFunction):
    """What a model may call; ``parameters`` is a JSON schema of an object."""

    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Said):
    type: Literal["function"]
    function: Function


class NamedTool(_Said):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(_Said):
    name: str
    arguments: str = Field(description="The text of a JSON object.")


class ToolCall(_Said):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """The form of chat templates, whose arguments are objects; PromptError where they are none."""
        text = self.function.arguments
        try:
            arguments = from_json(text or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise PromptError(f"`messages`: arguments of a tool call must be a JSON object's text, found {text!r:.80}")
        function = {"name": self.function.name, "arguments": arguments}
        return ({} if self.id is None else {"id": self.id}) | {"type": "function", "function": function}


class Message(_Said):
    """One turn of a conversation; only an assistant's ``content`` may be null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[TextPart | RefusalPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=_MOST_TOOLS)] | None = None
    tool_call_id: str | None = Field(default=None, description="The call that a tool's message answers.")

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"`content` is required of role {self.role}")
        return self

    def for_template(self) -> dict[str, Any]:
        """The form of chat templates; ``developer`` is OpenAI's newer name of ``system``. Raises PromptError."""
        content = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        message |= self.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
        # Templates ask whether the key is there.
        return message | ({"tool_calls": [call.for_template() for call in self.tool_calls]} if self.tool_calls else {})


Tools = Annotated[list[Tool], Field(max_length=_MOST_TOOLS, description="What the model may call.")]
