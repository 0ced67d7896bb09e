"""Answers of ``/v1/chat/completions``."""

from collections.abc import Sequence

from bullet_graph.engine.output import CompletionOutput, RequestOutput
from bullet_graph.serve.formats import TokenTexts, chat_logprobs, to_json, to_json_text


class ChatFormat:
    """Writes answers; see :class:`~bullet_graph.serve.formats.AnswerFormat`.

    Args:
        answer_id: of the answer.
        created_s: when it was asked for, in seconds since 1970.
        model: its served name.
        texts: of single tokens, for log-probabilities.
        with_token_ids: tell token ids, too.
    """

    def __init__(
        self, answer_id: str, created_s: int, model: str, texts: TokenTexts, *, with_token_ids: bool
    ) -> None:
        head = (
            f'{{"id":{to_json_text(answer_id)},"created":{created_s},"model":{to_json_text(model)},"object":'
        )
        self._whole = f'{head}"chat.completion"'
        self._chunk = f'data: {head}"chat.completion.chunk","choices":['
        self._texts = texts
        self._with_token_ids = with_token_ids

    def opening(self, choice: int, usage: str | None) -> bytes:
        """Says whose turn it is."""
        delta = '"delta":{"role":"assistant","content":""}'
        return self._event(f'{{"index":{choice},{delta},"logprobs":null,"finish_reason":null}}', usage)

    def event(self, choice: int, delta: CompletionOutput, usage: str | None) -> bytes:
        """See :meth:`AnswerFormat.event`."""
        content = f'"delta":{{"content":{to_json_text(delta.text)}}}'
        return self._event(f'{{"index":{choice},{content},{self._rest(delta)}}}', usage)

    def usage_event(self, usage: str) -> bytes:
        """See :meth:`AnswerFormat.usage_event`."""
        return self._event("", usage)

    def body(self, outputs: Sequence[RequestOutput], usage: str) -> bytes:
        """See :meth:`AnswerFormat.body`."""
        (output,) = outputs
        choices = [
            f'{{"index":{completion.index},"message":{{"role":"assistant","content":{to_json_text(completion.text)}}},'
            f"{self._rest(completion)}}}"
            for completion in output.outputs
        ]
        ids = f',"prompt_token_ids":{to_json(output.prompt_token_ids)}' if self._with_token_ids else ""
        return f'{self._whole},"choices":[{",".join(choices)}],"usage":{usage}{ids}}}'.encode()

    def _event(self, choice: str, usage: str | None) -> bytes:
        tail = "" if usage is None else f',"usage":{usage}'
        return f"{self._chunk}{choice}]{tail}}}\n\n".encode()

    def _rest(self, delta: CompletionOutput) -> str:
        """Fields that a choice has in a stream and in a whole answer alike."""
        logprobs = "null" if delta.logprobs is None else to_json(chat_logprobs(delta.logprobs, self._texts))
        reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        ids = f',"token_ids":{to_json(delta.token_ids)}' if self._with_token_ids else ""
        return f'"logprobs":{logprobs},"finish_reason":{reason}{ids}'
