"""One sample's text: stop strings, held-back text and deltas, against a naive search."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bullet_graph.engine.output import CompletionOutput, OutputKind
from bullet_graph.engine.request import Request, Sample
from bullet_graph.engine.sequence import Sequence
from bullet_graph.models.tokenizer import DetokenizeStream
from bullet_graph.sampling_params import SamplingParams


class Pieces:
    """A detokenizer that gives token i the i-th piece of text; "~" is an incomplete character."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces
        self.pending = ""

    def push(self, token_id: int) -> str:
        piece = self.pieces[token_id]
        if piece == "~":
            self.pending += "\ufffd"
            return ""
        self.pending = ""
        return piece

    def flush(self) -> str:
        text, self.pending = self.pending, ""
        return text


def make_sample(pieces: list[str], params: SamplingParams, stop_ids: frozenset[int] = frozenset()) -> Sample:
    sequence = Sequence("a", 0, np.zeros(1, dtype=np.int32), params, 0, stop_ids)
    stream: DetokenizeStream = Pieces(pieces)  # type: ignore[assignment]
    return Sample(sequence, stream)


@dataclass(frozen=True)
class Ended:
    num_tokens: int
    text: str
    reason: str | None


def naive(pieces: list[str], params: SamplingParams) -> Ended:
    """Where the text must end: at the first stop string completed by a token after the min_tokens-th."""
    text, pending = "", ""
    for count, piece in enumerate(pieces, start=1):
        before = len(text)
        pending = pending + "\ufffd" if piece == "~" else ""
        text += "" if piece == "~" else piece
        last = count == params.max_tokens
        for candidate in (text, text + pending) if last else (text,):
            starts = [
                at
                for stop in params.stop
                for at in range(len(candidate))
                if candidate.startswith(stop, at) and at + len(stop) > before
            ]
            if count > params.min_tokens and starts:
                return Ended(count, candidate[: min(starts)], "stop")
        if last:
            return Ended(count, text + pending, "length")
    return Ended(len(pieces), text, None)


PIECES = st.lists(st.text("ab", min_size=0, max_size=3) | st.just("~"), min_size=1, max_size=14)
STOPS = st.lists(st.text("ab\ufffd", min_size=1, max_size=5), max_size=3)


@settings(max_examples=400)
@example(pieces=["aa", "b"], stops=["b", "aab"], limits=(9, 0))  # the later one is the longer and comes first
@given(pieces=PIECES, stops=STOPS, limits=st.tuples(st.integers(1, 14), st.integers(0, 14)))
def test_text_ends_where_a_naive_search_says(pieces: list[str], stops: list[str], limits: tuple[int, int]) -> None:
    max_tokens, min_tokens = max(limits), min(limits)
    params = SamplingParams(stop=stops, max_tokens=max_tokens, min_tokens=min_tokens)
    expected = naive(pieces, params)
    sample = make_sample(pieces, params)
    cumulative: list[CompletionOutput] = []
    deltas: list[CompletionOutput] = []
    other = make_sample(pieces, params)
    for token_id in range(expected.num_tokens):
        assert sample.finish_reason is None
        sample.append(token_id, None)
        other.append(token_id, None)
        cumulative.append(sample.report(OutputKind.CUMULATIVE))
        deltas.append(other.report(OutputKind.DELTA))
    final = cumulative[-1]
    assert sample.finish_reason == expected.reason
    if expected.reason is not None:
        assert final.text == expected.text
    assert final.token_ids == tuple(range(expected.num_tokens))
    assert final.logprobs is None
    # What was once shown stays, and nothing is shown that a stop string may still take back.
    for output in cumulative:
        assert expected.text.startswith(output.text)
    assert "".join(delta.text for delta in deltas) == final.text
    assert sum((delta.token_ids for delta in deltas), ()) == final.token_ids
    assert [delta.finish_reason for delta in deltas] == [output.finish_reason for output in cumulative]


@pytest.mark.parametrize(
    ("token_ids", "params"),
    [
        ([0, 1], {"max_tokens": 9}),
        ([0, 1], {"max_tokens": 2}),  # the last token allowed
        ([1, 1, 1], {"max_tokens": 4, "min_tokens": 2}),  # the first two are not looked at
    ],
)
def test_a_stop_token_ends_the_output_and_is_part_of_it(token_ids: list[int], params: dict[str, int]) -> None:
    sample = make_sample(["a", "b", "c"], SamplingParams(**params), frozenset({1}))  # type: ignore[arg-type]
    for token_id in token_ids:
        assert sample.finish_reason is None
        sample.append(token_id, None)
    output = sample.report(OutputKind.CUMULATIVE)
    assert (output.token_ids, output.finish_reason) == (tuple(token_ids), "stop")


@pytest.mark.parametrize("kind", [OutputKind.CUMULATIVE, OutputKind.DELTA])
@pytest.mark.parametrize(("stop", "shown"), [("zzzz", "abc"), ("\ufffd", "abcdef")])  # an abort's text is not searched
def test_an_abort_releases_what_was_held_back(kind: OutputKind, stop: str, shown: str) -> None:
    sample = make_sample(["abcdef", "~"], SamplingParams(stop=stop))
    sample.append(0, None)
    first = sample.report(kind).text
    sample.append(1, None)
    sample.finish("abort")
    last = sample.report(kind)
    assert (first, first + last.text if kind is OutputKind.DELTA else last.text) == (shown, "abcdef\ufffd")
    assert last.finish_reason == "abort"


def test_a_request_is_finished_when_all_its_samples_are() -> None:
    prompt = np.array([7, 8], dtype=np.int32)
    params = [SamplingParams(max_tokens=count, n=2) for count in (1, 2)]
    samples = [Sample(Sequence("r", i, prompt, params[i], 0, frozenset(), arrival_s=1.5), None) for i in (0, 1)]
    request = Request(samples, OutputKind.CUMULATIVE)
    samples[0].append(0, None)
    samples[1].append(0, None)
    assert not request.finished
    samples[1].append(1, None)
    output = request.output()
    assert output.finished
    assert output.prompt_token_ids == (7, 8)
    assert output.metrics.arrival_s == 1.5
    assert [completion.token_ids for completion in output.outputs] == [(0,), (0, 1)]
