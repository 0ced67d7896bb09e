# Triton kernels are a language of their own inside Python's syntax.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
"""The Triton kernel for sampling, which does what ``sampler.sample`` does in plain torch; launched by ``triton_ops``.

With PDL, see ``triton_kernels``.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def _load_scores(
    row_ptr, ids, vocab_size, settings_ptr, is_masked, MASKED_COLUMN: tl.constexpr, MASKED_COUNT: tl.constexpr
):
    """Logits of the given token ids in float32, -inf outside the vocabulary and for masked ids."""
    scores = tl.load(row_ptr + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    if is_masked:
        for i in tl.static_range(MASKED_COUNT):
            masked_id = tl.load(settings_ptr + MASKED_COLUMN + i)
            scores = tl.where(ids == masked_id, -float("inf"), scores)
    return scores


@triton.jit
def _order_key(scores):
    """Integers in the same order as the floats (two's complement of the sign-magnitude bits)."""
    bits = scores.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def sample_kernel(
    logits_ptr,
    slots_ptr,
    positions_ptr,
    settings_ptr,
    last_token_ptr,
    out_ptr,
    vocab_size,
    row_stride,
    SETTINGS_COLUMNS: tl.constexpr,
    MASKED_COLUMN: tl.constexpr,
    MASKED_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row a program: greedy, or Gumbel-max over what top_k, top_p and min_p leave.

    Cuts are found by bisecting the threshold over the floats' integer keys: no sort, nothing stored.
    """
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    position = tl.load(positions_ptr + row)
    settings = settings_ptr + slot * SETTINGS_COLUMNS
    temperature = tl.load(settings).to(tl.float32, bitcast=True)
    is_masked = position < tl.load(settings + 6)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    lanes = tl.arange(0, BLOCK)
    divisor = tl.where(temperature > 0, temperature, 1.0)
    if PDL:
        gdc_wait()

    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    best_id = tl.full((BLOCK,), 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + lanes
        scores = _load_scores(row_ptr, ids, vocab_size, settings, is_masked, MASKED_COLUMN, MASKED_COUNT)
        better = scores > best
        best = tl.where(better, scores, best)
        best_id = tl.where(better, ids, best_id)
    largest = tl.max(best, axis=0)
    token = tl.min(tl.where(best == largest, best_id, vocab_size), axis=0)

    if temperature > 0:
        top_k = tl.load(settings + 1)
        top_p = tl.load(settings + 2).to(tl.float32, bitcast=True)
        min_p = tl.load(settings + 3).to(tl.float32, bitcast=True)
        seed_low = tl.load(settings + 4).to(tl.uint32, bitcast=True)
        seed_high = tl.load(settings + 5).to(tl.uint32, bitcast=True)
        peak = largest / divisor
        lowest = tl.full((), -2147483648, tl.int64)
        high_key = _order_key(peak).to(tl.int64)
        threshold = lowest
        if (top_k > 0) & (top_k < vocab_size):
            low, high = lowest, high_key
            while low < high:
                middle = (low + high + 1) >> 1
                count = tl.full((BLOCK,), 0, tl.int32)
                for start in range(0, vocab_size, BLOCK):
                    ids = start + lanes
                    scores = _load_scores(
                        row_ptr, ids, vocab_size, settings, is_masked, MASKED_COLUMN, MASKED_COUNT
                    )
                    kept = (_order_key(scores / divisor) >= middle) & (ids < vocab_size)
                    count += kept.to(tl.int32)
                enough = tl.sum(count, axis=0) >= top_k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle - 1)
            threshold = low
        if top_p < 1.0:
            mass = tl.full((BLOCK,), 0.0, tl.float32)
            for start in range(0, vocab_size, BLOCK):
                ids = start + lanes
                scores = _load_scores(
                    row_ptr, ids, vocab_size, settings, is_masked, MASKED_COLUMN, MASKED_COUNT
                )
                scores = scores / divisor
                mass += tl.where(_order_key(scores) >= threshold, tl.exp(scores - peak), 0.0)
            wanted = top_p * tl.sum(mass, axis=0)
            low, high = threshold, high_key
            while low < high:
                middle = (low + high + 1) >> 1
                mass = tl.full((BLOCK,), 0.0, tl.float32)
                for start in range(0, vocab_size, BLOCK):
                    ids = start + lanes
                    scores = _load_scores(
                        row_ptr, ids, vocab_size, settings, is_masked, MASKED_COLUMN, MASKED_COUNT
                    )
                    scores = scores / divisor
                    mass += tl.where(_order_key(scores) >= middle, tl.exp(scores - peak), 0.0)
                enough = tl.sum(mass, axis=0) >= wanted
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle - 1)
            threshold = low
        min_score = tl.where(min_p > 0, peak + tl.log(tl.maximum(min_p, 1e-30)), -float("inf"))

        best = tl.full((BLOCK,), -float("inf"), tl.float32)
        best_id = tl.full((BLOCK,), 0, tl.int32)
        for start in range(0, vocab_size, BLOCK):
            ids = start + lanes
            scores = _load_scores(row_ptr, ids, vocab_size, settings, is_masked, MASKED_COLUMN, MASKED_COUNT)
            scores = scores / divisor
            counter = ids.to(tl.uint32, bitcast=True)
            zero = counter * 0
            bits, _, _, _ = tl.philox_impl(
                counter, zero + position.to(tl.uint32), zero, zero, zero + seed_low, zero + seed_high
            )
            uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
            noisy = scores - tl.log(-tl.log(uniform))
            kept = (_order_key(scores) >= threshold) & (scores >= min_score)
            noisy = tl.where(kept, noisy, -float("inf"))
            better = noisy > best
            best = tl.where(better, noisy, best)
            best_id = tl.where(better, ids, best_id)
        largest = tl.max(best, axis=0)
        token = tl.min(tl.where(best == largest, best_id, vocab_size), axis=0)

    tl.store(out_ptr + row, token)
    tl.store(last_token_ptr + slot, token)
