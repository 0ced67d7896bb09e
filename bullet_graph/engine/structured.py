"""Structured outputs: which tokens may come next in an output that follows a schema or grammar, by llguidance."""

import json
import math
import threading
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from bullet_graph.errors import SamplingParamsError
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.tokenizer import Tokenizer
from bullet_graph.runtime.step import Int32Array
from bullet_graph.sampling_params import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_LIMITS: Any = {"initial_lexer_fuel": 50_000, "step_lexer_fuel": 50_000, "max_lexer_states": 50_000}
"""Costs of a grammar and of a mask, beyond which llguidance refuses them. Its own limits let a regular expression such
as ``(a{300}){300}`` hold the engine's loop for 50 ms at every token; these are as kind to published schemas."""

_MOST_REMAINDERS, _MOST_COMBINED_PATTERNS, _MOST_NAME_PATTERNS = 10_000, 10, 200
"""Costs of a schema that llguidance does not limit; each of them takes up to a second."""

_WHITESPACE = r"[ \t\n\r]{1,64}"
"""Between two tokens of JSON. Without a limit, a model that would rather not go on may emit blanks for ever."""


class Matcher:
    """Follows one output; :class:`Grammars` makes them."""

    def __init__(self, matcher: "LLMatcher", threads: "LLExecutor", num_words: int, num_filled: int) -> None:
        self._matcher, self._threads = matcher, threads
        self._num_words, self._num_filled = num_words, num_filled

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False if it is not allowed, or a limit was reached. Nothing is accepted after that."""
        return self._matcher.consume_token(token_id)

    @property
    def ended(self) -> bool:
        """Whether nothing may follow, an end-of-sequence token at most."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> str:
        """Why it accepts nothing any more; empty while it does."""
        return self._matcher.get_error().removesuffix("<non-verbose/>").strip()

    def copy(self) -> "Matcher":
        return Matcher(self._matcher.deep_copy(), self._threads, self._num_words, self._num_filled)

    @staticmethod
    def bitmasks(matchers: Sequence["Matcher"]) -> Int32Array:
        """The tokens that may come next, for one matcher or more: [n, ceil(vocab_size / 32)].

        Token ``id`` is bit ``id % 32`` of word ``id // 32``. It takes some 10 µs each, on several threads.
        """
        from llguidance.numpy import fill_next_token_bitmask_par  # noqa: PLC0415 - as in Grammars

        first = matchers[0]
        words: Int32Array = np.empty((len(matchers), first._num_filled), dtype=np.int32)
        fill_next_token_bitmask_par(first._threads, [(m._matcher, i) for i, m in enumerate(matchers)], words)
        return words[:, : first._num_words]


class Grammars:
    """Compiles structured outputs for one model, once each, errors included; safe in any thread.

    A grammar may take seconds, and the first one takes the time to read the tokenizer in addition.
    """

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._compiled = lru_cache(128)(self._compile)

    def matcher(self, structured: StructuredOutputs) -> Matcher:
        """A matcher at the beginning of an output; SamplingParamsError for what is not supported or too complex."""
        compiled = self._compiled(structured)
        if isinstance(compiled, str):
            raise SamplingParamsError(compiled)
        return compiled.copy()

    @cached_property
    def _llguidance(self) -> "tuple[LLTokenizer, LLExecutor]":
        # Imported here, as it takes 0.1 s that few programs need.
        from llguidance import LLExecutor, LLTokenizer  # noqa: PLC0415

        assert self._tokenizer is not None
        ends: Any = sorted(self._model.eos_token_ids) or self._tokenizer.eos_token_id
        if ends is None:
            raise ValueError("neither config.json nor tokenizer_config.json names an end-of-sequence token")
        # llguidance takes no fewer ids than the tokenizer's, though the model's may end before them.
        num_ids = max(self._model.vocab_size, self._tokenizer.num_ids)
        return LLTokenizer(self._tokenizer.to_json(), n_vocab=num_ids, eos_token=ends), LLExecutor()

    def _compile(self, structured: StructuredOutputs) -> Matcher | str:
        """A matcher at the beginning, or what is wrong."""
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415

        if self._tokenizer is None:
            return "structured_outputs need a tokenizer, but the model has none"
        try:
            with self._lock:
                tokenizer, threads = self._llguidance
        except ValueError as error:
            return f"structured_outputs cannot be used with the model's tokenizer: {error}"
        limits = LLParserLimits(verbose_errors=False, **_LIMITS)
        try:
            compiled = LLMatcher(tokenizer, _grammar(structured), log_level=0, limits=limits)
        except ValueError as error:
            return _unsupported(structured, str(error))
        matcher = Matcher(compiled, threads, *(-(-num // 32) for num in (self._model.vocab_size, tokenizer.vocab_size)))
        if not matcher.error:
            # Some limits are found only here.
            Matcher.bitmasks([matcher])
        return _unsupported(structured, matcher.error) if matcher.error else matcher


def _grammar(structured: StructuredOutputs) -> str:
    """The grammar in llguidance's form; it may still be wrong."""
    from llguidance import LLMatcher, StructTag, grammar_from  # noqa: PLC0415

    kind: Any = structured.kind
    value = getattr(structured, kind)
    if kind in ("json", "json_object"):
        schema = value if kind == "json" else '{"type": "object"}'
        _check_cost(schema)
        # A schema may bring options of its own; none may weaken it.
        options: Any = {"whitespace_pattern": _WHITESPACE, "lenient": False, "coerce_one_of": False}
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)
    if kind == "grammar" and "%json" in value:
        raise ValueError("%json is not supported in a grammar: give the schema as structured_outputs.json")
    if kind == "structural_tag":
        _check_cost(value)
        try:
            tag = json.loads(value)
            tags = [
                StructTag(
                    # An empty one is refused.
                    trigger=next((t for t in tag["triggers"] if part["begin"].startswith(t)), ""),
                    begin=part["begin"],
                    grammar=dict(part["schema"]),
                    end=part["end"],
                )
                for part in tag["structures"]
            ]
            return StructTag.to_grammar(tags, assume_special=False)
        except (LookupError, TypeError, AttributeError, AssertionError) as error:
            raise ValueError(
                "triggers and structures are required, and in each of these schema, end, and a begin that starts with "
                "a trigger"
            ) from error
    return grammar_from(kind, json.dumps(value) if kind == "choice" else value)


def _check_cost(schema: str) -> None:
    """Raise ValueError for what llguidance might take for ever to compile, and does not limit itself."""
    multiples: set[Decimal] = set()
    combined, num_patterns, num_names = False, 0, 0

    def look(node: dict[str, Any]) -> dict[str, Any]:
        nonlocal combined, num_patterns, num_names
        if isinstance(multiple := node.get("multipleOf"), int | Decimal):
            multiples.add(Decimal(multiple))
        num_patterns += isinstance(node.get("pattern"), str)
        num_names += len(names) if isinstance(names := node.get("patternProperties"), dict) else 0
        beside = not node.keys().isdisjoint({"pattern", "properties", "patternProperties", "items", "prefixItems"})
        combined |= "allOf" in node or (beside and not node.keys().isdisjoint({"anyOf", "oneOf", "$ref"}))
        return node

    try:
        json.loads(schema, parse_float=Decimal, object_hook=look)
    except (RecursionError, InvalidOperation):
        raise ValueError("it is nested too deeply, or a number's exponent is too large") from None
    places = max((-int(multiple.as_tuple().exponent) for multiple in multiples), default=0)
    # Its automaton has a state for each remainder.
    if (
        places > 9
        or any(abs(m) > _MOST_REMAINDERS for m in multiples)
        or (math.lcm(*(int(m.scaleb(max(places, 0))) for m in multiples)) > _MOST_REMAINDERS)
    ):
        raise ValueError(f"multipleOf: the least common multiple may be {_MOST_REMAINDERS} at most")
    if num_patterns > _MOST_COMBINED_PATTERNS and combined:
        raise ValueError(
            f"pattern: {num_patterns} were found; where allOf, or anyOf or $ref beside other keywords, combine "
            f"schemas, there may be {_MOST_COMBINED_PATTERNS}"
        )
    if num_names > _MOST_NAME_PATTERNS:
        raise ValueError(f"patternProperties: {num_names} were found, and {_MOST_NAME_PATTERNS} are allowed in all")


def _unsupported(structured: StructuredOutputs, reason: str) -> str:
    kind, reason = structured.kind, reason.removesuffix("<non-verbose/>").strip()
    return (
        f"structured_outputs.{kind} (response_format, guided_{kind}) is not supported or too complex: {reason:.300}; "
        "leave out or replace what is named here"
    )
