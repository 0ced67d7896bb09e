"""Checks what callers ask for, and turns it into requests."""

from collections.abc import Sequence
from random import Random
from typing import cast

import numpy as np

from bullet_graph.engine.output import OutputKind
from bullet_graph.engine.request import Request, Sample
from bullet_graph.engine.sequence import Sequence as EngineSequence
from bullet_graph.engine.structured import Grammars
from bullet_graph.errors import PromptError, RequestError, SamplingParamsError
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.tokenizer import Tokenizer
from bullet_graph.runtime.step import Int32Array
from bullet_graph.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_MASKED_TOKEN_IDS, SamplingParams
from bullet_graph.slo import Slo

Prompt = str | Sequence[int]


class Admission:
    """Makes requests for one model; without a tokenizer from token ids alone. ``seed`` is for those that have none."""

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer | None, *, max_model_len: int, seed: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._seeds = Random(seed)
        self.grammars = Grammars(model, tokenizer)

    def request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, *, kind: OutputKind, arrival_s: float, slo: Slo
    ) -> Request:
        """Make a request of ``params.n`` samples; PromptError or SamplingParamsError for what cannot be served."""
        token_ids = self._token_ids(prompt)
        stop_ids = self._stop_ids(params)
        bad_words = self._bad_words(params)
        structured = params.structured_outputs
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        samples = [
            Sample(
                EngineSequence(
                    request_id,
                    i,
                    token_ids,
                    params,
                    (seed + i) % 2**63,
                    stop_ids,
                    slo,
                    arrival_s,
                    bad_words,
                    None if structured is None else self.grammars.matcher(structured),
                ),
                None
                if self._tokenizer is None
                else self._tokenizer.stream(None if params.skip_special_tokens else stop_ids),
            )
            for i in range(params.n)
        ]
        return Request(samples, kind)

    def _token_ids(self, prompt: Prompt) -> Int32Array:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise PromptError("a text prompt needs a tokenizer, but the model has none: pass token ids")
            prompt = self._tokenizer.encode(prompt)
        try:
            ids = np.asarray(prompt)
        except ValueError:  # lists of several lengths
            ids = np.empty((0, 0))
        if ids.ndim == 1 and len(ids) == 0:
            raise PromptError("the prompt is empty: give at least one token")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise PromptError(f"a prompt must be text or a flat sequence of integer token ids, got {prompt!r:.80}")
        outside = ids[(ids < 0) | (ids >= self._model.vocab_size)]
        if len(outside):
            raise PromptError(f"token id {outside[0]} is outside the vocabulary of {self._model.vocab_size} tokens")
        if len(ids) >= self._max_model_len:
            raise PromptError(
                f"the prompt has {len(ids)} tokens; with max_model_len={self._max_model_len} it may have at most "
                f"{self._max_model_len - 1}, so that one can be generated"
            )
        return ids.astype(np.int32)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Check the settings, and give the ids that end the output."""
        if not isinstance(params, SamplingParams):
            raise SamplingParamsError(f"a request's settings must be SamplingParams, got {params!r:.80}")
        if params.stop and self._tokenizer is None:
            raise SamplingParamsError("stop strings need a tokenizer, but the model has none")
        stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(self._model.eos_token_ids)
        )
        biased = [token_id for token_id, _ in params.biases]
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", biased)):
            if outside := [i for i in ids if i >= self._model.vocab_size]:
                raise SamplingParamsError(
                    f"{name} holds {outside[0]}, outside the vocabulary of {self._model.vocab_size} tokens"
                )
        if params.min_tokens and len(stop_ids) > MAX_MASKED_TOKEN_IDS:
            raise SamplingParamsError(
                f"min_tokens can hold back at most {MAX_MASKED_TOKEN_IDS} stop tokens, got {len(stop_ids)}"
            )
        for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if (count or 0) > self._model.vocab_size:
                raise SamplingParamsError(
                    f"{name} must be at most the vocabulary's {self._model.vocab_size} tokens, got {count}"
                )
        return stop_ids

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token ids of each bad word, as it begins a text and, if that is another token, as it follows a space."""
        if params.bad_words and self._tokenizer is None:
            raise SamplingParamsError("bad_words need a tokenizer, but the model has none: use logit_bias")
        words: dict[tuple[int, ...], None] = {}
        for text in params.bad_words:
            assert self._tokenizer is not None
            first, spaced = (
                tuple(self._tokenizer.encode(prefix + text.lstrip(), add_special_tokens=False)) for prefix in ("", " ")
            )
            words[first] = None
            # vLLM's condition: otherwise the second form is a space, and then the first.
            if len(spaced) == len(first) and spaced[:1] != first[:1]:
                words[spaced] = None
        longest = max(map(len, words), default=1)
        num_long = sum(len(word) > 1 for word in words)
        if () in words or longest > MAX_BAD_WORD_TOKENS or num_long > MAX_BAD_WORDS:
            raise SamplingParamsError(
                f"bad_words must have 1 to {MAX_BAD_WORD_TOKENS} tokens each, and at most {MAX_BAD_WORDS} of them more "
                f"than one, counting forms with and without a space; found {num_long} with up to {longest} tokens"
            )
        # The model cannot say a word with a token that it lacks.
        return tuple(word for word in words if max(word) < self._model.vocab_size)


def normalise_batch(
    prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
) -> tuple[list[Prompt], list[SamplingParams], bool]:
    """Expand the arguments of ``generate`` to one entry per prompt; also whether a single prompt was given."""
    if not isinstance(prompts, (Sequence, np.ndarray)):
        raise RequestError(f"prompts must be text, token ids, or a list of either, got {prompts!r:.80}")
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer)))
    batch = [cast(Prompt, prompts)] if single else list(cast(Sequence[Prompt], prompts))
    if isinstance(params, SamplingParams):
        return batch, [params] * len(batch), single
    if not isinstance(params, Sequence) or len(params) != len(batch):
        found = str(len(params)) if isinstance(params, Sequence) else repr(params)
        raise RequestError(f"{len(batch)} prompts need as many sampling params, or one for all; got {found:.80}")
    return batch, list(params), single
