"""Triton kernels of a mixture of experts; launched by ``triton_moe``. ``TorchOps.experts`` computes the same in torch.

Rows are sorted by expert on the device, so that one launch multiplies each expert's rows with its weights. A *pair* is
a row and one of its experts, numbered row * top_k + rank. A *block* is up to BLOCK_M pairs of one expert.
"""

import triton
import triton.language as tl

from bullet_graph.kernels.triton_kernels import gated, tile_at


@triton.jit(do_not_specialize=["num_rows"])
def route_kernel(
    logits_ptr,
    weights_ptr,
    chosen_ptr,
    counts_ptr,
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """ROWS rows a program: their experts, highest softmax first, and how many rows of the program take each expert.

    Of equal experts the first is taken. Whatever the logits are, an index is below NUM_EXPERTS.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, EXPERTS)
    is_row = rows < num_rows
    inside = is_row[:, None] & (experts < NUM_EXPERTS)[None, :]
    logits = tl.load(logits_ptr + rows[:, None] * NUM_EXPERTS + experts[None, :], mask=inside, other=-float("inf"))
    logits = tl.where(is_row[:, None], logits.to(tl.float32), 0.0)
    exponentials = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    scores = exponentials / tl.sum(exponentials, axis=1)[:, None]
    # NaN, as logits may be before the weights are there, is no candidate.
    scores = tl.where(scores == scores, scores, 0.0)
    scores = tl.where((experts < NUM_EXPERTS)[None, :], scores, -1.0)
    left = scores
    for rank in tl.static_range(TOP_K):
        expert = tl.min(tl.where(left == tl.max(left, axis=1)[:, None], experts[None, :], EXPERTS), axis=1)
        tl.store(chosen_ptr + rows * TOP_K + rank, expert, mask=is_row)
        left = tl.where(experts[None, :] == expert[:, None], -2.0, left)
    is_chosen = (left == -2.0) & is_row[:, None]
    tl.store(counts_ptr + tl.program_id(0) * EXPERTS + experts, tl.sum(is_chosen.to(tl.int32), axis=0))
    # Chosen experts again, from the same values in the same order.
    total = tl.sum(tl.where(left == -2.0, scores, 0.0), axis=1) if RENORMALIZE else 1.0
    left = scores
    for rank in tl.static_range(TOP_K):
        highest = tl.max(left, axis=1)
        expert = tl.min(tl.where(left == highest[:, None], experts[None, :], EXPERTS), axis=1)
        tl.store(weights_ptr + rows * TOP_K + rank, highest / total, mask=is_row)
        left = tl.where(experts[None, :] == expert[:, None], -2.0, left)


@triton.jit(do_not_specialize=["num_rows", "num_programs", "max_blocks"])
def sort_kernel(
    chosen_ptr,
    counts_ptr,
    pairs_ptr,
    blocks_ptr,
    num_rows,
    num_programs,
    max_blocks,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Put the pairs of ROWS rows in their places among all pairs, sorted by expert, then by row; and describe blocks.

    ``counts`` [num_programs, EXPERTS] are those of ``route_kernel``, with as many programs. ``blocks`` [3, max_blocks]
    get each block's expert, or -1 beyond the last block, and its first and last place, the latter excluded.
    """
    program = tl.program_id(0)
    experts, chunk = tl.arange(0, EXPERTS), tl.arange(0, CHUNK)
    totals = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, num_programs, CHUNK):
        others = start + chunk
        at = counts_ptr + others[:, None] * EXPERTS + experts[None, :]
        counts = tl.load(at, mask=(others < num_programs)[:, None], other=0)
        totals += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((others < program)[:, None], counts, 0), axis=0)
    ends = tl.cumsum(totals, axis=0)

    rows = program * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    is_chosen = tl.zeros((ROWS, EXPERTS), tl.int32)
    for rank in tl.static_range(TOP_K):
        expert = tl.load(chosen_ptr + rows * TOP_K + rank, mask=is_row, other=-1)
        is_chosen += (experts[None, :] == expert[:, None]).to(tl.int32)
    places = (ends - totals + before)[None, :] + tl.cumsum(is_chosen, axis=0) - is_chosen
    for rank in tl.static_range(TOP_K):
        expert = tl.load(chosen_ptr + rows * TOP_K + rank, mask=is_row, other=-1)
        place = tl.sum(tl.where(experts[None, :] == expert[:, None], places, 0), axis=1)
        tl.store(pairs_ptr + place, rows * TOP_K + rank, mask=is_row)

    block_counts = (totals + BLOCK_M - 1) // BLOCK_M
    block_ends = tl.cumsum(block_counts, axis=0)
    for start in range(program * ROWS, max_blocks, num_programs * ROWS):
        blocks = start + tl.arange(0, ROWS)
        # Experts whose blocks all come before, and after the last block all experts.
        expert = tl.sum((block_ends[None, :] <= blocks[:, None]).to(tl.int32), axis=1)
        is_own = experts[None, :] == expert[:, None]
        first_block = tl.sum(tl.where(is_own, (block_ends - block_counts)[None, :], 0), axis=1)
        end = tl.sum(tl.where(is_own, ends[None, :], 0), axis=1)
        first = tl.sum(tl.where(is_own, (ends - totals)[None, :], 0), axis=1) + (blocks - first_block) * BLOCK_M
        inside = blocks < max_blocks
        tl.store(blocks_ptr + blocks, tl.where(expert < EXPERTS, expert, -1), mask=inside)
        tl.store(blocks_ptr + max_blocks + blocks, first, mask=inside)
        tl.store(blocks_ptr + 2 * max_blocks + blocks, tl.minimum(first + BLOCK_M, end), mask=inside)


@triton.jit(do_not_specialize=["max_blocks"])
def grouped_matmul_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scale_ptr,
    blocks_ptr,
    pairs_ptr,
    pair_weights_ptr,
    out_ptr,
    max_blocks,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
    GLU: tl.constexpr,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    FIRST: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of one block a program, summed in float32; a program beyond the last block exits at once.

    GLU: from rows [rows, DEPTH] by pair to silu(x @ gate^T) * (x @ up^T) by place, [pairs, COLUMNS]; an expert's
    weights are [2 * COLUMNS, DEPTH]. Else: from rows by place to x @ down^T times the pair's weight, by pair; an
    expert's weights are [COLUMNS, DEPTH].

    CHANNELS 0: 16 bits. Else rows and weights are FP8, and GROUP columns of a row, and of CHANNELS rows of weights,
    share a scale; GROUP 0: all columns. A group is a multiple of BLOCK_K columns.

    OWN 0: the weights are those of all experts. Else of so many from FIRST on, and blocks of others are left out.
    """
    tile_m, tile_n = tile_at(tl.program_id(0), max_blocks, tl.cdiv(COLUMNS, BLOCK_N), GROUP_M)
    expert = tl.load(blocks_ptr + tile_m)
    if OWN > 0:
        expert = tl.where((expert >= FIRST) & (expert < FIRST + OWN), expert - FIRST, -1)
    if expert >= 0:
        end = tl.load(blocks_ptr + 2 * max_blocks + tile_m)
        places = tl.load(blocks_ptr + max_blocks + tile_m) + tl.arange(0, BLOCK_M)
        is_pair = places < end
        # Beyond the block's end its last pair is computed again, beyond the last column the first: no masks.
        pairs = tl.load(pairs_ptr + tl.minimum(places, end - 1))
        rows = pairs // TOP_K if GLU else tl.minimum(places, end - 1)
        # Of a GLU, BLOCK_N columns of gate, then the same of up: one product then gives both.
        WIDTH: tl.constexpr = 2 * BLOCK_N if GLU else BLOCK_N
        lanes, depths = tl.arange(0, WIDTH), tl.arange(0, BLOCK_K)
        columns = (tile_n * BLOCK_N + lanes % BLOCK_N) % COLUMNS + lanes // BLOCK_N * COLUMNS
        x_at = x_ptr + rows.to(tl.int64)[:, None] * DEPTH + depths[None, :]
        expert_weights = weight_ptr + expert.to(tl.int64) * (2 * COLUMNS if GLU else COLUMNS) * DEPTH
        weight_at = expert_weights + columns[None, :] * DEPTH + depths[:, None]
        NUM_GROUPS: tl.constexpr = (DEPTH + GROUP - 1) // GROUP if GROUP > 0 else 1
        if CHANNELS > 0:
            NUM_CHANNELS: tl.constexpr = ((2 * COLUMNS if GLU else COLUMNS) + CHANNELS - 1) // CHANNELS
            x_scales_at = x_scales_ptr + rows * NUM_GROUPS
            scales_at = scale_ptr + (expert * NUM_CHANNELS + columns // CHANNELS) * NUM_GROUPS
        acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        for start in tl.range(0, DEPTH, BLOCK_K, num_stages=STAGES):
            if DEPTH % BLOCK_K == 0:
                x, weight = tl.load(x_at + start), tl.load(weight_at + start)
            else:
                is_inside = depths < DEPTH - start
                x = tl.load(x_at + start, mask=is_inside[None, :], other=0.0)
                weight = tl.load(weight_at + start, mask=is_inside[:, None], other=0.0)
            if GROUP > 0:
                x_scale, scale = tl.load(x_scales_at + start // GROUP), tl.load(scales_at + start // GROUP)
                acc += tl.dot(x, weight) * x_scale[:, None] * scale[None, :]
            else:
                acc = tl.dot(x, weight, acc)
        if CHANNELS > 0 and GROUP == 0:
            acc *= tl.load(x_scales_at)[:, None] * tl.load(scales_at)[None, :]
        if GLU:
            # The halves of a column lie in the same thread, so that they are split without a shuffle.
            gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
            out, out_rows = gated(gate, up, False), places
        else:
            out, out_rows = acc * tl.load(pair_weights_ptr + pairs)[:, None], pairs
        out_columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        out_at = out_ptr + out_rows.to(tl.int64)[:, None] * COLUMNS + out_columns[None, :]
        is_inside = is_pair[:, None] & (out_columns < COLUMNS)[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def combine_kernel(
    outputs_ptr,
    chosen_ptr,
    out_ptr,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    OWN: tl.constexpr,
):
    """One block of one row a program: the sum of its pairs' outputs, in float32 and in the order of the pairs.

    FIRST and OWN are those of ``grouped_matmul_kernel``.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP_K):
        end = COLUMNS
        if OWN > 0:
            # Outputs of other ranks' experts are not there.
            expert = tl.load(chosen_ptr + row * TOP_K + rank) - FIRST
            end = tl.where((expert >= 0) & (expert < OWN), COLUMNS, 0)
        inside = columns < end
        total += tl.load(outputs_ptr + (row * TOP_K + rank) * COLUMNS + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * COLUMNS + columns, total.to(out_ptr.dtype.element_ty), mask=columns < COLUMNS)
