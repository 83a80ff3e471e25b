"""Kernels of the index's loss over chosen keys: one program per query."""

from moejax_kernels.sparse_attention.triton_tiles import (  # isort: skip (points Triton at its assembler: before triton)
    LOG2_E,
    chosen_keys,
    more_rows,
    num_slots,
    products,
    rows,
)
import triton
import triton.language as tl


@triton.jit
def loss_of_chosen(
    q_ptr,
    k_ptr,
    index_q_ptr,
    index_k_ptr,
    index_w_ptr,
    ids_ptr,
    segments_ptr,
    index_ptr,
    ancestor_ptr,
    U,
    L,
    scale,
    kl_ptr,
    lse_ptr,
    target_ptr,
    s: tl.constexpr,
):
    """Loss, log-sum-exp of the index scores and target probabilities of one query; slots that hold no visible key stay unwritten.

    The attention of each block of heads is softmaxed over all keys first (its log-sum-exp), then added to the targets, which this
    program alone writes: no atomics.
    """
    token = tl.program_id(0).to(tl.int64)
    sequence, query = token // L, (token % L).to(tl.int32)
    slots = num_slots(ids_ptr + token * s.K, s)
    BLOCKS: tl.constexpr = (s.H // s.G + s.BH - 1) // s.BH
    for block in range(0, s.G * BLOCKS):
        among = block % BLOCKS * s.BH + tl.arange(0, s.BH)
        real = among < s.H // s.G
        at = (token * s.H + block // BLOCKS * (s.H // s.G) + among) * s.C
        q1 = rows(q_ptr, at, real, 0, s.C1)
        q2 = more_rows(q_ptr, at, real, q1, s.C1, s.C2)
        peak = tl.full([s.BH], float("-inf"), tl.float32)
        total = tl.zeros([s.BH], tl.float32)
        for start in range(0, slots, s.BK):
            key, seen = chosen_keys(ids_ptr + token * s.K, start, query, sequence, L, segments_ptr, index_ptr, ancestor_ptr, U, s)
            scores = _scores(q1, q2, k_ptr, ((sequence * L + key) * s.G + block // BLOCKS) * s.C, seen, scale, s)
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(scores - base[:, None]), 1)
            peak = new_peak
        lse = tl.where((total > 0) & real, peak + tl.log2(tl.where(total > 0, total, 1.0)), float("inf"))
        for start in range(0, slots, s.BK):
            key, seen = chosen_keys(ids_ptr + token * s.K, start, query, sequence, L, segments_ptr, index_ptr, ancestor_ptr, U, s)
            scores = _scores(q1, q2, k_ptr, ((sequence * L + key) * s.G + block // BLOCKS) * s.C, seen, scale, s)
            part = tl.sum(tl.exp2(scores - lse[:, None]), 0) / s.H
            slot = start + tl.arange(0, s.BK)
            before = tl.load(target_ptr + token * s.K + slot, mask=seen & (slot < tl.where(block > 0, s.K, 0)), other=0.0)
            tl.store(target_ptr + token * s.K + slot, before + part, mask=seen)
        tl.debug_barrier()
    _compare(
        index_q_ptr, index_k_ptr, index_w_ptr, ids_ptr, segments_ptr, index_ptr, ancestor_ptr, U, L, kl_ptr, lse_ptr, target_ptr, slots, s
    )


@triton.jit
def _scores(q1, q2, k_ptr, at, seen, scale, s: tl.constexpr):
    """Of a block of heads and a tile of keys, in units of log 2; -inf where not seen."""
    k1 = rows(k_ptr, at, seen, 0, s.C1)
    k2 = more_rows(k_ptr, at, seen, k1, s.C1, s.C2)
    return tl.where(seen[None, :], products(q1, q2, k1, k2, s.C2, s.precision) * (scale * LOG2_E), float("-inf"))


@triton.jit
def _compare(
    index_q_ptr,
    index_k_ptr,
    index_w_ptr,
    ids_ptr,
    segments_ptr,
    index_ptr,
    ancestor_ptr,
    U,
    L,
    kl_ptr,
    lse_ptr,
    target_ptr,
    slots,
    s: tl.constexpr,
):
    """Sum of target * (log target - log softmax(index scores)), with a running log-sum-exp of the index scores."""
    token = tl.program_id(0).to(tl.int64)
    sequence, query = token // L, (token % L).to(tl.int32)
    q, w = _index_queries(index_q_ptr, index_w_ptr, token, s)
    gathered = tl.zeros([s.BK], tl.float32)
    share = tl.zeros([s.BK], tl.float32)
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    for start in range(0, slots, s.BK):
        key, seen = chosen_keys(ids_ptr + token * s.K, start, query, sequence, L, segments_ptr, index_ptr, ancestor_ptr, U, s)
        dots = tl.dot(q, tl.trans(_index_keys(index_k_ptr, sequence * L + key, seen, s)), input_precision=s.precision)
        scores = tl.sum(tl.maximum(dots, 0.0) * w[:, None], 0)
        target = tl.load(target_ptr + token * s.K + start + tl.arange(0, s.BK), mask=seen, other=0.0)
        gathered += tl.where(target > 0, target * (tl.log(tl.where(target > 0, target, 1.0)) - scores), 0.0)  # 0 log 0 = 0
        share += target
        new_peak = tl.maximum(peak, tl.max(tl.where(seen, scores, float("-inf"))))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp(peak - base) + tl.sum(tl.where(seen, tl.exp(tl.where(seen, scores - base, 0.0)), 0.0))
        peak = new_peak
    lse = tl.where(total > 0, peak + tl.log(tl.where(total > 0, total, 1.0)), 0.0)
    tl.store(lse_ptr + token, lse)
    tl.store(kl_ptr + token, tl.sum(gathered) + lse * tl.sum(share))


@triton.jit
def _index_queries(index_q_ptr, index_w_ptr, token, s: tl.constexpr):
    """Index queries of one token, [JP, IP], and the weights of the heads, [JP]; 0 where there is none."""
    head, channel = tl.arange(0, s.JP), tl.arange(0, s.IP)
    mask = (head < s.J)[:, None] & (channel < s.I)[None, :]
    q = tl.load(index_q_ptr + (token * s.J + head)[:, None] * s.I + channel[None, :], mask=mask, other=0.0)
    return q, tl.load(index_w_ptr + token * s.J + head, mask=head < s.J, other=0.0).to(tl.float32)


@triton.jit
def _index_keys(index_k_ptr, row, seen, s: tl.constexpr):
    """[BK, IP]: index keys of some rows; 0 where not seen."""
    channel = tl.arange(0, s.IP)
    return tl.load(index_k_ptr + row[:, None] * s.I + channel[None, :], mask=seen[:, None] & (channel < s.I)[None, :], other=0.0)


@triton.jit
def gradient_of_chosen(
    index_q_ptr,
    index_k_ptr,
    index_w_ptr,
    ids_ptr,
    segments_ptr,
    index_ptr,
    ancestor_ptr,
    U,
    L,
    lse_ptr,
    target_ptr,
    dkl_ptr,
    dq_ptr,
    dw_ptr,
    dk_ptr,
    s: tl.constexpr,
):
    """Gradients of one query's index: dI = softmax(I) - target, times the loss's cotangent.

    A key's gradient is a sum over the queries that chose it, which only they know: float atomics, added in any order.
    """
    token = tl.program_id(0).to(tl.int64)
    sequence, query = token // L, (token % L).to(tl.int32)
    q, w = _index_queries(index_q_ptr, index_w_ptr, token, s)
    lse, dkl = tl.load(lse_ptr + token), tl.load(dkl_ptr + token)
    dq = tl.zeros([s.JP, s.IP], tl.float32)
    dw = tl.zeros([s.JP], tl.float32)
    head, channel = tl.arange(0, s.JP), tl.arange(0, s.IP)
    for start in range(0, num_slots(ids_ptr + token * s.K, s), s.BK):
        key, seen = chosen_keys(ids_ptr + token * s.K, start, query, sequence, L, segments_ptr, index_ptr, ancestor_ptr, U, s)
        row = sequence * L + key
        k = _index_keys(index_k_ptr, row, seen, s)
        dots = tl.maximum(tl.dot(q, tl.trans(k), input_precision=s.precision), 0.0)
        scores = tl.sum(dots * w[:, None], 0)
        target = tl.load(target_ptr + token * s.K + start + tl.arange(0, s.BK), mask=seen, other=0.0)
        dscores = tl.where(seen, (tl.exp(tl.where(seen, scores - lse, 0.0)) - target) * dkl, 0.0)
        dw += tl.sum(dots * dscores[None, :], 1)
        ddots = tl.where(dots > 0, dscores[None, :] * w[:, None], 0.0).to(k.dtype)
        dq = tl.dot(ddots, k, dq, input_precision=s.precision)
        dk = tl.dot(tl.trans(ddots), q, input_precision=s.precision)
        mask = seen[:, None] & (channel < s.I)[None, :]
        tl.atomic_add(dk_ptr + row[:, None] * s.I + channel[None, :], dk, mask=mask, sem="relaxed")
    mask = (head < s.J)[:, None] & (channel < s.I)[None, :]
    tl.store(dq_ptr + (token * s.J + head)[:, None] * s.I + channel[None, :], dq.to(dq_ptr.dtype.element_ty), mask=mask)
    tl.store(dw_ptr + token * s.J + head, dw.to(dw_ptr.dtype.element_ty), mask=head < s.J)
