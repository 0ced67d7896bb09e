"""Answers of ``/v1/completions``."""

from collections.abc import Sequence

from bullet_graph.engine.output import CompletionOutput, RequestOutput
from bullet_graph.serve.formats import TokenTexts, completion_logprobs, to_json, to_json_text


class CompletionFormat:
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
        self._head = (
            f'{{"id":{to_json_text(answer_id)},"object":"text_completion","created":{created_s},'
            f'"model":{to_json_text(model)},"choices":['
        )
        self._texts = texts
        self._with_token_ids = with_token_ids
        self._offsets: dict[int, int] = {}

    def opening(self, choice: int, usage: str | None) -> bytes:
        """There is none."""
        del choice, usage
        return b""

    def event(self, choice: int, delta: CompletionOutput, usage: str | None) -> bytes:
        """See :meth:`AnswerFormat.event`."""
        tail = "" if usage is None else f',"usage":{usage}'
        return f"data: {self._head}{self._choice(choice, delta)}]{tail}}}\n\n".encode()

    def usage_event(self, usage: str) -> bytes:
        """See :meth:`AnswerFormat.usage_event`."""
        return f'data: {self._head}],"usage":{usage}}}\n\n'.encode()

    def body(self, outputs: Sequence[RequestOutput], usage: str) -> bytes:
        """See :meth:`AnswerFormat.body`."""
        choices = [
            self._choice(index * len(output.outputs) + completion.index, completion, output.prompt_token_ids)
            for index, output in enumerate(outputs)
            for completion in output.outputs
        ]
        return f'{self._head}{",".join(choices)}],"usage":{usage}}}'.encode()

    def _choice(self, choice: int, delta: CompletionOutput, prompt: Sequence[int] | None = None) -> str:
        logprobs = "null"
        if delta.logprobs is not None:
            fields, self._offsets[choice] = completion_logprobs(
                delta.logprobs, self._texts, self._offsets.get(choice, 0)
            )
            logprobs = to_json(fields)
        reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        ids = f',"token_ids":{to_json(delta.token_ids)}' if self._with_token_ids else ""
        if self._with_token_ids and prompt is not None:
            ids += f',"prompt_token_ids":{to_json(prompt)}'
        text = to_json_text(delta.text)
        return f'{{"index":{choice},"text":{text},"logprobs":{logprobs},"finish_reason":{reason}{ids}}}'
