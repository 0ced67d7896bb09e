"""Choosing tokens from logits: the per-slot settings and the reference sampler in plain torch.

A row's random numbers are Philox-4x32-10 (Salmon et al. 2011) with the request's seed as key and (token id,
position) as counter, so a token depends on its own row alone, and the Triton kernel draws the same numbers.
"""

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bullet_graph import sampling_params

_MASK32 = np.uint64(0xFFFFFFFF)

MASKED_IDS_COLUMN = 12
SETTINGS_COLUMNS = MASKED_IDS_COLUMN + sampling_params.MAX_MASKED_TOKEN_IDS
"""Width of a packed settings row: 0 temperature, 1 top_k, 2 top_p, 3 min_p, 4–5 seed (low, high word),
6 masked_until, 7 flags, 8 repetition, 9 frequency and 10 presence penalty, 11 unused, then masked ids padded with -1;
floats by their bits."""

USES_MARKS, USES_BITMASK, USES_BAD_WORDS = 1, 2, 4
"""Flags of a settings row. The logits of a row without flags are sampled from as they are."""

IN_PROMPT, ONE_OUTPUT, FIRST_BIAS = 1, 1 << 1, 1 << 21
MAX_OUTPUT_COUNT = FIRST_BIAS // ONE_OUTPUT - 1
"""A mark says of a token id: bit 0, whether it is in the prompt; bits 1–20, how often in the output; bits 21–30, which
of the slot's biases it has. A negative mark bans it."""

RECENT_TOKENS = sampling_params.MAX_BAD_WORD_TOKENS - 1
RECENT_COLUMN = sampling_params.MAX_BIASES + 1
WORDS_COLUMN = RECENT_COLUMN + RECENT_TOKENS
TABLE_COLUMNS = WORDS_COLUMN + sampling_params.MAX_BAD_WORDS * (1 + RECENT_TOKENS)
"""Width of a slot's table: biases by number, 0 for none, by their bits; the output token at each position modulo
RECENT_TOKENS, or -1; then bad words, each its last token, or -1, and the tokens before it to the right, after -1."""


class SamplingState:
    """State of sampling by slot, on the device, in int32.

    Attributes:
        settings: [num_slots, SETTINGS_COLUMNS].
        last_token: [num_slots], the token sampled last, which the slot's next decode row reads.
        adjustments: [num_slots, columns], a mark for each token of the vocabulary, then the table, both read with
            USES_MARKS, then the bitmask. Sampling counts its token there, so steps launched ahead of the host see it.
        bitmasks: [num_slots, ceil(vocab_size / 32)], a view of it, read with USES_BITMASK: bit ``id % 32`` of word
            ``id // 32`` is set for a token that may be sampled.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        zeros = partial(torch.zeros, dtype=torch.int32, device=device)
        self.settings = zeros(num_slots, SETTINGS_COLUMNS)
        self.last_token = zeros(num_slots)
        self.vocab_size = vocab_size
        mask_column, mask_words = vocab_size + TABLE_COLUMNS, -(-vocab_size // 32)
        # A multiple of 16, so that a kernel's loads may be wide.
        self.adjustments = zeros(num_slots, -(-(mask_column + mask_words) // 16) * 16)
        self.bitmasks = self.adjustments[:, mask_column : mask_column + mask_words]

    def write_adjustments(self, slot: int, row: NDArray[np.int32]) -> None:
        """Enqueue a slot's marks and table, [vocab_size + TABLE_COLUMNS], on the current stream."""
        host = torch.from_numpy(row)
        # The allocator of pinned memory keeps it until the copy is over.
        host = host.pin_memory() if self.adjustments.is_cuda else host
        self.adjustments[slot, : len(row)].copy_(host, non_blocking=True)

    def write_bitmasks(self, slots: NDArray[np.int32], words: NDArray[np.int32]) -> None:
        """Enqueue on the current stream the bitmasks [n, ceil(vocab_size / 32)] of ``slots`` [n]."""
        host = torch.from_numpy(np.column_stack((slots, words)))
        # One copy, from pinned memory, which its allocator keeps until the copy is over.
        host = host.pin_memory() if self.bitmasks.is_cuda else host
        rows = host.to(self.bitmasks.device, non_blocking=True)
        self.bitmasks[rows[:, 0].long()] = rows[:, 1:]


def sample(logits: Tensor, slots: Tensor, positions: Tensor, state: SamplingState) -> Tensor:
    """Sample one token a row of logits [rows, vocab_size], leave it in ``state.last_token``, and return [rows] int32.

    Cuts apply in the order top_k, top_p (over what top_k left), min_p; ties at a cut stay in. ``positions`` [rows] are
    those that the sampled tokens will have.
    """
    chosen = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    settings = state.settings[slots.long()].cpu().numpy()
    for row, position in enumerate(positions.tolist()):
        scores = logits[row].to(torch.float32, copy=True)  # log-probabilities are read from the logits later
        temperature, top_p, min_p = settings[row, [0, 2, 3]].view(np.float32).tolist()
        if settings[row, 7]:
            scores = _adjust(scores, int(slots[row]), settings[row], state)
        if position < settings[row, 6]:
            masked = settings[row, MASKED_IDS_COLUMN:]
            scores[masked[masked >= 0]] = -torch.inf
        if temperature > 0:
            scores = _cut(scores / temperature, int(settings[row, 1]), top_p, min_p)
            uniform = torch.from_numpy(philox_uniform(int(settings[row, 4:6].view(np.int64)[0]), position, len(scores)))
            # Adding Gumbel noise and taking the largest samples from the softmax (Gumbel-max).
            scores = scores - torch.log(-torch.log(uniform)).to(scores.device)
        chosen[row] = scores.argmax()
        if settings[row, 7] & USES_MARKS:
            _count(int(chosen[row]), int(slots[row]), position, int(settings[row, 7]), state)
    state.last_token[slots.long()] = chosen
    return chosen


def _adjust(scores: Tensor, slot: int, settings: NDArray[np.int32], state: SamplingState) -> Tensor:
    """Biases, then penalties, then bans, in vLLM's order; ``scores`` is [vocab_size] float32."""
    if settings[7] & USES_MARKS:
        marks = state.adjustments[slot, : len(scores)]
        table = state.adjustments[slot, state.vocab_size :]
        repetition, frequency, presence = settings[8:11].view(np.float32).tolist()
        scores = scores + table.view(torch.float32)[(marks // FIRST_BIAS).clamp(min=0)]
        penalized = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(marks % FIRST_BIAS > 0, penalized, scores)
        counts = marks % FIRST_BIAS // ONE_OUTPUT
        scores = scores - frequency * counts - presence * (counts > 0)
        scores = scores.masked_fill(marks < 0, -torch.inf)
    if settings[7] & USES_BITMASK:
        ids = torch.arange(len(scores), device=scores.device)
        scores = scores.masked_fill(state.bitmasks[slot][ids // 32] >> ids % 32 & 1 == 0, -torch.inf)
    return scores


def _count(token_id: int, slot: int, position: int, flags: int, state: SamplingState) -> None:
    """Count an output token, and ban those that would complete a bad word after it."""
    marks, table = state.adjustments[slot], state.adjustments[slot, state.vocab_size :]
    marks[token_id] += ONE_OUTPUT
    if flags & USES_BAD_WORDS:
        recent = table[RECENT_COLUMN:WORDS_COLUMN]
        words = table[WORDS_COLUMN:TABLE_COLUMNS].view(sampling_params.MAX_BAD_WORDS, -1)
        last, before = words[:, 0].long(), words[:, 1:]
        recent[position % RECENT_TOKENS] = token_id
        completed = ((before == recent.roll(-1 - position % RECENT_TOKENS)) | (before < 0)).all(-1)
        marks[last[last >= 0]] &= 2**31 - 1
        marks[last[completed & (last >= 0)]] |= -(2**31)


def _cut(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Set what the cuts drop to -inf; ``scores`` is [vocab_size], already divided by the temperature."""
    if top_k > 0:
        threshold = scores.topk(min(top_k, len(scores))).values[-1]
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    if top_p < 1:
        ordered, _ = scores.sort(descending=True)
        probabilities = ordered.softmax(-1)
        # Where nothing may be sampled, they are not numbers.
        threshold = ordered[~(probabilities.cumsum(-1) - probabilities >= top_p)][-1]
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    if min_p > 0:
        scores = scores.masked_fill(scores < scores.max() + np.log(min_p), -torch.inf)
    return scores


def philox_uniform(seed: int, position: int, count: int) -> NDArray[np.float32]:
    """Uniform numbers in (0, 1) for token ids 0 … count-1 at one position of one sequence.

    Philox-4x32-10 with key ``seed`` and counter (token id, position, 0, 0); the first output word's upper
    23 bits, centred, so that neither 0 nor 1 occurs.
    """
    c0 = np.arange(count, dtype=np.uint64)
    c1 = np.full(count, position, dtype=np.uint64)
    c2 = np.zeros(count, dtype=np.uint64)
    c3 = np.zeros(count, dtype=np.uint64)
    k0, k1 = np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)
    for _ in range(10):
        low_product, high_product = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (high_product >> np.uint64(32)) ^ c1 ^ k0,
            high_product & _MASK32,
            (low_product >> np.uint64(32)) ^ c3 ^ k1,
            low_product & _MASK32,
        )
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _MASK32, (k1 + np.uint64(0xBB67AE85)) & _MASK32
    return ((c0 >> np.uint64(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def token_logprobs(logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the sampled tokens and of the ``count`` best, by the model's own distribution.

    Returns (chosen [rows], top_ids [rows, count], top [rows, count]), float32 and int64.
    """
    parts, rows = [], sampling_params.SCORED_ROWS
    for some, ids in zip(logits.split(rows), token_ids.split(rows), strict=True):
        logprobs = torch.log_softmax(some.float(), dim=-1)
        top, top_ids = logprobs.topk(count, dim=-1)
        parts.append((logprobs.gather(-1, ids.long()[:, None])[:, 0], top_ids, top))
    chosen, ids_of_best, best = zip(*parts, strict=True)
    return torch.cat(chosen), torch.cat(ids_of_best), torch.cat(best)
