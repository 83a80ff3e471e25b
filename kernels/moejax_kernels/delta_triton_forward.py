"""Forward kernels of the delta rule: matrices of each chunk, the scan of the states, the outputs."""

from moejax_kernels import triton_launch as triton_launch  # before triton
from moejax_kernels.delta_triton_chunk import (
    LEVELS,
    T,
    add_up,
    chosen_tokens,
    column,
    decays,
    dot,
    fine_dot,
    from_start,
    grid_tt,
    labels,
    past,
    put,
    put_rows,
    rows,
    same_document,
    split_at,
    stations,
    through,
    tile,
    to_end,
)

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def inverse(a, FULL: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a: doubles the inverted diagonal blocks, as stable as forward substitution."""
    i, j = grid_tt()
    r = tl.where(i == j, 1.0, 0.0) - tl.where(split_at(0), a, 0.0)
    for level in range(1, LEVELS):
        r -= fine_dot(r, fine_dot(tl.where(split_at(level), a, 0.0), r, FULL), FULL)
    return r


@triton.jit
def head_decays(choices_ptr, g):
    """exp(g_j+1 + .. + g_i) for the pairs i > j of a chunk, 1 elsewhere; g [T, 1]."""
    sums = tl.zeros([T, T], tl.float32)
    for level in range(LEVELS):
        to_border = through(choices_ptr, level, g, False, False)
        sums += tl.where(split_at(level), to_border + tl.trans(to_border), 0.0)
    return tl.exp(sums)


@triton.jit
def channel_pairs(choices_ptr, q, k, g, kk, qk, FULL: tl.constexpr):
    """Adds a block of channels to kk and qk, where every pair of tokens has a decay per channel between them."""
    i, j = grid_tt()
    qk += tl.where(i == j, tl.sum(q * k, axis=1)[:, None], 0.0)
    for level in range(LEVELS):
        decay = tl.exp(add_up(chosen_tokens(choices_ptr, level), g, FULL))
        key = k * decay
        split = split_at(level)
        kk += tl.where(split, dot(key, tl.trans(key), FULL), 0.0)
        qk += tl.where(split, dot(q * decay, tl.trans(key), FULL), 0.0)
    return kk, qk


@triton.jit
def pair_products(
    q_ptr, k_ptr, g_ptr, choices_ptr, b, n, h, label,
    SCALE: tl.constexpr, L: tl.constexpr, G: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
    BC: tl.constexpr, PER_CHANNEL: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """kk and qk [T, T]: sum over channels of k_i k_j, and of scaled q_i k_j, times the decay between; anything above the diagonal."""
    kk, qk = tl.zeros([T, T], tl.float32), tl.zeros([T, T], tl.float32)
    for c0 in range(0, C, BC):
        q = rows(q_ptr, b, n, h // (H // G), c0, label, L, G, C, BC) * SCALE
        k = rows(k_ptr, b, n, h // (H // G), c0, label, L, G, C, BC)
        if PER_CHANNEL:
            kk, qk = channel_pairs(choices_ptr, q, k, rows(g_ptr, b, n, h, c0, label, L, H, C, BC), kk, qk, FULL)
        else:
            kk += dot(k, tl.trans(k), FULL)
            qk += dot(q, tl.trans(k), FULL)
    if not PER_CHANNEL:
        decay = head_decays(choices_ptr, column(g_ptr, b, n, h, label, L, H)[:, None])
        kk *= decay
        qk *= decay
    return kk, qk


@triton.jit
def chunk_matrices(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, ids_ptr, starts_ptr, choices_ptr,
    inverse_ptr, qk_ptr, w_ptr, u_ptr, kg_ptr, past_ptr,
    SCALE: tl.constexpr, L: tl.constexpr, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
    BC: tl.constexpr, BM: tl.constexpr, PACKED: tl.constexpr, PER_CHANNEL: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Per chunk and head: (I + A)^-1, q k', and with them what the scan reads: w, u, keys decayed to the end, the state's decay."""
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    index = bh.to(tl.int64) * N + n
    i, j = grid_tt()
    label = labels(ids_ptr, starts_ptr, b, n, L, PACKED)
    beta = column(beta_ptr, b, n, h, label, L, H)[:, None]
    kk, qk = pair_products(q_ptr, k_ptr, g_ptr, choices_ptr, b, n, h, label, SCALE, L, G, H, C, BC, PER_CHANNEL, FULL)
    same = same_document(label)
    put(tile(qk_ptr, index, 0, 0, T, T, T, T), tl.where(same & (j <= i), qk, 0.0))
    r = inverse(tl.where(same & (j < i), beta * kk, 0.0), FULL)
    put(tile(inverse_ptr, index, 0, 0, T, T, T, T), r)
    for c0 in range(0, C, BC):
        k = rows(k_ptr, b, n, h // (H // G), c0, label, L, G, C, BC)
        g = decays(g_ptr, b, n, h, c0, label, L, H, C, BC, PER_CHANNEL)
        put(tile(w_ptr, index, 0, c0, T, C, T, BC), dot(r, beta * from_start(choices_ptr, g, label, n, FULL, PER_CHANNEL) * k, FULL))
        put(tile(kg_ptr, index, 0, c0, T, C, T, BC), to_end(choices_ptr, g, label, n, FULL, PER_CHANNEL) * k)
        tl.store(past_ptr + index * C + c0 + tl.arange(0, BC), past(g, label, n, BC))
    for m0 in range(0, M, BM):
        put(tile(u_ptr, index, 0, m0, T, M, T, BM), fine_dot(r, beta * rows(v_ptr, b, n, h, m0, label, L, H, M, BM), FULL))


@triton.jit
def carry_state(
    w_ptr, u_ptr, kg_ptr, past_ptr, initial_ptr, route_ptr, states_ptr, written_ptr, slots_ptr,
    N: tl.constexpr, H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, M: tl.constexpr, BM: tl.constexpr,
    SLOTS: tl.constexpr, INITIAL: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """From chunk to chunk, per head and block of value channels: `written = u - w S; S <- past S + kg' written`.

    One slot: it gets the row's last state. In a tree each segment leaves its last state in its own, the initial one stands in the last.
    """
    m0, bh = tl.program_id(0) * BM, tl.program_id(1).to(tl.int64)
    c = tl.arange(0, CP)
    state = tl.zeros([CP, BM], tl.float32)
    if INITIAL:
        state = tl.load(tile(initial_ptr, bh, 0, m0, C, M, CP, BM), mask=(c < C)[:, None], other=0.0).to(tl.float32)
    if SLOTS > 1:
        tl.store(tile(slots_ptr, bh * SLOTS + SLOTS - 1, 0, m0, C, M, CP, BM), state, mask=(c < C)[:, None])
        tl.debug_barrier()
    for n in range(N):
        index = bh * N + n
        if SLOTS > 1:
            source, own, _ = stations(route_ptr, bh // H, n, N)
            if source != own:  # the first chunk of a segment
                state = tl.load(tile(slots_ptr, bh * SLOTS + source, 0, m0, C, M, CP, BM), mask=(c < C)[:, None], other=0.0)
        tl.store(tile(states_ptr, index, 0, m0, C, M, CP, BM), state.to(states_ptr.dtype.element_ty), mask=(c < C)[:, None])
        w = tl.load(tile(w_ptr, index, 0, 0, T, C, T, CP), mask=(c < C)[None, :], other=0.0)
        kg = tl.load(tile(kg_ptr, index, 0, 0, T, C, T, CP), mask=(c < C)[None, :], other=0.0)
        written = tl.load(tile(u_ptr, index, 0, m0, T, M, T, BM)).to(tl.float32) - dot(w, state, FULL)
        put(tile(written_ptr, index, 0, m0, T, M, T, BM), written)
        decay = tl.load(past_ptr + index * C + c, mask=c < C, other=0.0)
        state = decay[:, None] * state + dot(tl.trans(kg), written, FULL)
        if SLOTS > 1:
            _, own, after = stations(route_ptr, bh // H, n, N)
            if own != after:  # the last one
                tl.store(tile(slots_ptr, bh * SLOTS + own, 0, m0, C, M, CP, BM), state, mask=(c < C)[:, None])
                tl.debug_barrier()
    if SLOTS == 1:
        tl.store(tile(slots_ptr, bh, 0, m0, C, M, CP, BM), state, mask=(c < C)[:, None])


@triton.jit
def outputs(
    q_ptr, g_ptr, ids_ptr, starts_ptr, choices_ptr, qk_ptr, states_ptr, written_ptr, o_ptr,
    SCALE: tl.constexpr, L: tl.constexpr, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
    BC: tl.constexpr, BM: tl.constexpr, PACKED: tl.constexpr, PER_CHANNEL: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Per chunk, head and block of value channels: what q reads from the incoming state and from the chunk's own writes."""
    n, m0, bh = tl.program_id(0), tl.program_id(1) * BM, tl.program_id(2)
    b, h = bh // H, bh % H
    index = bh.to(tl.int64) * N + n
    label = labels(ids_ptr, starts_ptr, b, n, L, PACKED)
    o = dot(tl.load(tile(qk_ptr, index, 0, 0, T, T, T, T)), tl.load(tile(written_ptr, index, 0, m0, T, M, T, BM)), FULL)
    for c0 in range(0, C, BC):
        q = rows(q_ptr, b, n, h // (H // G), c0, label, L, G, C, BC) * SCALE
        g = decays(g_ptr, b, n, h, c0, label, L, H, C, BC, PER_CHANNEL)
        state = tl.load(tile(states_ptr, index, c0, m0, C, M, BC, BM))
        o += dot(from_start(choices_ptr, g, label, n, FULL, PER_CHANNEL) * q, state, FULL)
    put_rows(o_ptr, o, b, n, h, m0, L, H, M, BM)
