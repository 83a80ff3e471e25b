"""Backward kernels of the delta rule up to the gradients of the chunks' matrices; `delta_triton_gradients` goes on from there."""

from moejax_kernels import triton_launch as triton_launch  # before triton
from moejax_kernels.delta_triton_chunk import (
    T,
    column,
    decays,
    dot,
    from_start,
    grid_tt,
    labels,
    past,
    put,
    put_rows,
    rows,
    same_document,
    stations,
    tile,
    to_end,
)

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def replay(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, ids_ptr, starts_ptr, choices_ptr, inverse_ptr, qk_ptr, states_ptr, do_ptr,
    w_ptr, qg_ptr, kg_ptr, past_ptr, written_ptr, dwritten_ptr,
    SCALE: tl.constexpr, L: tl.constexpr, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
    BC: tl.constexpr, BM: tl.constexpr, PACKED: tl.constexpr, PER_CHANNEL: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Per chunk and head: what the forward pass did not keep, and the part of written's gradient from the chunk's own outputs."""
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    index = bh.to(tl.int64) * N + n
    label = labels(ids_ptr, starts_ptr, b, n, L, PACKED)
    beta = column(beta_ptr, b, n, h, label, L, H)[:, None]
    r = tl.load(tile(inverse_ptr, index, 0, 0, T, T, T, T))
    for c0 in range(0, C, BC):
        q = rows(q_ptr, b, n, h // (H // G), c0, label, L, G, C, BC) * SCALE
        k = rows(k_ptr, b, n, h // (H // G), c0, label, L, G, C, BC)
        g = decays(g_ptr, b, n, h, c0, label, L, H, C, BC, PER_CHANNEL)
        start = from_start(choices_ptr, g, label, n, FULL, PER_CHANNEL)
        put(tile(qg_ptr, index, 0, c0, T, C, T, BC), start * q)
        put(tile(w_ptr, index, 0, c0, T, C, T, BC), dot(r, beta * start * k, FULL))
        put(tile(kg_ptr, index, 0, c0, T, C, T, BC), to_end(choices_ptr, g, label, n, FULL, PER_CHANNEL) * k)
        tl.store(past_ptr + index * C + c0 + tl.arange(0, BC), past(g, label, n, BC))
    turned_qk = tl.trans(tl.load(tile(qk_ptr, index, 0, 0, T, T, T, T)))
    for m0 in range(0, M, BM):
        put(tile(dwritten_ptr, index, 0, m0, T, M, T, BM), dot(turned_qk, rows(do_ptr, b, n, h, m0, label, L, H, M, BM), FULL))
        error = rows(v_ptr, b, n, h, m0, label, L, H, M, BM)
        for c0 in range(0, C, BC):
            k = rows(k_ptr, b, n, h // (H // G), c0, label, L, G, C, BC)
            g = decays(g_ptr, b, n, h, c0, label, L, H, C, BC, PER_CHANNEL)
            state = tl.load(tile(states_ptr, index, c0, m0, C, M, BC, BM))
            error -= dot(from_start(choices_ptr, g, label, n, FULL, PER_CHANNEL) * k, state, FULL)
        put(tile(written_ptr, index, 0, m0, T, M, T, BM), dot(r, beta * error, FULL))


@triton.jit
def carry_gradient(
    w_ptr, qg_ptr, kg_ptr, past_ptr, do_ptr, dwritten_ptr, dleft_ptr, route_ptr,
    du_ptr, dstates_ptr, dslots_ptr,
    L: tl.constexpr, N: tl.constexpr, H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, M: tl.constexpr, BM: tl.constexpr,
    SLOTS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """From the last chunk to the first, per head and block of value channels: gradients of the states and of u.

    dleft: of what `carry_state` leaves in the slots. dslots: of the initial state; in a tree all slots, each with what the segments that
    read it have given it by the time its own segment's last chunk is reached.
    """
    m0, bh = tl.program_id(0) * BM, tl.program_id(1)
    b, h = bh // H, bh % H
    c = tl.arange(0, CP)
    dstate = tl.load(tile(dleft_ptr, bh * SLOTS, 0, m0, C, M, CP, BM), mask=(c < C)[:, None], other=0.0)
    if SLOTS > 1:
        for slot in range(SLOTS):
            dleft = tl.load(tile(dleft_ptr, bh * SLOTS + slot, 0, m0, C, M, CP, BM), mask=(c < C)[:, None], other=0.0)
            tl.store(tile(dslots_ptr, bh * SLOTS + slot, 0, m0, C, M, CP, BM), dleft, mask=(c < C)[:, None])
        tl.debug_barrier()
    for step in range(N):
        n = N - 1 - step
        index = bh.to(tl.int64) * N + n
        if SLOTS > 1:
            _, own, after = stations(route_ptr, b, n, N)
            if own != after:  # the last chunk of a segment
                dstate = tl.load(tile(dslots_ptr, bh * SLOTS + own, 0, m0, C, M, CP, BM), mask=(c < C)[:, None], other=0.0)
        tl.store(tile(dstates_ptr, index, 0, m0, C, M, CP, BM), dstate.to(dstates_ptr.dtype.element_ty), mask=(c < C)[:, None])
        w = tl.load(tile(w_ptr, index, 0, 0, T, C, T, CP), mask=(c < C)[None, :], other=0.0)
        qg = tl.load(tile(qg_ptr, index, 0, 0, T, C, T, CP), mask=(c < C)[None, :], other=0.0)
        kg = tl.load(tile(kg_ptr, index, 0, 0, T, C, T, CP), mask=(c < C)[None, :], other=0.0)
        inside = tl.where(n * T + tl.arange(0, T) < L, 0, -1)
        do = rows(do_ptr, b, n, h, m0, inside, L, H, M, BM)
        du = tl.load(tile(dwritten_ptr, index, 0, m0, T, M, T, BM)).to(tl.float32) + dot(kg, dstate, FULL)
        put(tile(du_ptr, index, 0, m0, T, M, T, BM), du)
        decay = tl.load(past_ptr + index * C + c, mask=c < C, other=0.0)
        dstate = decay[:, None] * dstate + dot(tl.trans(qg), do, FULL) - dot(tl.trans(w), du, FULL)
        if SLOTS > 1:
            source, own, _ = stations(route_ptr, b, n, N)
            if source != own:  # the first one
                at = tile(dslots_ptr, bh * SLOTS + source, 0, m0, C, M, CP, BM)
                tl.store(at, dstate + tl.load(at, mask=(c < C)[:, None], other=0.0), mask=(c < C)[:, None])
                tl.debug_barrier()
    if SLOTS == 1:
        tl.store(tile(dslots_ptr, bh, 0, m0, C, M, CP, BM), dstate, mask=(c < C)[:, None])


@triton.jit
def matrix_gradients(
    v_ptr, beta_ptr, ids_ptr, starts_ptr, inverse_ptr, written_ptr, du_ptr, do_ptr,
    da_ptr, dqk_ptr, dvalue_ptr, dv_ptr, dbeta_ptr,
    L: tl.constexpr, N: tl.constexpr, H: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, PACKED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Per chunk and head: gradients of A and q k', of v, of beta v (which serves beta k too), and beta's share of it.

    With y = inverse' du, the gradient of beta (v - k S), A's is -y written'.
    """
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    index = bh.to(tl.int64) * N + n
    i, j = grid_tt()
    label = labels(ids_ptr, starts_ptr, b, n, L, PACKED)
    beta = column(beta_ptr, b, n, h, label, L, H)
    turned = tl.trans(tl.load(tile(inverse_ptr, index, 0, 0, T, T, T, T)))
    da, dqk, dbeta = tl.zeros([T, T], tl.float32), tl.zeros([T, T], tl.float32), tl.zeros([T], tl.float32)
    for m0 in range(0, M, BM):
        written = tl.load(tile(written_ptr, index, 0, m0, T, M, T, BM))
        y = dot(turned, tl.load(tile(du_ptr, index, 0, m0, T, M, T, BM)), FULL)
        da -= dot(y, tl.trans(written), FULL)
        dqk += dot(rows(do_ptr, b, n, h, m0, label, L, H, M, BM), tl.trans(written), FULL)
        dbeta += tl.sum(y * rows(v_ptr, b, n, h, m0, label, L, H, M, BM), axis=1)
        put(tile(dvalue_ptr, index, 0, m0, T, M, T, BM), y)
        put_rows(dv_ptr, beta[:, None] * y, b, n, h, m0, L, H, M, BM)
    same = same_document(label)
    put(tile(da_ptr, index, 0, 0, T, T, T, T), tl.where(same & (j < i), da, 0.0))
    put(tile(dqk_ptr, index, 0, 0, T, T, T, T), tl.where(same & (j <= i), dqk, 0.0))
    tl.store(dbeta_ptr + index * T + tl.arange(0, T), dbeta)
