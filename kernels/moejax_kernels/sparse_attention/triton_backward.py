"""Backward kernels of sparse attention: gradients of the queries, then gradients of the keys and values."""

from moejax_kernels.sparse_attention.triton_tiles import (  # isort: skip (points Triton at its assembler: before triton)
    LOG2_E,
    add_rows,
    chosen_keys,
    more_rows,
    num_slots,
    place,
    products,
    products_of_rows,
    rows,
    store_rows,
    values,
)
import triton
import triton.language as tl


@triton.jit
def gradient_of_queries(
    q_ptr,
    k_ptr,
    v_ptr,
    ids_ptr,
    segments_ptr,
    index_ptr,
    ancestor_ptr,
    U,
    L,
    scale,
    o_ptr,
    lse_ptr,
    do_ptr,
    dq_ptr,
    delta_ptr,
    s: tl.constexpr,
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
def gradient_of_keys(
    q_ptr,
    k_ptr,
    v_ptr,
    ids_ptr,
    segments_ptr,
    index_ptr,
    ancestor_ptr,
    U,
    L,
    scale,
    lse_ptr,
    delta_ptr,
    do_ptr,
    dk_ptr,
    dv_ptr,
    s: tl.constexpr,
):
    """One query, a block of its heads and BK of its keys: sums over the heads, added to float32 sums over queries.

    Which queries chose a key is known only from the queries' side, so the sums over queries are float atomics; the order of the
    additions, and with it the last bits, differs from run to run. Latent keys are values too: dk gets both gradients.
    Products go over the channels STEP at a time, so that no tile is as wide as the rows.
    """
    TILES: tl.constexpr = (s.K + s.BK - 1) // s.BK
    C: tl.constexpr = s.C1 + s.C2
    M: tl.constexpr = s.M1 + s.M2
    token, sequence, query, g, head, real = place(tl.program_id(0).to(tl.int64) // TILES, L, s)
    start = tl.program_id(0) % TILES * s.BK
    key, seen = chosen_keys(ids_ptr + token * s.K, start, query, sequence, L, segments_ptr, index_ptr, ancestor_ptr, U, s)
    if tl.max(seen.to(tl.int32)) > 0:
        at, row = token * s.H + head, (sequence * L + key) * s.G + g
        lse = tl.load(lse_ptr + at, mask=real, other=float("inf"))
        delta = tl.load(delta_ptr + at, mask=real, other=0.0)
        scores = products_of_rows(k_ptr, row * C, seen, q_ptr, at * C, real, C, s.STEP, s.precision)
        probs = tl.exp2(tl.where(seen[:, None], scores * (scale * LOG2_E), float("-inf")) - lse[None, :])
        dprobs = products_of_rows(v_ptr, row * (C if s.latent else M), seen, do_ptr, at * M, real, M, s.STEP, s.precision)
        dscores = (probs * (dprobs - delta[None, :]) * scale).to(q_ptr.dtype.element_ty)
        probs = probs.to(q_ptr.dtype.element_ty)
        if s.latent:
            for first in range(0, M, s.STEP):
                dk = tl.dot(dscores, rows(q_ptr, at * C + first, real, 0, s.STEP), input_precision=s.precision)
                dk = tl.dot(probs, rows(do_ptr, at * M + first, real, 0, s.STEP), dk, input_precision=s.precision)
                add_rows(dk_ptr, row * C + first, seen, dk, 0, s.STEP)
        else:
            add_product(dv_ptr, row * M, seen, probs, do_ptr, at * M, real, 0, M, s)
        if (M if s.latent else 0) < C:
            add_product(dk_ptr, row * C, seen, dscores, q_ptr, at * C, real, M if s.latent else 0, C, s)


@triton.jit
def add_product(sum_ptr, at, mask, a, b_ptr, b_at, b_real, FROM: tl.constexpr, TO: tl.constexpr, s: tl.constexpr):
    """Adds a @ rows of b to rows of float32 sums, channels FROM to TO."""
    for first in range(FROM, TO, s.STEP):
        b = rows(b_ptr, b_at + first, b_real, 0, s.STEP)
        add_rows(sum_ptr, at + first, mask, tl.dot(a, b, input_precision=s.precision), 0, s.STEP)


@triton.jit
def cast_both(one_ptr, two_ptr, one_size, two_size, to_one_ptr, to_two_ptr, SIZE: tl.constexpr):
    """Two arrays of any sizes into their own dtypes: XLA would take a launch for each."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    tl.store(to_one_ptr + at, tl.load(one_ptr + at, mask=at < one_size).to(to_one_ptr.dtype.element_ty), mask=at < one_size)
    tl.store(to_two_ptr + at, tl.load(two_ptr + at, mask=at < two_size).to(to_two_ptr.dtype.element_ty), mask=at < two_size)
