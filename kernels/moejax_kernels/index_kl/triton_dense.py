"""Kernels of the index's loss over all visible keys: tiles of queries and keys, and the heads one after the other."""

from moejax_kernels.sparse_attention.triton_tiles import LOG2_E, products_of_rows  # isort: skip (points Triton at its assembler: before triton)
import triton
import triton.language as tl

from moejax_kernels.sparse_attention.triton_visible import sees


@triton.jit
def lse_of_all(q_ptr, k_ptr, starts_ptr, segments_ptr, index_ptr, ancestor_ptr, U, L, scale, lse_ptr, s: tl.constexpr):
    """log2 of the sum of 2 ** score of a tile of queries and one head, [B, H, L]; +inf where a query sees nothing."""
    tiles = (L + s.BQ - 1) // s.BQ
    program = tl.program_id(0)
    first, h, sequence = program % tiles * s.BQ, program // tiles % s.H, (program // (tiles * s.H)).to(tl.int64)
    begin, end = _range_of_keys(first, sequence, starts_ptr, L, s)
    peak = tl.full([s.BQ], float("-inf"), tl.float32)
    total = tl.zeros([s.BQ], tl.float32)
    for start in range(begin, end, s.BK):
        seen = _seen(first, start, sequence, L, segments_ptr, index_ptr, ancestor_ptr, U, s)
        scores = _attention_scores(q_ptr, k_ptr, first, start, sequence, h, seen, L, scale, s)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(scores - base[:, None]), 1)
        peak = new_peak
    query = first + tl.arange(0, s.BQ)
    lse = tl.where(total > 0, peak + tl.log2(tl.where(total > 0, total, 1.0)), float("inf"))
    tl.store(lse_ptr + (sequence * s.H + h) * L + query, lse, mask=query < L)


@triton.jit
def loss_of_all(
    q_ptr,
    k_ptr,
    index_q_ptr,
    index_k_ptr,
    index_w_ptr,
    starts_ptr,
    segments_ptr,
    index_ptr,
    ancestor_ptr,
    U,
    L,
    scale,
    attention_lse_ptr,
    kl_ptr,
    lse_ptr,
    s: tl.constexpr,
):
    """Loss and log-sum-exp of the index scores of a tile of queries."""
    tiles = (L + s.BQ - 1) // s.BQ
    first, sequence = tl.program_id(0) % tiles * s.BQ, (tl.program_id(0) // tiles).to(tl.int64)
    begin, end = _range_of_keys(first, sequence, starts_ptr, L, s)
    gathered = tl.zeros([s.BQ], tl.float32)
    share = tl.zeros([s.BQ], tl.float32)
    peak = tl.full([s.BQ], float("-inf"), tl.float32)
    total = tl.zeros([s.BQ], tl.float32)
    for start in range(begin, end, s.BK):
        seen = _seen(first, start, sequence, L, segments_ptr, index_ptr, ancestor_ptr, U, s)
        target = _target(q_ptr, k_ptr, attention_lse_ptr, first, start, sequence, seen, L, scale, s)
        scores = _index_scores(index_q_ptr, index_k_ptr, index_w_ptr, first, start, sequence, L, s)
        gathered += tl.sum(tl.where(target > 0, target * (tl.log(tl.where(target > 0, target, 1.0)) - scores), 0.0), 1)
        share += tl.sum(target, 1)
        new_peak = tl.maximum(peak, tl.max(tl.where(seen, scores, float("-inf")), 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.where(seen, tl.exp(tl.where(seen, scores - base[:, None], 0.0)), 0.0)
        total = total * tl.exp(peak - base) + tl.sum(weights, 1)
        peak = new_peak
    query = first + tl.arange(0, s.BQ)
    lse = tl.where(total > 0, peak + tl.log(tl.where(total > 0, total, 1.0)), 0.0)
    tl.store(lse_ptr + sequence * L + query, lse, mask=query < L)
    tl.store(kl_ptr + sequence * L + query, gathered + lse * share, mask=query < L)


@triton.jit
def gradient_of_all(
    q_ptr, k_ptr, index_q_ptr, index_k_ptr, index_w_ptr, starts_ptr, segments_ptr, index_ptr, ancestor_ptr, U, L, scale,
    attention_lse_ptr, lse_ptr, dkl_ptr, dq_ptr, dw_ptr, dk_ptr, s: tl.constexpr
):  # fmt: skip
    """One tile of queries and keys: dI = softmax(I) - target, times the loss's cotangent, and what follows from it.

    dI costs all heads of the attention, so it is made once per tile and serves all index heads at once; whose gradients [BQ, J, I] are
    too many to be held while going over the keys: float atomics, as for the keys.
    """
    tiles, key_tiles = (L + s.BQ - 1) // s.BQ, (L + s.BK - 1) // s.BK
    program = tl.program_id(0)
    start, first = program % key_tiles * s.BK, program // key_tiles % tiles * s.BQ
    sequence = (program // key_tiles // tiles).to(tl.int64)
    begin, end = _range_of_keys(first, sequence, starts_ptr, L, s)
    if (start < end) & (start + s.BK > begin):
        seen = _seen(first, start, sequence, L, segments_ptr, index_ptr, ancestor_ptr, U, s)
        target = _target(q_ptr, k_ptr, attention_lse_ptr, first, start, sequence, seen, L, scale, s)
        scores = _index_scores(index_q_ptr, index_k_ptr, index_w_ptr, first, start, sequence, L, s)
        query, key, channel = first + tl.arange(0, s.BQ), start + tl.arange(0, s.BK), tl.arange(0, s.IP)
        lse = tl.load(lse_ptr + sequence * L + query, mask=query < L, other=0.0)
        dkl = tl.load(dkl_ptr + sequence * L + query, mask=query < L, other=0.0)
        probs = tl.where(seen, tl.exp(tl.where(seen, scores - lse[:, None], 0.0)), 0.0)
        dscores = (probs - target) * dkl[:, None]
        k = _index_rows(index_k_ptr, sequence * L + key, key < L, s)
        dk = tl.zeros([s.BK, s.IP], tl.float32)
        for j in range(0, s.J):
            row = (sequence * L + query) * s.J + j
            q = _index_rows(index_q_ptr, row, query < L, s)
            w = tl.load(index_w_ptr + row, mask=query < L, other=0.0).to(tl.float32)
            dots = tl.maximum(tl.dot(q, tl.trans(k), input_precision=s.precision), 0.0)
            tl.atomic_add(dw_ptr + row, tl.sum(dots * dscores, 1), mask=query < L, sem="relaxed")
            ddots = tl.where(dots > 0, dscores * w[:, None], 0.0).to(k.dtype)
            mask = (query < L)[:, None] & (channel < s.I)[None, :]
            dq = tl.dot(ddots, k, input_precision=s.precision)
            tl.atomic_add(dq_ptr + row[:, None] * s.I + channel[None, :], dq, mask=mask, sem="relaxed")
            dk = tl.dot(tl.trans(ddots), q, dk, input_precision=s.precision)
        mask = (key < L)[:, None] & (channel < s.I)[None, :]
        tl.atomic_add(dk_ptr + (sequence * L + key)[:, None] * s.I + channel[None, :], dk, mask=mask, sem="relaxed")


@triton.jit
def _range_of_keys(first, sequence, starts_ptr, L, s: tl.constexpr):
    """First key, and one past the last, that a tile of queries may see."""
    if s.segments == 1:
        return tl.load(starts_ptr + sequence * L + first), tl.minimum(first + s.BQ, L)
    else:
        return 0 * first, tl.minimum(first + s.BQ, L)


@triton.jit
def _seen(first, start, sequence, L, segments_ptr, index_ptr, ancestor_ptr, U, s: tl.constexpr):
    query, key = first + tl.arange(0, s.BQ), start + tl.arange(0, s.BK)
    own = tl.minimum(query, L - 1)[:, None]
    return sees(own, key[None, :], sequence, L, segments_ptr, index_ptr, ancestor_ptr, U, s.segments) & (query < L)[:, None]


@triton.jit
def _attention_scores(q_ptr, k_ptr, first, start, sequence, h, seen, L, scale, s: tl.constexpr):
    """Of one head, in units of log 2; -inf where not seen."""
    query, key = first + tl.arange(0, s.BQ), start + tl.arange(0, s.BK)
    q_at = ((sequence * L + query) * s.H + h) * s.C
    k_at = ((sequence * L + key) * s.G + h // (s.H // s.G)) * s.C
    dots = products_of_rows(q_ptr, q_at, query < L, k_ptr, k_at, key < L, s.C, s.STEP, s.precision)
    return tl.where(seen, dots * (scale * LOG2_E), float("-inf"))


@triton.jit
def _target(q_ptr, k_ptr, attention_lse_ptr, first, start, sequence, seen, L, scale, s: tl.constexpr):
    """Attention of a tile, averaged over the heads."""
    query = first + tl.arange(0, s.BQ)
    target = tl.zeros([s.BQ, s.BK], tl.float32)
    for h in range(0, s.H):
        lse = tl.load(attention_lse_ptr + (sequence * s.H + h) * L + query, mask=query < L, other=float("inf"))
        target += tl.exp2(_attention_scores(q_ptr, k_ptr, first, start, sequence, h, seen, L, scale, s) - lse[:, None])
    return target / s.H


@triton.jit
def _index_scores(index_q_ptr, index_k_ptr, index_w_ptr, first, start, sequence, L, s: tl.constexpr):
    query, key = first + tl.arange(0, s.BQ), start + tl.arange(0, s.BK)
    k = _index_rows(index_k_ptr, sequence * L + key, key < L, s)
    scores = tl.zeros([s.BQ, s.BK], tl.float32)
    for j in range(0, s.J):
        row = (sequence * L + query) * s.J + j
        w = tl.load(index_w_ptr + row, mask=query < L, other=0.0).to(tl.float32)
        q = _index_rows(index_q_ptr, row, query < L, s)
        scores += tl.maximum(tl.dot(q, tl.trans(k), input_precision=s.precision), 0.0) * w[:, None]
    return scores


@triton.jit
def _index_rows(ptr, row, real, s: tl.constexpr):
    """[len(row), IP]; 0 where there is none."""
    channel = tl.arange(0, s.IP)
    return tl.load(ptr + row[:, None] * s.I + channel[None, :], mask=real[:, None] & (channel < s.I)[None, :], other=0.0)
