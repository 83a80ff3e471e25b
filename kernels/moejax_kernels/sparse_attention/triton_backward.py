"""Backward kernels of sparse attention: gradients of the queries, then gradients of the keys and values."""

from moejax_kernels.sparse_attention.triton_tiles import (  # isort: skip (points Triton at its assembler: before triton)
    LOG2_E,
    add_rows,
    chosen_keys,
    more_rows,
    num_slots,
    place,
    products,
    rows,
    store_rows,
)
import triton
import triton.language as tl


@triton.jit
def gradient_of_queries(
    q_ptr, k_ptr, v_ptr, ids_ptr, segments_ptr, index_ptr, ancestor_ptr, U, L, scale, o_ptr, lse_ptr, do_ptr, dq_ptr, delta_ptr, s: tl.constexpr
):
    """One query and a block of its heads: dq, and delta = sum(o * do), which the keys' kernel reads."""
    token, sequence, query, g, head, real = place(tl.program_id(0).to(tl.int64), L, s)
    at = token * s.H + head
    delta = sum_of_products(o_ptr, do_ptr, at, real, s.M1 + s.M2, 32)
    tl.store(delta_ptr + at, delta, mask=real)
    lse = tl.load(lse_ptr + at, mask=real, other=float("inf"))
    q1 = rows(q_ptr, at * (s.C1 + s.C2), real, 0, s.C1)
    q2 = more_rows(q_ptr, at * (s.C1 + s.C2), real, q1, s.C1, s.C2)
    do1 = rows(do_ptr, at * (s.M1 + s.M2), real, 0, s.M1)
    do2 = more_rows(do_ptr, at * (s.M1 + s.M2), real, do1, s.M1, s.M2)
    dq1 = tl.zeros([s.BH, s.C1], tl.float32)
    if s.C2 > 0:
        dq2 = tl.zeros([s.BH, s.C2], tl.float32)
    for start in range(0, num_slots(ids_ptr + token * s.K, s), s.BK):
        key, seen = chosen_keys(ids_ptr + token * s.K, start, query, sequence, L, segments_ptr, index_ptr, ancestor_ptr, U, s)
        row = (sequence * L + key) * s.G + g
        k1 = rows(k_ptr, row * (s.C1 + s.C2), seen, 0, s.C1)
        k2 = more_rows(k_ptr, row * (s.C1 + s.C2), seen, k1, s.C1, s.C2)
        v1, v2 = values(v_ptr, row, seen, k1, k2, s.M1, s.M2, s.latent)
        scores = tl.where(seen[None, :], products(q1, q2, k1, k2, s.C2, s.precision) * (scale * LOG2_E), float("-inf"))
        dprobs = products(do1, do2, v1, v2, s.M2, s.precision)
        dscores = tl.exp2(scores - lse[:, None]) * (dprobs - delta[:, None]) * scale
        dq1 = tl.dot(dscores.to(k1.dtype), k1, dq1, input_precision=s.precision)
        if s.C2 > 0:
            dq2 = tl.dot(dscores.to(k2.dtype), k2, dq2, input_precision=s.precision)
    store_rows(dq_ptr, at * (s.C1 + s.C2), real, dq1, 0, s.C1)
    if s.C2 > 0:
        store_rows(dq_ptr, at * (s.C1 + s.C2), real, dq2, s.C1, s.C2)


@triton.jit
def sum_of_products(a_ptr, b_ptr, at, real, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """sum(a * b) of rows of two arrays, a few channels at a time, so that no wide tile of float32 lies in registers."""
    out = tl.zeros(at.shape, tl.float32)
    for first in range(0, WIDTH, STEP):
        channel = first + tl.arange(0, STEP)
        a = tl.load(a_ptr + at[:, None] * WIDTH + channel[None, :], mask=real[:, None], other=0.0).to(tl.float32)
        b = tl.load(b_ptr + at[:, None] * WIDTH + channel[None, :], mask=real[:, None], other=0.0).to(tl.float32)
        out += tl.sum(a * b, 1)
    return out


@triton.jit
def values(v_ptr, row, seen, k1, k2, M1: tl.constexpr, M2: tl.constexpr, LATENT: tl.constexpr):
    if LATENT:
        return k1, k2
    else:
        v1 = rows(v_ptr, row * (M1 + M2), seen, 0, M1)
        return v1, more_rows(v_ptr, row * (M1 + M2), seen, v1, M1, M2)


@triton.jit
def gradient_of_keys(
    q_ptr, k_ptr, v_ptr, ids_ptr, segments_ptr, index_ptr, ancestor_ptr, U, L, scale, lse_ptr, delta_ptr, do_ptr, dk_ptr, dv_ptr, s: tl.constexpr
):
    """One query and BK of its keys: sums over all heads that read the key head, added to float32 sums over queries.

    Which queries chose a key is known only from the queries' side, so the sums over queries are float atomics; the order of the
    additions, and with it the last bits, differs from run to run. Latent keys are values too: dk gets both gradients.
    """
    TILES: tl.constexpr = (s.K + s.BK - 1) // s.BK
    program = tl.program_id(0).to(tl.int64)
    token, g = program // (s.G * TILES), (program // TILES) % s.G
    sequence, query = token // L, (token % L).to(tl.int32)
    start = (program % TILES).to(tl.int32) * s.BK
    key, seen = chosen_keys(ids_ptr + token * s.K, start, query, sequence, L, segments_ptr, index_ptr, ancestor_ptr, U, s)
    if tl.max(seen.to(tl.int32)) > 0:
        row = (sequence * L + key) * s.G + g
        k1 = rows(k_ptr, row * (s.C1 + s.C2), seen, 0, s.C1)
        k2 = more_rows(k_ptr, row * (s.C1 + s.C2), seen, k1, s.C1, s.C2)
        v1, v2 = values(v_ptr, row, seen, k1, k2, s.M1, s.M2, s.latent)
        dk1 = tl.zeros([s.BK, s.C1], tl.float32)
        if s.C2 > 0:
            dk2 = tl.zeros([s.BK, s.C2], tl.float32)
        if not s.latent:
            dv1 = tl.zeros([s.BK, s.M1], tl.float32)
            if s.M2 > 0:
                dv2 = tl.zeros([s.BK, s.M2], tl.float32)
        for first in range(0, s.H // s.G, s.BH):
            among = first + tl.arange(0, s.BH)
            real = among < s.H // s.G
            at = token * s.H + g * (s.H // s.G) + among
            q1 = rows(q_ptr, at * (s.C1 + s.C2), real, 0, s.C1)
            q2 = more_rows(q_ptr, at * (s.C1 + s.C2), real, q1, s.C1, s.C2)
            do1 = rows(do_ptr, at * (s.M1 + s.M2), real, 0, s.M1)
            do2 = more_rows(do_ptr, at * (s.M1 + s.M2), real, do1, s.M1, s.M2)
            lse = tl.load(lse_ptr + at, mask=real, other=float("inf"))
            delta = tl.load(delta_ptr + at, mask=real, other=0.0)
            scores = tl.where(seen[:, None], products(k1, k2, q1, q2, s.C2, s.precision) * (scale * LOG2_E), float("-inf"))
            probs = tl.exp2(scores - lse[None, :])
            dscores = probs * (products(v1, v2, do1, do2, s.M2, s.precision) - delta[None, :]) * scale
            probs, dscores = probs.to(do1.dtype), dscores.to(q1.dtype)
            dk1 = tl.dot(dscores, q1, dk1, input_precision=s.precision)
            if s.C2 > 0:
                dk2 = tl.dot(dscores, q2, dk2, input_precision=s.precision)
            if s.latent:
                dk1 = tl.dot(probs, do1, dk1, input_precision=s.precision)
                if s.M2 > 0:
                    dk2 = tl.dot(probs, do2, dk2, input_precision=s.precision)
            else:
                dv1 = tl.dot(probs, do1, dv1, input_precision=s.precision)
                if s.M2 > 0:
                    dv2 = tl.dot(probs, do2, dv2, input_precision=s.precision)
        add_rows(dk_ptr, row * (s.C1 + s.C2), seen, dk1, 0, s.C1)
        if s.C2 > 0:
            add_rows(dk_ptr, row * (s.C1 + s.C2), seen, dk2, s.C1, s.C2)
        if not s.latent:
            add_rows(dv_ptr, row * (s.M1 + s.M2), seen, dv1, 0, s.M1)
            if s.M2 > 0:
                add_rows(dv_ptr, row * (s.M1 + s.M2), seen, dv2, s.M1, s.M2)
