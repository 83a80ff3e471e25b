"""The last backward kernels of the delta rule: from the chunks' matrices and states to q, k, g and beta."""

from moejax_kernels import triton_launch as triton_launch  # before triton
from moejax_kernels.delta_triton_chunk import (
    FROM_START,
    LEVELS,
    TO_END,
    T,
    add_up,
    chosen_tokens,
    column,
    dot,
    fine_dot,
    from_start,
    grid_tt,
    labels,
    past,
    put,
    put_rows,
    rows,
    split_at,
    tile,
    to_end,
)
from moejax_kernels.delta_triton_forward import head_decays

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def state_gradients(
    states_ptr, dstates_ptr, written_ptr, dvalue_ptr, do_ptr, index, b, n, h, c0, label,
    L: tl.constexpr, H: tl.constexpr, C: tl.constexpr, M: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Gradients [T, BC] of q and of beta k, decayed from the start, and of k, decayed to the end; [BC] of the state's decay."""
    dqg, dkb, dkg = tl.zeros([T, BC], tl.float32), tl.zeros([T, BC], tl.float32), tl.zeros([T, BC], tl.float32)
    dpast = tl.zeros([BC], tl.float32)
    for m0 in range(0, M, BM):
        state = tl.load(tile(states_ptr, index, c0, m0, C, M, BC, BM))
        dqg += dot(rows(do_ptr, b, n, h, m0, label, L, H, M, BM), tl.trans(state), FULL)
        dkb -= dot(tl.load(tile(dvalue_ptr, index, 0, m0, T, M, T, BM)), tl.trans(state), FULL)
        dstate = tl.load(tile(dstates_ptr, index, c0, m0, C, M, BC, BM))
        dkg += dot(tl.load(tile(written_ptr, index, 0, m0, T, M, T, BM)), tl.trans(dstate), FULL)
        dpast += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1)
    return dqg, dkb, dkg, dpast


@triton.jit
def level_gradients(choices_ptr, q, k, g, beta, da_ptr, dqk_ptr, index, dq, dk, dg, dbeta, level, FULL: tl.constexpr):
    """Adds what the pairs of one level give to q (scaled), k, g [T, BC] and beta [T]."""
    index += level >> 8  # 0, but the compiler must not keep both matrices in registers over the levels
    split = split_at(level)
    decay = tl.exp(add_up(chosen_tokens(choices_ptr, level), g, FULL))
    key = k * decay
    da = tl.where(split, tl.load(tile(da_ptr, index, 0, 0, T, T, T, T)), 0.0)
    dqk = tl.where(split, tl.load(tile(dqk_ptr, index, 0, 0, T, T, T, T)), 0.0)
    up = dot(da, key, FULL)
    dbeta += tl.sum(key * up, axis=1)
    dkey = beta * up + dot(tl.trans(da), beta * key, FULL) + dot(tl.trans(dqk), q * decay, FULL)
    dquery = dot(dqk, key, FULL)
    dq += decay * dquery
    dk += decay * dkey
    dg += add_up(tl.trans(chosen_tokens(choices_ptr, level)), decay * (k * dkey + q * dquery), FULL)
    return dq, dk, dg, dbeta


@triton.jit
def channel_gradients(
    q_ptr, k_ptr, g_ptr, beta_ptr, ids_ptr, starts_ptr, choices_ptr, states_ptr, dstates_ptr, written_ptr, dvalue_ptr, do_ptr,
    da_ptr, dqk_ptr, dbeta_written_ptr,
    dq_ptr, dk_ptr, dg_ptr, dbeta_ptr,
    SCALE: tl.constexpr, L: tl.constexpr, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
    BC: tl.constexpr, BM: tl.constexpr, PACKED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Per chunk, head and block of channels, with a decay per channel: gradients of q, k (per value head) and g, shares of beta's."""
    block, n, bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h, c0 = bh // H, bh % H, block * BC
    index = bh.to(tl.int64) * N + n
    label = labels(ids_ptr, starts_ptr, b, n, L, PACKED)
    beta = column(beta_ptr, b, n, h, label, L, H)[:, None]
    dbeta = tl.load(dbeta_written_ptr + index * T + tl.arange(0, T), mask=tl.arange(0, T) < T * (1 - block), other=0.0)
    dqg, dkb, dkg, dpast = state_gradients(
        states_ptr, dstates_ptr, written_ptr, dvalue_ptr, do_ptr, index, b, n, h, c0, label, L, H, C, M, BC, BM, FULL
    )
    q = rows(q_ptr, b, n, h // (H // G), c0, label, L, G, C, BC) * SCALE
    k = rows(k_ptr, b, n, h // (H // G), c0, label, L, G, C, BC)
    g = rows(g_ptr, b, n, h, c0, label, L, H, C, BC)
    start, end = from_start(choices_ptr, g, label, n, FULL, True), to_end(choices_ptr, g, label, n, FULL, True)
    dg = add_up(tl.trans(chosen_tokens(choices_ptr, FROM_START)), start * (q * dqg + beta * k * dkb), FULL)
    dg += add_up(tl.trans(chosen_tokens(choices_ptr, TO_END)), end * k * dkg, FULL)
    dg += (dpast * past(g, label, n, BC))[None, :]
    dbeta += tl.sum(start * k * dkb, axis=1)
    dq, dk = start * dqg, start * beta * dkb + end * dkg
    own = tl.load(dqk_ptr + index * (T * T) + tl.arange(0, T) * (T + 1)).to(tl.float32)[:, None]
    dq += own * k
    dk += own * q
    for level in range(LEVELS):
        dq, dk, dg, dbeta = level_gradients(choices_ptr, q, k, g, beta, da_ptr, dqk_ptr, index, dq, dk, dg, dbeta, level, FULL)
    put_rows(dq_ptr, SCALE * dq, b, n, h, c0, L, H, C, BC)
    put_rows(dk_ptr, dk, b, n, h, c0, L, H, C, BC)
    put_rows(dg_ptr, tl.where((label >= 0)[:, None], dg, 0.0), b, n, h, c0, L, H, C, BC)
    tl.store(dbeta_ptr + (index * (C // BC) + block) * T + tl.arange(0, T), dbeta)


@triton.jit
def spanning(dsum, FULL: tl.constexpr):
    """Of each token, the sum of dsum over the pairs (i, j) that have it between them: j < token <= i."""
    i, j = grid_tt()
    before = fine_dot(dsum, (i < j).to(tl.float32), FULL)
    return tl.sum(tl.where(j <= i, before, 0.0), axis=0)


@triton.jit
def head_pairs(
    q_ptr, k_ptr, g_ptr, beta_ptr, ids_ptr, starts_ptr, choices_ptr, da_ptr, dqk_ptr, dbeta_written_ptr,
    decayed_da_ptr, decayed_dqk_ptr, dg_ptr, dbeta_ptr,
    SCALE: tl.constexpr, L: tl.constexpr, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
    BC: tl.constexpr, PACKED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Per chunk and head, with one decay per head: gradients of k k^T and q k^T, and what the pairs of tokens give to g and beta."""
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    index = bh.to(tl.int64) * N + n
    label = labels(ids_ptr, starts_ptr, b, n, L, PACKED)
    beta = column(beta_ptr, b, n, h, label, L, H)[:, None]
    decay = head_decays(choices_ptr, column(g_ptr, b, n, h, label, L, H)[:, None])
    dqk = tl.load(tile(dqk_ptr, index, 0, 0, T, T, T, T)).to(tl.float32) * decay
    put(tile(decayed_dqk_ptr, index, 0, 0, T, T, T, T), dqk)
    da = tl.load(tile(da_ptr, index, 0, 0, T, T, T, T)).to(tl.float32) * decay
    put(tile(decayed_da_ptr, index, 0, 0, T, T, T, T), da)
    kk, qk = tl.zeros([T, T], tl.float32), tl.zeros([T, T], tl.float32)
    for c0 in range(0, C, BC):
        k = tl.trans(rows(k_ptr, b, n, h // (H // G), c0, label, L, G, C, BC))
        kk += dot(tl.trans(k), k, FULL)
        qk += dot(rows(q_ptr, b, n, h // (H // G), c0, label, L, G, C, BC) * SCALE, k, FULL)
    dsum = da * kk
    at = index * T + tl.arange(0, T)
    tl.store(dbeta_ptr + at, tl.load(dbeta_written_ptr + at) + tl.sum(dsum, axis=1))
    tl.store(dg_ptr + at, spanning(beta * dsum + dqk * qk, FULL))


@triton.jit
def head_gradients(
    q_ptr, k_ptr, g_ptr, beta_ptr, ids_ptr, starts_ptr, choices_ptr, states_ptr, dstates_ptr, written_ptr, dvalue_ptr, do_ptr,
    decayed_da_ptr, decayed_dqk_ptr, dg_pairs_ptr, dbeta_pairs_ptr,
    dq_ptr, dk_ptr, dg_ptr, dbeta_ptr,
    SCALE: tl.constexpr, L: tl.constexpr, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
    BC: tl.constexpr, BM: tl.constexpr, PACKED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Per chunk, head and block of channels, with one decay per head: gradients of q, k (per value head), shares of g's and beta's."""
    block, n, bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h, c0 = bh // H, bh % H, block * BC
    index = bh.to(tl.int64) * N + n
    i, j = grid_tt()
    label = labels(ids_ptr, starts_ptr, b, n, L, PACKED)
    beta = column(beta_ptr, b, n, h, label, L, H)[:, None]
    g = column(g_ptr, b, n, h, label, L, H)[:, None]
    start, end = from_start(choices_ptr, g, label, n, FULL, False), to_end(choices_ptr, g, label, n, FULL, False)
    dqg, dkb, dkg, dpast = state_gradients(
        states_ptr, dstates_ptr, written_ptr, dvalue_ptr, do_ptr, index, b, n, h, c0, label, L, H, C, M, BC, BM, FULL
    )
    q = rows(q_ptr, b, n, h // (H // G), c0, label, L, G, C, BC) * SCALE
    k = rows(k_ptr, b, n, h // (H // G), c0, label, L, G, C, BC)
    dstart = tl.sum(start * (q * dqg + beta * k * dkb), axis=1, keep_dims=True)
    dend = tl.sum(end * k * dkg, axis=1, keep_dims=True)
    dg = tl.sum(tl.where(j <= i, dstart, 0.0), axis=0) + tl.sum(tl.where(j > i, dend, 0.0), axis=0)
    dg += tl.sum(dpast * past(g, label, n, BC), axis=0)
    dbeta = tl.sum(start * k * dkb, axis=1)
    in_first = tl.arange(0, T) < T * (1 - block)  # the pairs' share is that of all channels
    dg += tl.load(dg_pairs_ptr + index * T + tl.arange(0, T), mask=in_first, other=0.0)
    dbeta += tl.load(dbeta_pairs_ptr + index * T + tl.arange(0, T), mask=in_first, other=0.0)
    dqk = tl.load(tile(decayed_dqk_ptr, index, 0, 0, T, T, T, T))
    put_rows(dq_ptr, SCALE * (start * dqg + dot(dqk, k, FULL)), b, n, h, c0, L, H, C, BC)
    dk = start * beta * dkb + end * dkg + dot(tl.trans(dqk), q, FULL)
    da = tl.load(tile(decayed_da_ptr, index, 0, 0, T, T, T, T))
    put_rows(dk_ptr, dk + beta * dot(da, k, FULL) + dot(tl.trans(da), beta * k, FULL), b, n, h, c0, L, H, C, BC)
    share = (index * (C // BC) + block) * T + tl.arange(0, T)
    tl.store(dbeta_ptr + share, dbeta)
    tl.store(dg_ptr + share, tl.where(label >= 0, dg, 0.0))
