"""Triton kernels of decode attention over the paged KV cache; launched by ``decode_attention``.

The batch's blocks, in the order of ``kv_indices``, form one line of work, which the workers cut into equal ranges.
``kv_indptr`` says where each sequence starts, so the host plans nothing. A worker that has all of a sequence writes its
output. Of a sequence that reaches beyond its range it writes a partial result, at most one at either end. The worker
that comes last, or a second kernel, adds the partial results up.

In a layer with a window, only the blocks that the window touches form the line, the last of each sequence.

Sequences that begin with the same blocks may be told as groups of MEMBERS at most. A launch of its own reads a group's
common blocks once for all members' queries, as one sequence with more rows. The launch of the sequences goes on from
its results, with the blocks after them.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from bullet_graph.kernels.fp8_kernels import fp8_to_half, words_to_half
from bullet_graph.kernels.triton_kernels import wait_for_earlier

TILE = 16
"""Keys that a program takes at once: the smallest product of the tensor cores."""
_TILE = tl.constexpr(TILE)


@triton.jit
def _range_start(worker, total, workers):
    """Where a worker's range starts: ranges differ by one unit at most, the longer ones come first."""
    return worker * (total // workers) + tl.minimum(worker, total % workers)


@triton.jit
def _worker_of(unit, total, workers):
    """The worker whose range holds a unit; the inverse of ``_range_start``."""
    shorter = total // workers
    longer_end = (total % workers) * (shorter + 1)
    in_longer = unit // (shorter + 1)
    in_shorter = total % workers + (unit - longer_end) // tl.maximum(shorter, 1)
    return tl.where(unit < longer_end, in_longer, in_shorter)


@triton.jit
def _sum_of_partials(
    partial_ptr, partial_lse_ptr, first, last, heads, inside, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Sum of the partial results of workers first to last, [len(heads), HEAD_DIM], and its log-sum-exp."""
    BLOCK: tl.constexpr = heads.shape[0]
    lanes = tl.arange(0, HEAD_DIM)
    peak = tl.full((BLOCK,), -float("inf"), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK, HEAD_DIM), tl.float32)
    for of in range(first, last + 1, 2):
        # Two at a time: the second loads while the first is added.
        for ahead in tl.static_range(2):
            by = of + ahead + tl.zeros_like(heads)
            there = inside & (by <= last)
            # Where the sequence starts it is the last of the worker's range, from there on the first.
            at = (2 * by + (by == first).to(tl.int32)) * NUM_HEADS + heads
            partial_ptrs = partial_ptr + at[:, None] * HEAD_DIM + lanes[None, :]
            # Not from the SM's own cache, which does not see other SMs' writes.
            lse = tl.load(partial_lse_ptr + at, mask=there, other=-float("inf"), cache_modifier=".cg")
            partial = tl.load(partial_ptrs, mask=there[:, None], other=0.0, cache_modifier=".cg")
            new_peak = tl.maximum(peak, lse)
            # Heads outside have no partials, and so no peak as an origin.
            origin = tl.where(new_peak == -float("inf"), 0.0, new_peak)
            weight = tl.exp2(lse - origin)
            shrink = tl.exp2(peak - origin)
            peak = new_peak
            mass = mass * shrink + weight
            sums = sums * shrink[:, None] + partial * weight[:, None]
    mass = tl.where(inside, mass, 1.0)
    return sums / mass[:, None], peak + tl.log2(mass)


@triton.jit
def _shrunk_plus(sums, v, weights, shrink):
    return tl.dot(v.to(weights.dtype), weights, sums * shrink[None, :], input_precision="ieee")


@triton.jit
def _shrunk_plus_each(sums, v, weights, shrink):
    """Shrink the sums [numbers, queries] and add v [numbers, keys] @ weights [keys, queries]."""
    if v.dtype == tl.int32:
        # Four numbers in FP8 each. There are four sums: of first numbers, of second, third, and last ones. So a thread
        # reads four numbers at once, though the product wants those of two keys side by side.
        v0, v1, v2, v3 = words_to_half(v)
        return (
            _shrunk_plus(sums[0], v0, weights, shrink),
            _shrunk_plus(sums[1], v1, weights, shrink),
            _shrunk_plus(sums[2], v2, weights, shrink),
            _shrunk_plus(sums[3], v3, weights, shrink),
        )
    else:
        return (_shrunk_plus(sums[0], v, weights, shrink),)


@triton.jit
def _by_query(sums, in_words: tl.constexpr):
    """The sums of ``_shrunk_plus_each``, [queries, numbers of a head]."""
    if in_words:
        sums_by_byte = tl.join(tl.join(sums[0], sums[2]), tl.join(sums[1], sums[3]))  # [words, queries, 2, 2]
        return tl.reshape(tl.permute(sums_by_byte, (1, 0, 2, 3)), (sums[0].shape[1], 4 * sums[0].shape[0]))
    else:
        return sums[0].T


# The batch lies in the middle of larger buffers: one kernel serves every alignment.
@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["kv_indptr_ptr", "block_indptr_ptr", "kv_indices_ptr", "last_block_tokens_ptr"],
)
def decode_attention_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    kv_indptr_ptr,
    block_indptr_ptr,
    kv_indices_ptr,
    last_block_tokens_ptr,
    members_ptr,
    prefix_ptr,
    prefix_lse_ptr,
    out_ptr,
    partial_ptr,
    partial_lse_ptr,
    arrived_ptr,
    num_rows,
    scale_log2,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    MEMBERS: tl.constexpr,
    LEAST_UNITS: tl.constexpr,
    CONTINUE: tl.constexpr,
    COMBINE: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    """One range of blocks of one key head per program, sequence after sequence, TILE keys at a time.

    Keys are the left operand of the first product, values of the second: the tensor cores take at least 16 rows there,
    but as few as 8 columns, the queries, on the right. BLOCK_TOKENS is a multiple of TILE.

    With MEMBERS above 1, a sequence of the line is a group: ``members_ptr`` [groups, 2] has the batch's first row of it
    and the number of its rows, ``kv_indptr_ptr`` counts common blocks, and results go to ``out_ptr`` and
    ``prefix_lse_ptr``. Ranges then have at least LEAST_UNITS. With CONTINUE, rows with fewer blocks in
    ``kv_indptr_ptr`` than in ``block_indptr_ptr`` go on from these (``prefix_ptr``).

    WINDOW is how many of the last tokens each sequence attends to, 0 for all. With one, ``kv_indptr_ptr`` counts the
    blocks of the window alone, and ``block_indptr_ptr`` says where all blocks of each sequence are.

    With COMBINE, the program that writes the last of a sequence's partial results adds them up. The programs count them
    in ``arrived_ptr`` [rows, key heads], which is zero before and after. With TRIGGER, the launch behind may start.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    IN_FP8: tl.constexpr = keys_ptr.dtype.element_ty == tl.float8e4nv
    PACKED: tl.constexpr = 4 if IN_FP8 else 1  # numbers of a value that a thread reads as one
    if TRIGGER:
        gdc_launch_dependents()
    worker = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    workers = tl.num_programs(0) // NUM_KV_HEADS
    total = tl.load(kv_indptr_ptr + num_rows) + num_rows
    if MEMBERS > 1:
        # Partial results are large, and one program adds those of a group up: rather fewer, longer ranges.
        workers = tl.maximum(tl.minimum(workers, total // LEAST_UNITS), 1)
    unit = _range_start(worker, total, workers)
    range_end = _range_start(worker + 1, total, workers)

    rows = tl.arange(0, ROWS_BLOCK)
    ends = tl.load(kv_indptr_ptr + 1 + rows, mask=rows < num_rows, other=2147483647 // 2)
    row = tl.sum((ends + rows + 1 <= unit).to(tl.int32), axis=0)

    lanes = tl.arange(0, HEAD_DIM)
    # Members' heads one after the other; what is left of the block is masked.
    members = tl.arange(0, Q_BLOCK) // GROUP
    q_heads = kv_head * GROUP + tl.arange(0, Q_BLOCK) % GROUP
    keys = tl.arange(0, _TILE)
    packs = tl.arange(0, HEAD_DIM // PACKED)
    packed_ptr = values_ptr.to(tl.pointer_type(tl.int32)) if IN_FP8 else values_ptr
    key_at = (keys * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + lanes[None, :]
    value_at = (keys * NUM_KV_HEADS + kv_head)[None, :] * (HEAD_DIM // PACKED) + packs[:, None]

    while (unit < range_end) & (worker < workers):
        begin = tl.load(kv_indptr_ptr + row)
        end = tl.load(kv_indptr_ptr + row + 1)
        # The first unit of a sequence is what starting it costs; then come its blocks.
        first_unit = begin + row + 1
        starts_here = unit <= first_unit
        unit_end = tl.minimum(first_unit + end - begin, range_end)
        first_block = begin + tl.maximum(unit - first_unit, 0)
        last_block = begin + tl.maximum(unit_end - first_unit, 0)
        if last_block > first_block:
            ids_ptr = kv_indices_ptr + first_block
            num_tokens = (last_block - first_block) * BLOCK_TOKENS
            first_row = row
            num_members = 1
            if MEMBERS > 1:
                first_row = tl.load(members_ptr + 2 * row)
                num_members = tl.load(members_ptr + 2 * row + 1)
                ids_ptr += tl.load(block_indptr_ptr + first_row) - begin
            elif last_block == end:
                num_tokens += tl.load(last_block_tokens_ptr + row) - BLOCK_TOKENS
            first_token = 0
            first_start = 0
            if WINDOW > 0 or CONTINUE:
                ids_ptr += tl.load(block_indptr_ptr + row + 1) - end
            if WINDOW > 0:
                # The window begins within the line's first block of the sequence.
                after = (end - first_block - 1) * BLOCK_TOKENS + tl.load(last_block_tokens_ptr + row)
                first_token = tl.maximum(after - WINDOW, 0)
                # Not in a tile without any key: its maximum would be that of nothing.
                first_start = first_token // _TILE * _TILE
            q_at = (first_row + members).to(tl.int64) * NUM_HEADS + q_heads
            q_inside = members < num_members
            q = tl.load(q_ptr + q_at[:, None] * HEAD_DIM + lanes[None, :], mask=q_inside[:, None], other=0.0)
            if IN_FP8 and q.dtype == tl.bfloat16:
                # FP8 becomes fp16 in one instruction, bfloat16 in four.
                q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
            peak = tl.full((Q_BLOCK,), -float("inf"), tl.float32)
            mass = tl.zeros((Q_BLOCK,), tl.float32)
            zeros = tl.zeros((HEAD_DIM // PACKED, Q_BLOCK), tl.float32)
            if CONTINUE:
                num_blocks = tl.load(block_indptr_ptr + row + 1) - tl.load(block_indptr_ptr + row)
                goes_on = members < tl.where(starts_here & (num_blocks > end - begin), 1, 0)
                peak = tl.load(prefix_lse_ptr + q_at, mask=goes_on, other=-float("inf"))
                mass = tl.where(goes_on, 1.0, 0.0)
                prefix_ptrs = prefix_ptr + q_at[None, :] * HEAD_DIM + lanes[:, None]
                zeros = tl.load(prefix_ptrs, mask=goes_on[None, :], other=0.0)
            sums = (zeros, zeros, zeros, zeros) if IN_FP8 else (zeros,)
            block = tl.load(ids_ptr)
            for start in tl.range(first_start, num_tokens, _TILE, num_stages=3):
                inside = start + keys < num_tokens
                if WINDOW > 0:
                    inside &= start + keys >= first_token
                token = block.to(tl.int64) * BLOCK_TOKENS + start % BLOCK_TOKENS
                # Read a tile ahead: dependent loads within a tile would cost pipeline stages.
                after = start + _TILE
                block = tl.load(ids_ptr + after // BLOCK_TOKENS, mask=after < num_tokens, other=0)
                key_ptrs = keys_ptr + token * (NUM_KV_HEADS * HEAD_DIM) + key_at
                value_ptrs = packed_ptr + token * (NUM_KV_HEADS * HEAD_DIM // PACKED) + value_at
                k = tl.load(key_ptrs, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
                k = fp8_to_half(k).to(q.dtype) if IN_FP8 else k.to(q.dtype)
                scores = tl.dot(k, q.T, input_precision="ieee") * scale_log2
                scores = tl.where(inside[:, None], scores, -float("inf"))
                new_peak = tl.maximum(peak, tl.max(scores, axis=0))
                weights = tl.exp2(scores - new_peak[None, :])
                shrink = tl.exp2(peak - new_peak)
                peak = new_peak
                mass = mass * shrink + tl.sum(weights, axis=0)
                v = tl.load(value_ptrs, mask=inside[None, :], other=0, eviction_policy="evict_first")
                sums = _shrunk_plus_each(sums, v, weights.to(q.dtype), shrink)
            attended = _by_query(sums, IN_FP8) / mass[:, None]
            if starts_here & (last_block == end):
                out_ptrs = out_ptr + q_at[:, None] * HEAD_DIM + lanes[None, :]
                tl.store(out_ptrs, attended.to(out_ptr.dtype.element_ty), mask=q_inside[:, None])
                if MEMBERS > 1:
                    tl.store(prefix_lse_ptr + q_at, peak + tl.log2(mass), mask=q_inside)
            else:
                # The first sequence of a range goes into the worker's first slot, the last into its second.
                slot = 2 * worker + starts_here.to(tl.int32)
                heads = members * NUM_HEADS + q_heads
                partial_at = slot * (MEMBERS * NUM_HEADS) + heads
                partial_ptrs = partial_ptr + partial_at[:, None] * HEAD_DIM + lanes[None, :]
                tl.store(partial_ptrs, attended, mask=q_inside[:, None])
                tl.store(partial_lse_ptr + partial_at, peak + tl.log2(mass), mask=q_inside)
                if COMBINE:
                    first = _worker_of(first_unit, total, workers)
                    last = _worker_of(first_unit + end - begin - 1, total, workers)
                    arrived_at = arrived_ptr + row * NUM_KV_HEADS + kv_head
                    # All threads of the program have written before one of them announces it.
                    tl.debug_barrier()
                    if tl.atomic_add(arrived_at, 1, sem="acq_rel", scope="gpu") == last - first:
                        tl.store(arrived_at, 0)
                        attended, lse = _sum_of_partials(
                            partial_ptr, partial_lse_ptr, first, last, heads, q_inside, MEMBERS * NUM_HEADS, HEAD_DIM
                        )
                        out_ptrs = out_ptr + q_at[:, None] * HEAD_DIM + lanes[None, :]
                        tl.store(out_ptrs, attended.to(out_ptr.dtype.element_ty), mask=q_inside[:, None])
                        if MEMBERS > 1:
                            tl.store(prefix_lse_ptr + q_at, lse, mask=q_inside)
        unit = unit_end
        row += 1


@triton.jit(do_not_specialize=["num_rows", "workers"], do_not_specialize_on_alignment=["kv_indptr_ptr"])
def combine_partials_kernel(
    kv_indptr_ptr,
    partial_ptr,
    partial_lse_ptr,
    out_ptr,
    num_rows,
    workers,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTIALS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One query head of one sequence per program: the sum of its partial results, if it has any."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    lanes = tl.arange(0, HEAD_DIM)
    total = tl.load(kv_indptr_ptr + num_rows) + num_rows
    begin = tl.load(kv_indptr_ptr + row)
    end = tl.load(kv_indptr_ptr + row + 1)
    first_unit = begin + row + 1
    first = _worker_of(first_unit, total, workers)
    last = _worker_of(first_unit + end - begin - 1, total, workers)
    wait_for_earlier(PDL)
    if first < last:
        peak = -float("inf")
        mass = 0.0
        sums = tl.zeros((HEAD_DIM,), tl.float32)
        for start in range(first, last + 1, PARTIALS):
            of = start + tl.arange(0, PARTIALS)
            inside = of <= last
            # Where a sequence starts it is the last of the worker's range, from there on the first.
            at = (2 * of + (of == first).to(tl.int32)) * NUM_HEADS + head
            lse = tl.load(partial_lse_ptr + at, mask=inside, other=-float("inf"))
            partial_ptrs = partial_ptr + at[:, None] * HEAD_DIM + lanes[None, :]
            partials = tl.load(partial_ptrs, mask=inside[:, None], other=0.0)
            new_peak = tl.maximum(peak, tl.max(lse, axis=0))
            weights = tl.exp2(lse - new_peak)
            shrink = tl.exp2(peak - new_peak)
            peak = new_peak
            mass = mass * shrink + tl.sum(weights, axis=0)
            sums = sums * shrink + tl.sum(partials * weights[:, None], axis=0)
        out_at = (row.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
        tl.store(out_ptr + out_at + lanes, (sums / mass).to(out_ptr.dtype.element_ty))
