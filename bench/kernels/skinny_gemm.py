"""Candidate matrix kernels for decode, not used by the engine yet.

y[M, N] = x[M, K] @ w[N, K]^T in bf16, accumulated in fp32. Best settings by (M, N, K), and how they compare with
cuBLAS: `bench/results/h200/kernel_exploration.json`.

The weights are streamed exactly once. `gemv` is the kernel without tl.dot (M <= 4);
`skinny` uses TMA loads and wgmma with the weight rows as the MMA's M dimension, and
split-K whose last-arriving program adds the fp32 partial sums in a fixed order
(deterministic; one counter a tile, reset by the program that consumed it).

With PDL=True a launch may begin while its predecessor in the stream still runs: it loads
its first weights (which no predecessor writes; gemv: one block, skinny: one block if PRE) and only
then waits for x.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def gemv_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    N,
    K: tl.constexpr,
    M: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    wp = w_ptr + rn[:, None].to(tl.int64) * K + rk[None, :]
    if PDL:
        gdc_launch_dependents()
    w = tl.load(wp, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
    acc0 = tl.zeros([BN, BK], tl.float32)
    acc1 = tl.zeros([BN, BK], tl.float32)
    acc2 = tl.zeros([BN, BK], tl.float32)
    acc3 = tl.zeros([BN, BK], tl.float32)
    for k in range(0, K - BK, BK):
        w_next = tl.load(wp + k + BK, eviction_policy="evict_first")
        wf = w.to(tl.float32)
        acc0 += wf * tl.load(x_ptr + k + rk).to(tl.float32)[None, :]
        if M > 1:
            acc1 += wf * tl.load(x_ptr + K + k + rk).to(tl.float32)[None, :]
        if M > 2:
            acc2 += wf * tl.load(x_ptr + 2 * K + k + rk).to(tl.float32)[None, :]
        if M > 3:
            acc3 += wf * tl.load(x_ptr + 3 * K + k + rk).to(tl.float32)[None, :]
        w = w_next
    wf = w.to(tl.float32)
    kl = K - BK
    acc0 += wf * tl.load(x_ptr + kl + rk).to(tl.float32)[None, :]
    tl.store(y_ptr + rn, tl.sum(acc0, 1).to(y_ptr.dtype.element_ty))
    if M > 1:
        acc1 += wf * tl.load(x_ptr + K + kl + rk).to(tl.float32)[None, :]
        tl.store(y_ptr + N + rn, tl.sum(acc1, 1).to(y_ptr.dtype.element_ty))
    if M > 2:
        acc2 += wf * tl.load(x_ptr + 2 * K + kl + rk).to(tl.float32)[None, :]
        tl.store(y_ptr + 2 * N + rn, tl.sum(acc2, 1).to(y_ptr.dtype.element_ty))
    if M > 3:
        acc3 += wf * tl.load(x_ptr + 3 * K + kl + rk).to(tl.float32)[None, :]
        tl.store(y_ptr + 3 * N + rn, tl.sum(acc3, 1).to(y_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["M", "M_TILES"])
def skinny_kernel(
    x_desc,
    w_desc,
    x_ptr,
    y_ptr,
    part_ptr,
    cnt_ptr,
    M,
    N,
    K,
    KS,
    M_TILES,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRE: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid = tl.program_id(0)
    s = pid % SPLIT
    t = pid // SPLIT
    tm = t % M_TILES
    tn = t // M_TILES
    k0 = s * KS
    if PDL:
        gdc_launch_dependents()
    # weights that may be fetched while the predecessor still runs
    if PRE:
        w0 = w_desc.load([tn * BN, k0])
    if PDL:
        gdc_wait()
    rm = tm * BM + tl.arange(0, BM)
    rn = tn * BN + tl.arange(0, BN)
    mask = (rm < M)[:, None]
    if PRE:  # in flight during the loop, used after it
        x0 = tl.load(x_ptr + rm[:, None] * K + k0 + tl.arange(0, BK)[None, :], mask=mask, other=0.0)
    acc = tl.zeros([BN, BM], tl.float32)
    for k in tl.range(k0 + (BK if PRE else 0), k0 + KS, BK, num_stages=STAGES):
        w = w_desc.load([tn * BN, k])
        x = x_desc.load([tm * BM, k])
        acc = tl.dot(w, x.T, acc)
    if PRE:
        acc = tl.dot(w0, x0.T, acc)
    acc = acc.T  # [BM, BN]: rows of y are contiguous in n
    off = rm[:, None] * N + rn[None, :]
    if SPLIT > 1:
        tl.store(part_ptr + s * M * N + off, acc, mask=mask)
        tl.debug_barrier()  # every thread's partial is stored before the release below
        old = tl.atomic_add(cnt_ptr + t, 1, sem="acq_rel")
        if old == SPLIT - 1:
            total = tl.zeros([BM, BN], tl.float32)
            for i in tl.static_range(SPLIT):  # fixed order: deterministic
                total += tl.load(part_ptr + i * M * N + off, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(y_ptr + off, total.to(y_ptr.dtype.element_ty), mask=mask)
            tl.store(cnt_ptr + t, 0)
    else:
        tl.store(y_ptr + off, acc.to(y_ptr.dtype.element_ty), mask=mask)


def gemv(x, w, y, cfg, pdl):
    M, K = x.shape
    N = w.shape[0]
    gemv_kernel[(N // cfg["BN"],)](
        x, w, y, N, K, M, cfg["BN"], cfg["BK"], pdl, num_warps=cfg["warps"], launch_pdl=pdl
    )


def skinny(x_desc, w_desc, x, w, y, part, cnt, cfg, M, pdl):
    """x_desc: descriptor over an x buffer of at least 16 rows (rows >= M are ignored)."""
    N, K = w.shape
    split, BM, BN = cfg["SPLIT"], cfg["BM"], cfg["BN"]
    m_tiles = triton.cdiv(M, BM)
    skinny_kernel[(N // BN * m_tiles * split,)](
        x_desc,
        w_desc,
        x,
        y,
        part,
        cnt,
        M,
        N,
        K,
        K // split,
        m_tiles,
        BM,
        BN,
        cfg["BK"],
        split,
        cfg["PRE"],
        pdl,
        cfg["STAGES"],
        num_warps=cfg["warps"],
        launch_pdl=pdl,
    )
