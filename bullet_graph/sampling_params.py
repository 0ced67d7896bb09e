"""How a request's tokens are sampled; the names are those of vLLM."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bullet_graph.errors import SamplingParamsError

MAX_LOGPROBS = 20
"""Most alternatives a request may ask for at each position."""

MAX_SAMPLES = 16_384
"""Most outputs of a prompt, as in vLLM: each takes memory before it runs."""

MAX_MASKED_TOKEN_IDS = 16
"""Most token ids that ``min_tokens`` can keep from being sampled: the room of a device slot."""

MAX_BIASES = 1023
"""Most token ids with a bias: the room of a device slot."""

MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 256, 17
"""Most bad words of two or more tokens, and most tokens of each: the room of a device slot."""

SCORED_ROWS = 64
"""Rows whose log-probabilities are in memory at once."""

GREEDY_BELOW_TEMPERATURE = 1e-5
"""A lower temperature means 0: dividing logits by it leaves nothing but the most probable token."""

MAX_TEMPERATURE = 1e6
"""All tokens are then equally probable in float32; much more would overflow there."""

MAX_GRAMMAR_CHARACTERS = 128 * 1024
"""Longest JSON schema, regular expression, grammar, or list of choices; one as long may take seconds to compile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What an output has to be: exactly one of the following; SamplingParamsError for none, several or a wrong type.

    The output ends where nothing may follow, even before ``min_tokens``. It may be cut short by ``max_tokens`` and by
    stop strings. Which syntax is supported is checked when the request is added.

    Attributes:
        json: JSON that this schema describes; as a mapping or as text, and kept as text.
        regex: a text that this regular expression matches from its beginning to its end.
        choice: one of these texts.
        grammar: a text of this grammar, in Lark's syntax, or in llama.cpp's (GBNF).
        json_object: any JSON object, if True.
        structural_tag: a text in which everything from a trigger on follows the schema of its tag:
            ``{"triggers": ["<f"], "structures": [{"begin": "<f=sum>", "schema": {…}, "end": "</f>"}]}``.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        names = self.__dataclass_fields__
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise SamplingParamsError(
                f"structured_outputs must have exactly one of {', '.join(names)}; got {', '.join(given) or 'none'}"
            )
        value, allowed = getattr(self, self.kind), "a non-empty string"
        if self.kind == "choice":
            value, allowed = _items(value), "a non-empty sequence of non-empty strings"
        elif self.kind in ("json", "structural_tag"):
            value, allowed = _json_text(value), "a JSON object, or its text"
        texts = value if isinstance(value, tuple) else (value,)
        if self.kind == "json_object":
            texts, allowed = ("{}" if value is True else None,), "true or false"
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise SamplingParamsError(
                f"structured_outputs.{self.kind} must be {allowed}, got {getattr(self, self.kind)!r:.80}"
            )
        if (found := sum(map(len, texts))) > MAX_GRAMMAR_CHARACTERS:
            raise SamplingParamsError(
                f"structured_outputs.{self.kind} may have at most {MAX_GRAMMAR_CHARACTERS} characters, got {found}"
            )
        object.__setattr__(self, self.kind, value)

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in self.__dataclass_fields__ if getattr(self, name) not in (None, False))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request; a wrong one raises SamplingParamsError at construction.

    Attributes:
        max_tokens: most tokens to generate; 0 computes the prompt alone, for its log-probabilities.
        temperature: 0 (or less than 1e-5) picks the most probable token; more, up to 1e6, divides the logits.
        top_p: keep the smallest set of tokens whose probability mass reaches ``top_p``, in (0, 1].
        top_k: keep the ``top_k`` most probable tokens; -1 or 0 keeps all.
        min_p: drop tokens less probable than ``min_p`` times the most probable one, in [0, 1].
        seed: random numbers follow from (seed, position) alone; None draws a seed from the engine's.
        min_tokens: no stop token is sampled, and no stop string looked for, before this many tokens.
        stop: strings that end the text; the text returned ends before them.
        stop_token_ids: token ids that end the output; the id itself is returned.
        skip_special_tokens: leave special tokens out of the text; if False, only those that end it.
        ignore_eos: go on after the model's end-of-sequence tokens (benchmarks force lengths with it).
        logprobs: None, or how many alternatives to report beside the chosen token (0 to 20).
        repetition_penalty: divides the positive logits of tokens in prompt or output, and multiplies negative ones.
        frequency_penalty: subtracted from a token's logit once for each time that it is in the output, in [-2, 2].
        presence_penalty: subtracted from the logits of tokens that are in the output, in [-2, 2].
        logit_bias: token id → number in [-100, 100], added to its logit before the penalties; kept as pairs.
        bad_words: texts that are not generated: the last token of each is banned wherever the others precede it.
        prompt_logprobs: None, or how many alternatives (0 to 20) to report beside each token of the prompt.
        n: how many outputs to sample for the prompt, at most 16,384; output i uses ``seed + i``.
        structured_outputs: what each output has to be; None leaves it free.
        cache_salt: only requests with the same salt share prefixes in the KV cache; None is one such group.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = field(default=())
    stop_token_ids: Sequence[int] = field(default=())
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = field(default=())
    bad_words: Sequence[str] = field(default=())
    n: int = 1
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else _items(self.stop)
        ids = _items(self.stop_token_ids)
        biases = _items([*self.logit_bias.items()] if isinstance(self.logit_bias, Mapping) else self.logit_bias)
        max_tokens = self.max_tokens if _is_int(self.max_tokens) else 0
        words = _items(self.bad_words)
        are_stops, are_words = (
            texts is not None and all(isinstance(text, str) and text for text in texts) for texts in (stops, words)
        )
        are_ids = ids is not None and all(_is_int(i, 0) for i in ids)
        are_biases = (
            biases is not None and all(map(_is_bias, biases)) and len(biases) == len(dict(biases)) <= MAX_BIASES
        )
        pairs = f"at most {MAX_BIASES} different token ids, each with a number in [-100, 100]"
        salt = self.cache_salt
        is_structure = isinstance(self.structured_outputs, StructuredOutputs | None)
        counts = f"None or between 0 and {MAX_LOGPROBS}"
        for name, holds, allowed in (
            ("temperature", _is_real(self.temperature, 0, MAX_TEMPERATURE), f"in [0, {MAX_TEMPERATURE:g}]"),
            ("top_p", _is_real(self.top_p, 0, 1) and self.top_p > 0, "in (0, 1]"),
            ("top_k", _is_int(self.top_k, -1), "an integer ≥ 1, or -1 for all"),
            ("min_p", _is_real(self.min_p, 0, 1), "in [0, 1]"),
            ("seed", _is_int(self.seed, 0, 2**63 - 1, or_none=True), "None or an integer in [0, 2**63)"),
            ("max_tokens", _is_int(self.max_tokens, 0), "an integer ≥ 0"),
            ("min_tokens", _is_int(self.min_tokens, 0, max_tokens), f"between 0 and max_tokens ({max_tokens})"),
            ("logprobs", _is_int(self.logprobs, 0, MAX_LOGPROBS, or_none=True), counts),
            ("prompt_logprobs", _is_int(self.prompt_logprobs, 0, MAX_LOGPROBS, or_none=True), counts),
            ("skip_special_tokens", isinstance(self.skip_special_tokens, bool), "true or false"),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "true or false"),
            ("n", _is_int(self.n, 1, MAX_SAMPLES), f"an integer from 1 to {MAX_SAMPLES}"),
            ("repetition_penalty", _is_real(self.repetition_penalty, 1e-3, 1e3), "in [0.001, 1000]"),
            ("frequency_penalty", _is_real(self.frequency_penalty, -2, 2), "in [-2, 2]"),
            ("presence_penalty", _is_real(self.presence_penalty, -2, 2), "in [-2, 2]"),
            ("logit_bias", are_biases, pairs),
            ("bad_words", are_words, "a sequence of non-empty strings"),
            ("stop", are_stops, "a non-empty string, or a sequence of them"),
            ("stop_token_ids", are_ids, "a sequence of integers ≥ 0"),
            ("structured_outputs", is_structure, "None or StructuredOutputs"),
            ("cache_salt", salt is None or (isinstance(salt, str) and salt), "None or a non-empty string"),
        ):
            if not holds:
                raise SamplingParamsError(f"{name} must be {allowed}, got {getattr(self, name)!r}")
        # Frozen values all the way down: a list of the caller's must not change under the engine.
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", ids)
        object.__setattr__(self, "logit_bias", biases)
        object.__setattr__(self, "bad_words", words)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """The pairs of ``logit_bias``."""
        return tuple(self.logit_bias)  # type: ignore[arg-type]

    @property
    def penalties(self) -> tuple[float, float, float]:
        """Those of repetition, frequency and presence."""
        return self.repetition_penalty, self.frequency_penalty, self.presence_penalty

    @property
    def adjusts_logits(self) -> bool:
        """Whether anything but ``min_tokens`` changes the logits before they are sampled from."""
        return bool(self.logit_bias or self.bad_words) or self.penalties != (1, 0, 0)


def _items(values: object) -> tuple[Any, ...] | None:
    """The items of a sequence; None for anything else, and for text, whose characters nobody means."""
    return tuple(values) if isinstance(values, Sequence) and not isinstance(values, (str, bytes)) else None


def _is_bias(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and _is_int(pair[0], 0) and _is_real(pair[1], -100, 100)


def _json_text(value: object) -> object:
    """The JSON text of a mapping; any other value, or one that JSON does not know, as it is."""
    if not isinstance(value, Mapping):
        return value
    try:
        return json.dumps(dict(value))
    except (TypeError, ValueError, RecursionError):
        return value


def _is_real(value: object, least: float, most: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def _is_int(value: object, least: float = -math.inf, most: float = math.inf, *, or_none: bool = False) -> bool:
    if value is None:
        return or_none
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
