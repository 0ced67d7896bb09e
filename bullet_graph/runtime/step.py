"""The values that pass between the scheduler and an executor: plain numpy, no torch."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bullet_graph.partition.masks import WHOLE_GPU, Lane, SmPartition
from bullet_graph.perf.performance import attention_pairs
from bullet_graph.sampling_params import SamplingParams

Int32Array = NDArray[np.int32]
BoolArray = NDArray[np.bool_]


def indptr_of(counts: Int32Array) -> Int32Array:
    """[n + 1], where each of n groups laid end to end starts, and where the last one ends; group i has counts[i]."""
    indptr: Int32Array = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    return indptr


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What changes a sequence's logits: penalties and biases of ``params``, and the token ids of its bad words.

    The tokens are those until now: after a preemption, there are outputs.
    """

    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...]
    prompt_token_ids: Int32Array
    output_token_ids: Int32Array


@dataclass(frozen=True, slots=True)
class SlotInit:
    """Sampling settings of a sequence that enters a slot; they hold until the slot is initialised again.

    ``temperature`` 0 is greedy, ``top_k`` 0 keeps all. Random numbers follow from (seed, position) alone. Tokens at
    positions below ``masked_until`` are none of ``masked_token_ids`` (``min_tokens``). With ``uses_bitmask``, only
    tokens of the slot's bitmask are sampled.
    """

    slot: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    masked_token_ids: tuple[int, ...]
    masked_until: int
    adjustments: Adjustments | None = None
    uses_bitmask: bool = False


@dataclass(frozen=True, slots=True)
class Scored:
    """``rows`` [r] of a batch's tokens, the ``token_ids`` [r] after them, and the number of alternatives to report."""

    rows: Int32Array
    token_ids: Int32Array
    num_logprobs: int


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Chunks of ``n`` prompts, laid end to end.

    Attributes:
        q_indptr: [n + 1], where each chunk starts in ``token_ids``.
        starts: [n], position of each chunk's first token, that is, its prompt's tokens already in the KV cache.
        kv_starts: [n], position of the first token in each sequence's blocks, a multiple of their size: above 0 once
            blocks before every layer's window were given back.
        kv_indptr: [n + 1], where each sequence's blocks start in ``kv_indices``: up to its chunk's end.
        samples: [n], whether the chunk ends its prompt, so that a token is sampled.
        scored: the tokens of prompts whose log-probabilities are to be reported, if any.
    """

    slots: Int32Array
    token_ids: Int32Array
    q_indptr: Int32Array
    starts: Int32Array
    kv_starts: Int32Array
    kv_indptr: Int32Array
    kv_indices: Int32Array
    samples: BoolArray
    scored: Scored | None = None

    @property
    def attention_pairs(self) -> float:
        """(query, key) pairs of all chunks."""
        return sum(map(attention_pairs, np.diff(self.q_indptr).tolist(), self.starts.tolist()))


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One new token for each of ``n`` sequences; its input token is the one last sampled for the slot.

    ``positions`` [n] are the input tokens'; the KV length after the step is one more. ``kv_starts`` [n] are as those of
    :class:`PrefillBatch`. ``kv_indptr`` [n + 1] is where each sequence's blocks start in ``kv_indices``: up to the
    input's position.
    """

    slots: Int32Array
    positions: Int32Array
    kv_starts: Int32Array
    kv_indptr: Int32Array
    kv_indices: Int32Array


@dataclass(frozen=True, slots=True)
class Bitmasks:
    """The tokens that rows of ``slots`` [n] may sample: bits of ``words`` [n, ceil(vocab_size / 32)]."""

    slots: Int32Array
    words: Int32Array


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: prefill chunks, decode rows, or both; slots of ``admitted`` are initialised before it.

    ``num_logprobs``: alternatives to report for every sampled row; None reports no log-probabilities. ``bitmasks`` are
    of all sampled rows with structured outputs; None without any.
    """

    admitted: tuple[SlotInit, ...]
    prefill: PrefillBatch | None
    decode: DecodeBatch | None
    num_logprobs: int | None
    bitmasks: Bitmasks | None = None

    @property
    def prefill_rows(self) -> int:
        """Prompt tokens of all chunks."""
        return 0 if self.prefill is None else len(self.prefill.token_ids)

    @property
    def decode_rows(self) -> int:
        """Sequences that decode."""
        return 0 if self.decode is None else len(self.decode.slots)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a step runs, and which of its layers; decode rows run on the decode lane only.

    It continues the lane's step at ``first_layer`` (0 begins one) and stops before ``last_layer`` (None: it samples).
    With ``takes_turns`` it begins, on the device, after all earlier launches of the other lane.
    A decode step is padded to ``least_rows``, if there is a graph of that size.
    """

    lane: Lane = "decode"
    partition: SmPartition = WHOLE_GPU
    first_layer: int = 0
    last_layer: int | None = None
    takes_turns: bool = False
    least_rows: int = 1


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log-probabilities of ``n`` rows: [n] of the sampled or scored token, and the [n, k] most probable ones."""

    chosen: NDArray[np.float32]
    top_ids: Int32Array
    top: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens that a step sampled: [n], of prefill rows in order, then of decode rows.

    Empty for a step that was stopped before its last layer. ``device_ms`` is from the first kernel to the last.
    ``prompt_logprobs`` are those of the scored rows, perhaps with more rows after them.
    """

    token_ids: Int32Array
    logprobs: StepLogprobs | None
    device_ms: float
    prompt_logprobs: StepLogprobs | None = None
