"""Forward kernel of sparse attention: softmax and output of one query, block of heads by block of heads, in one pass over its keys."""

from moejax_kernels.sparse_attention.triton_tiles import (  # isort: skip (points Triton at its assembler: before triton)
    LOG2_E,
    chosen_keys,
    more_rows,
    num_slots,
    place,
    products,
    rows,
    store_rows,
    values,
)
import triton
import triton.language as tl


@triton.jit
def attend(q_ptr, k_ptr, v_ptr, ids_ptr, segments_ptr, index_ptr, ancestor_ptr, U, L, scale, o_ptr, lse_ptr, s: tl.constexpr):
    """`lse`: log2 of the sum of 2 ** (scale * log2(e) * q . k), +inf for a query without keys: 2 ** (such a score - lse) is 0 then."""
    token, sequence, query, g, head, real = place(tl.program_id(0).to(tl.int64), L, s)
    q_at = (token * s.H + head) * (s.C1 + s.C2)
    q1 = rows(q_ptr, q_at, real, 0, s.C1)
    q2 = more_rows(q_ptr, q_at, real, q1, s.C1, s.C2)
    peak = tl.full([s.BH], float("-inf"), tl.float32)
    total = tl.zeros([s.BH], tl.float32)
    o1 = tl.zeros([s.BH, s.M1], tl.float32)
    if s.M2 > 0:
        o2 = tl.zeros([s.BH, s.M2], tl.float32)
    for start in range(0, num_slots(ids_ptr + token * s.K, s), s.BK):
        key, seen = chosen_keys(ids_ptr + token * s.K, start, query, sequence, L, segments_ptr, index_ptr, ancestor_ptr, U, s)
        row = (sequence * L + key) * s.G + g
        k1 = rows(k_ptr, row * (s.C1 + s.C2), seen, 0, s.C1)
        k2 = more_rows(k_ptr, row * (s.C1 + s.C2), seen, k1, s.C1, s.C2)
        scores = tl.where(seen[None, :], products(q1, q2, k1, k2, s.C2, s.precision) * (scale * LOG2_E), float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        peak = new_peak
        v1, v2 = values(v_ptr, row, seen, k1, k2, s.M1, s.M2, s.latent)
        o1 = tl.dot(weights.to(v1.dtype), v1, o1 * shrink[:, None], input_precision=s.precision)
        if s.M2 > 0:
            o2 = tl.dot(weights.to(v2.dtype), v2, o2 * shrink[:, None], input_precision=s.precision)
    some = total > 0
    divisor = tl.where(some, total, 1.0)[:, None]
    o_at = (token * s.H + head) * (s.M1 + s.M2)
    store_rows(o_ptr, o_at, real, o1 / divisor, 0, s.M1)
    if s.M2 > 0:
        store_rows(o_ptr, o_at, real, o2 / divisor, s.M1, s.M2)
    tl.store(lse_ptr + token * s.H + head, tl.where(some, peak + tl.log2(tl.where(some, total, 1.0)), float("inf")), mask=real)
