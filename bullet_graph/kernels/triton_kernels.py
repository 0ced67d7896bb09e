"""Triton kernels for the steps of a layer and for sampling; launched by ``triton_ops``.

``TorchOps`` and ``sampler`` compute the same in plain torch.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from bullet_graph.kernels import fp8, sampler
from bullet_graph.sampling_params import MAX_BAD_WORDS, MAX_MASKED_TOKEN_IDS

_SETTINGS_COLUMNS = tl.constexpr(sampler.SETTINGS_COLUMNS)
_MASKED_COLUMN = tl.constexpr(sampler.MASKED_IDS_COLUMN)
_MASKED_COUNT = tl.constexpr(MAX_MASKED_TOKEN_IDS)
_USES_MARKS = tl.constexpr(sampler.USES_MARKS)
_USES_BAD_WORDS = tl.constexpr(sampler.USES_BAD_WORDS)
_USES_BITMASK = tl.constexpr(sampler.USES_BITMASK)
_ONE_OUTPUT = tl.constexpr(sampler.ONE_OUTPUT)
_FIRST_BIAS = tl.constexpr(sampler.FIRST_BIAS)
_BAD_WORDS = tl.constexpr(MAX_BAD_WORDS)
_RECENT = tl.constexpr(sampler.RECENT_TOKENS)
_RECENT_COLUMN = tl.constexpr(sampler.RECENT_COLUMN)
_WORDS_COLUMN = tl.constexpr(sampler.WORDS_COLUMN)
_FP8_MAX = tl.constexpr(fp8.FP8_MAX)
_TABLE_COLUMNS = tl.constexpr(sampler.TABLE_COLUMNS)


@triton.jit
def wait_for_earlier(PDL: tl.constexpr):
    """Let the next launch start, then wait for the end of those before; see ``launch.Launcher``."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, summed_ptr, hidden_size, eps, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One row a program: summed = x + residual; normed = rms_norm(summed) * weight."""
    row = tl.program_id(0).to(tl.int64) * hidden_size
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden_size
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    wait_for_earlier(PDL)
    x = tl.load(x_ptr + row + columns, mask=inside, other=0.0)
    residual = tl.load(residual_ptr + row + columns, mask=inside, other=0.0)
    # The sum is rounded before the norm: the next layer adds to the rounded sum.
    summed = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(summed_ptr + row + columns, summed, mask=inside)
    tl.store(normed_ptr + row + columns, rms_norm(summed, weight, hidden_size, eps), mask=inside)


@triton.jit
def rms_norm(x, weight, size, eps):
    """The norm of a row, [columns] or [groups, columns], rounded to the weight's dtype before it is weighted."""
    wide = x.to(tl.float32)
    squares = tl.sum(wide * wide, axis=1) if len(x.shape) == 2 else wide * wide
    scale = tl.rsqrt(tl.sum(squares, axis=0) / size + eps)
    return ((wide * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, width, stride, eps, BLOCK: tl.constexpr):
    """One row a program, in place."""
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    at = x_ptr + tl.program_id(0).to(tl.int64) * stride + columns
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    tl.store(at, rms_norm(tl.load(at, mask=inside, other=0.0), weight, width, eps), mask=inside)


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """silu(gate) * up, or gelu(gate) * up in the tanh approximation; all in float32."""
    # (1 + tanh(z)) / 2 = sigmoid(2 z), with z = √(2 / π) (gate + 0.044715 gate³) (Hendrycks and Gimpel 2016).
    slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    return gate * tl.sigmoid(slope) * up


@triton.jit
def act_and_mul(gate_ptr, intermediate_size, columns, inside, GELU: tl.constexpr):
    """:func:`gated` at columns of a row whose gate starts there, rounded."""
    gate = tl.load(gate_ptr + columns, mask=inside, other=0.0)
    up = tl.load(gate_ptr + intermediate_size + columns, mask=inside, other=0.0)
    return gated(gate.to(tl.float32), up.to(tl.float32), GELU).to(up.dtype)


@triton.jit
def act_and_mul_kernel(gate_up_ptr, out_ptr, intermediate_size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """One block of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < intermediate_size
    out = act_and_mul(gate_up_ptr + row * 2 * intermediate_size, intermediate_size, columns, inside, GELU)
    tl.store(out_ptr + row * intermediate_size + columns, out, mask=inside)


@triton.jit
def _as_cached(x):
    return tl.minimum(tl.maximum(x.to(tl.float32), -_FP8_MAX), _FP8_MAX).to(tl.float8e4nv)


@triton.jit
def rope_and_cache_kernel(
    qkv_ptr,
    positions_ptr,
    kv_slots_ptr,
    cos_sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_out_ptr,
    keys_ptr,
    values_ptr,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of heads of one row a program: norm and rotate q and k, write k and v into the cache, and k back.

    In FP8, what is cached saturates, and k and v are written back as rounded there.
    """
    IN_FP8: tl.constexpr = keys_ptr.dtype.element_ty == tl.float8e4nv
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    lanes = tl.arange(0, HALF)
    total = NUM_HEADS + 2 * NUM_KV_HEADS
    inside = heads[:, None] < total
    at = row * total * 2 * HALF + heads[:, None] * 2 * HALF + lanes[None, :]
    table = cos_sin_ptr + tl.load(positions_ptr + row).to(tl.int64) * 2 * HALF + lanes
    cos = tl.load(table)[None, :]
    sin = tl.load(table + HALF)[None, :]
    cache_row = tl.load(kv_slots_ptr + row).to(tl.int64) * NUM_KV_HEADS * 2 * HALF
    wait_for_earlier(PDL)
    raw_low = tl.load(qkv_ptr + at, mask=inside, other=0.0)
    raw_high = tl.load(qkv_ptr + at + HALF, mask=inside, other=0.0)
    low, high = raw_low.to(tl.float32), raw_high.to(tl.float32)
    is_q = heads < NUM_HEADS
    if q_norm_ptr is not None:
        scale = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / (2 * HALF) + eps)
        q_low = tl.load(q_norm_ptr + lanes)
        q_high = tl.load(q_norm_ptr + HALF + lanes)
        k_low = tl.load(k_norm_ptr + lanes)
        k_high = tl.load(k_norm_ptr + HALF + lanes)
        weight_low = tl.where(is_q[:, None], q_low[None, :], k_low[None, :]).to(tl.float32)
        weight_high = tl.where(is_q[:, None], q_high[None, :], k_high[None, :]).to(tl.float32)
        low = (low * scale[:, None]).to(q_low.dtype).to(tl.float32) * weight_low
        high = (high * scale[:, None]).to(q_low.dtype).to(tl.float32) * weight_high
        low, high = low.to(raw_low.dtype).to(tl.float32), high.to(raw_low.dtype).to(tl.float32)
    rotated_low = (low * cos - high * sin).to(raw_low.dtype)
    rotated_high = (high * cos + low * sin).to(raw_low.dtype)

    q_at = row * NUM_HEADS * 2 * HALF + heads[:, None] * 2 * HALF + lanes[None, :]
    q_mask = inside & is_q[:, None]
    tl.store(q_out_ptr + q_at, rotated_low, mask=q_mask)
    tl.store(q_out_ptr + q_at + HALF, rotated_high, mask=q_mask)

    k_head = heads - NUM_HEADS
    k_mask = inside & (k_head >= 0)[:, None] & (k_head < NUM_KV_HEADS)[:, None]
    k_at = cache_row + k_head[:, None] * 2 * HALF + lanes[None, :]
    if IN_FP8:
        rotated_low, rotated_high = _as_cached(rotated_low), _as_cached(rotated_high)
        raw_low, raw_high = _as_cached(raw_low), _as_cached(raw_high)
    tl.store(keys_ptr + k_at, rotated_low, mask=k_mask)
    tl.store(keys_ptr + k_at + HALF, rotated_high, mask=k_mask)
    tl.store(qkv_ptr + at, rotated_low.to(qkv_ptr.dtype.element_ty), mask=k_mask)
    tl.store(qkv_ptr + at + HALF, rotated_high.to(qkv_ptr.dtype.element_ty), mask=k_mask)

    v_head = k_head - NUM_KV_HEADS
    v_mask = inside & (v_head >= 0)[:, None]
    v_at = cache_row + v_head[:, None] * 2 * HALF + lanes[None, :]
    tl.store(values_ptr + v_at, raw_low, mask=v_mask)
    tl.store(values_ptr + v_at + HALF, raw_high, mask=v_mask)
    if IN_FP8:
        tl.store(qkv_ptr + at, raw_low.to(qkv_ptr.dtype.element_ty), mask=v_mask)
        tl.store(qkv_ptr + at + HALF, raw_high.to(qkv_ptr.dtype.element_ty), mask=v_mask)


@triton.jit
def _scores(row_ptr, ids, vocab_size, settings_ptr, adjust_ptr, is_masked, ADJUSTED: tl.constexpr):
    """Float32 logits of token ids, -inf outside the vocabulary and if masked; changed as ``sampler._adjust`` does."""
    inside = ids < vocab_size
    scores = tl.load(row_ptr + ids, mask=inside, other=-float("inf")).to(tl.float32)
    if ADJUSTED:
        flags = tl.load(settings_ptr + 7)
        if flags & _USES_MARKS:
            repetition = tl.load(settings_ptr + 8).to(tl.float32, bitcast=True)
            frequency = tl.load(settings_ptr + 9).to(tl.float32, bitcast=True)
            presence = tl.load(settings_ptr + 10).to(tl.float32, bitcast=True)
            marks = tl.load(adjust_ptr + ids, mask=inside, other=0)
            biases = tl.load(adjust_ptr + vocab_size + tl.maximum(marks, 0) // _FIRST_BIAS)
            scores += biases.to(tl.float32, bitcast=True)
            penalized = tl.where(scores > 0, scores / repetition, scores * repetition)
            scores = tl.where((marks & (_FIRST_BIAS - 1)) != 0, penalized, scores)
            counts = (marks & (_FIRST_BIAS - 1)) // _ONE_OUTPUT
            scores -= frequency * counts + tl.where(counts > 0, presence, 0.0)
            scores = tl.where(marks < 0, -float("inf"), scores)
        if flags & _USES_BITMASK:
            words = tl.load(adjust_ptr + vocab_size + _TABLE_COLUMNS + ids // 32, mask=inside, other=0)
            scores = tl.where(((words >> (ids % 32)) & 1) != 0, scores, -float("inf"))
    if is_masked:
        for i in tl.static_range(_MASKED_COUNT):
            masked_id = tl.load(settings_ptr + _MASKED_COLUMN + i)
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
    adjustments_ptr,
    last_token_ptr,
    out_ptr,
    vocab_size,
    row_stride,
    adjustments_stride,
    BLOCK: tl.constexpr,
    ADJUSTED: tl.constexpr,
):
    """One row a program: those with flags if ADJUSTED, else the others; a program exits at once for any other row."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    settings = settings_ptr + slot * _SETTINGS_COLUMNS
    flags = tl.load(settings + 7)
    if (flags != 0) == ADJUSTED:
        position = tl.load(positions_ptr + row)
        adjust = adjustments_ptr + slot * adjustments_stride
        row_ptr = logits_ptr + row.to(tl.int64) * row_stride
        token = _sample_row(row_ptr, position, settings, adjust, vocab_size, BLOCK, ADJUSTED)
        tl.store(out_ptr + row, token)
        tl.store(last_token_ptr + slot, token)
        if ADJUSTED:  # noqa: SIM102 - known when compiled, as the other is not
            if flags & _USES_MARKS:
                tl.store(adjust + token, tl.load(adjust + token) + _ONE_OUTPUT)
                if flags & _USES_BAD_WORDS:
                    _ban_bad_words(token, position, adjust, adjust + vocab_size)


@triton.jit
def _ban_bad_words(token, position, marks, table):
    """Ban the tokens that would complete a bad word after the token at this position, and no others of the words."""
    lanes, recent = tl.arange(0, _RECENT), table + _RECENT_COLUMN
    # The oldest first. The newest is not read: its store may come before or after.
    at = (position + 1 + lanes) % _RECENT
    tokens = tl.where(lanes == _RECENT - 1, token, tl.load(recent + at))
    tl.store(recent + position % _RECENT, token)
    words = table + _WORDS_COLUMN + tl.arange(0, _BAD_WORDS) * (1 + _RECENT)
    last = tl.load(words)
    before = tl.load(words[:, None] + 1 + lanes[None, :])
    differs = (before != tokens[None, :]) & (before >= 0)
    is_completed = (tl.sum(differs.to(tl.int32), axis=1) == 0) & (last >= 0)
    # Words may share their last token: all threads are done with a step before the next one begins.
    tl.debug_barrier()
    tl.store(marks + last, tl.load(marks + last, mask=last >= 0) & 0x7FFFFFFF, mask=last >= 0)
    tl.debug_barrier()
    tl.store(marks + last, tl.load(marks + last, mask=is_completed) | -0x80000000, mask=is_completed)


@triton.jit
def _sample_row(row_ptr, position, settings, adjust, vocab_size, BLOCK: tl.constexpr, ADJUSTED: tl.constexpr):
    """A row's token: greedy, or Gumbel-max over what top_k, top_p and min_p leave, cut by bisection without a sort."""
    temperature = tl.load(settings).to(tl.float32, bitcast=True)
    is_masked = position < tl.load(settings + 6)
    lanes = tl.arange(0, BLOCK)
    divisor = tl.where(temperature > 0, temperature, 1.0)

    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    best_id = tl.full((BLOCK,), 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + lanes
        scores = _scores(row_ptr, ids, vocab_size, settings, adjust, is_masked, ADJUSTED)
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
                    scores = _scores(row_ptr, ids, vocab_size, settings, adjust, is_masked, ADJUSTED)
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
                scores = _scores(row_ptr, ids, vocab_size, settings, adjust, is_masked, ADJUSTED) / divisor
                mass += tl.where(_order_key(scores) >= threshold, tl.exp(scores - peak), 0.0)
            wanted = top_p * tl.sum(mass, axis=0)
            low, high = threshold, high_key
            while low < high:
                middle = (low + high + 1) >> 1
                mass = tl.full((BLOCK,), 0.0, tl.float32)
                for start in range(0, vocab_size, BLOCK):
                    ids = start + lanes
                    scores = _scores(row_ptr, ids, vocab_size, settings, adjust, is_masked, ADJUSTED) / divisor
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
            scores = _scores(row_ptr, ids, vocab_size, settings, adjust, is_masked, ADJUSTED) / divisor
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
    return token


@triton.jit
def tile_at(tile, num_tiles_m, num_tiles_n, GROUP_M: tl.constexpr):
    """Row and column of a tile: down GROUP_M rows first, so that tiles at work together share x and w in L2."""
    tiles_in_group = GROUP_M * num_tiles_n
    first = tile // tiles_in_group * GROUP_M
    rows = min(num_tiles_m - first, GROUP_M)
    return first + tile % tiles_in_group % rows, tile % tiles_in_group // rows


# The number of rows changes with every chunk: no value of it may be compiled for anew.
@triton.jit(do_not_specialize=["num_rows"])
def swiglu_matmul_kernel(
    x_desc,
    gate_up_desc,
    out_desc,
    num_rows,
    intermediate_size,
    hidden_size,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out = silu(x @ gate^T) * (x @ up^T), summed in float32.

    The kernel is persistent: a program works through tiles of the output, and loads its next tile while it finishes
    the last one. TMA reads zeros beyond an array's end and writes nothing there, so sizes need not be multiples of a
    tile's.

    gate_up_desc is over [2, intermediate_size, hidden_size], a box of it [2, BLOCK_N, BLOCK_K]: one product then
    gives both halves, and each step reads x from shared memory once.
    """
    num_tiles_m, num_tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(intermediate_size, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_tiles_m * num_tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_at(tile, num_tiles_m, num_tiles_n, GROUP_M)
        acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
        for k in tl.range(0, hidden_size, BLOCK_K, num_stages=STAGES):
            gate_up = tl.reshape(gate_up_desc.load([0, tile_n * BLOCK_N, k]), (2 * BLOCK_N, BLOCK_K))
            acc = tl.dot(x_desc.load([tile_m * BLOCK_M, k]), gate_up.T, acc)
        # The halves of a column lie in the same thread, so that they are split without a shuffle.
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
        out_desc.store([tile_m * BLOCK_M, tile_n * BLOCK_N], gated(gate, up, False).to(out_desc.dtype))
