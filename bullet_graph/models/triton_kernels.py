"""Triton kernels for the steps of a layer but attention; launched by ``triton_ops``.

Each computes what its namesake in ``ops`` does in plain torch.

With PDL, launched with ``launch_pdl=True``, a kernel's programs may start while the kernel before it still runs
(programmatic dependent launch). Why a chain of such launches is safe: every program of every kernel waits, whatever
it does afterwards, before it touches what an earlier kernel reads or writes, so a kernel completes only after all
before it have, and the wait for its completion is a wait for theirs. A kernel launched without it, such as cuBLAS's,
starts when all before it have completed. What is read before the wait was written before the last such kernel began:
weights, and a step's inputs, which are on the device before its first kernel, torch's lookup of embeddings.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    summed_ptr,
    hidden_size,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row a program: summed = x + residual; normed = rms_norm(summed) * weight."""
    row = tl.program_id(0).to(tl.int64) * hidden_size
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden_size
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row + columns, mask=inside, other=0.0)
    residual = tl.load(residual_ptr + row + columns, mask=inside, other=0.0)
    # The sum is rounded before the norm, so that what is normed is what the next layer adds to.
    summed = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(summed_ptr + row + columns, summed, mask=inside)
    wide = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden_size + eps)
    normed = (wide * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(normed_ptr + row + columns, normed.to(x.dtype), mask=inside)


@triton.jit
def silu_and_mul_kernel(gate_up_ptr, out_ptr, intermediate_size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One block of one row a program: silu(gate) * up."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < intermediate_size
    gate = tl.load(gate_up_ptr + row * 2 * intermediate_size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(
        gate_up_ptr + row * 2 * intermediate_size + intermediate_size + columns, mask=inside, other=0.0
    )
    out = gate * tl.sigmoid(gate) * up.to(tl.float32)
    tl.store(out_ptr + row * intermediate_size + columns, out.to(up.dtype), mask=inside)


@triton.jit
def gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    IN_FEATURES: tl.constexpr,
    FEATURES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """FEATURES output features a program: the product of one row with as many rows of the weights.

    Streams the weights once, past the L2; BLOCK divides IN_FEATURES, so that loads need no mask. The next
    block is under way while this one is added.
    """
    features = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    lanes = tl.arange(0, BLOCK)
    rows = weight_ptr + features[:, None].to(tl.int64) * IN_FEATURES + lanes[None, :]
    total = tl.zeros((FEATURES, BLOCK), tl.float32)
    if PDL:
        gdc_launch_dependents()
    weight = tl.load(rows, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
    for start in range(0, IN_FEATURES - BLOCK, BLOCK):
        following = tl.load(rows + start + BLOCK, eviction_policy="evict_first")
        total += weight.to(tl.float32) * tl.load(x_ptr + start + lanes).to(tl.float32)[None, :]
        weight = following
    total += weight.to(tl.float32) * tl.load(x_ptr + IN_FEATURES - BLOCK + lanes).to(tl.float32)[None, :]
    out = tl.sum(total, axis=1)
    if HAS_BIAS:
        out += tl.load(bias_ptr + features).to(tl.float32)
    tl.store(out_ptr + features, out.to(out_ptr.dtype.element_ty))


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
    HALF_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    QK_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of heads of one row a program: norm and rotate q and k, write k and v into the cache, and k back."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    lanes = tl.arange(0, HALF_BLOCK)
    total = NUM_HEADS + 2 * NUM_KV_HEADS
    inside = (heads[:, None] < total) & (lanes[None, :] < HALF)
    at = row * total * 2 * HALF + heads[:, None] * 2 * HALF + lanes[None, :]
    table = cos_sin_ptr + tl.load(positions_ptr + row).to(tl.int64) * 2 * HALF + lanes
    cos = tl.load(table, mask=lanes < HALF, other=0.0)[None, :]
    sin = tl.load(table + HALF, mask=lanes < HALF, other=0.0)[None, :]
    cache_row = tl.load(kv_slots_ptr + row).to(tl.int64) * NUM_KV_HEADS * 2 * HALF
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    raw_low = tl.load(qkv_ptr + at, mask=inside, other=0.0)
    raw_high = tl.load(qkv_ptr + at + HALF, mask=inside, other=0.0)
    low, high = raw_low.to(tl.float32), raw_high.to(tl.float32)
    is_q = heads < NUM_HEADS
    if QK_NORM:
        scale = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / (2 * HALF) + eps)
        lane_inside = lanes < HALF
        q_low = tl.load(q_norm_ptr + lanes, mask=lane_inside, other=0.0)
        q_high = tl.load(q_norm_ptr + HALF + lanes, mask=lane_inside, other=0.0)
        k_low = tl.load(k_norm_ptr + lanes, mask=lane_inside, other=0.0)
        k_high = tl.load(k_norm_ptr + HALF + lanes, mask=lane_inside, other=0.0)
        weight_low = tl.where(is_q[:, None], q_low[None, :], k_low[None, :]).to(tl.float32)
        weight_high = tl.where(is_q[:, None], q_high[None, :], k_high[None, :]).to(tl.float32)
        low = (low * scale[:, None]).to(raw_low.dtype).to(tl.float32) * weight_low
        high = (high * scale[:, None]).to(raw_low.dtype).to(tl.float32) * weight_high
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
    tl.store(keys_ptr + k_at, rotated_low, mask=k_mask)
    tl.store(keys_ptr + k_at + HALF, rotated_high, mask=k_mask)
    tl.store(qkv_ptr + at, rotated_low, mask=k_mask)
    tl.store(qkv_ptr + at + HALF, rotated_high, mask=k_mask)

    v_head = k_head - NUM_KV_HEADS
    v_mask = inside & (v_head >= 0)[:, None]
    v_at = cache_row + v_head[:, None] * 2 * HALF + lanes[None, :]
    tl.store(values_ptr + v_at, raw_low, mask=v_mask)
    tl.store(values_ptr + v_at + HALF, raw_high, mask=v_mask)
