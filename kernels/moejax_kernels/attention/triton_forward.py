"""Attention forward: a program has a tile of queries of one head and walks over the keys that any of them sees."""

# pyright: reportArgumentType=false
# Triton takes literals where a parameter is `tl.constexpr`.

from moejax_kernels.attention.triton_tiles import (  # isort: skip (before triton)
    add_mix,
    first_visible,
    load_rows,
    masked_start,
    products,
    related,
    store_rows,
    stretches,
    tree_of_row,
    zero_rows,
)
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1e30)
"""Peak of a query that has seen nothing: finite, so that exp2(-inf - peak) is 0."""


@triton.jit
def _one_tile(
    acc,
    peak,
    total,
    q,
    k_ptr,
    v_ptr,
    start,
    sight,
    S: tl.constexpr,
    G: tl.constexpr,
    C1: tl.constexpr,
    C2: tl.constexpr,
    M1: tl.constexpr,
    M2: tl.constexpr,
    KEYS: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENTS: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    k = load_rows(k_ptr, start, S, G * (C1 + C2), KEYS, C1, C2, MASKED)
    scores = products(q, k, C2, PRECISION)
    if MASKED:
        query, first, key = sight[0], sight[1], start + tl.arange(0, KEYS)
        seen = (key[None, :] >= first[:, None]) & (key[None, :] <= query[:, None])
        if SEGMENTS == 2:
            seen = seen & related(query[:, None], key[None, :], sight[2], S, WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1) * (SCALE * LOG2E))
    weights = tl.exp2(scores * (SCALE * LOG2E) - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(weights, 1)
    one = acc[0] * shrink[:, None]
    two = one
    if M2 > 0:
        two = acc[1] * shrink[:, None]
    v = load_rows(v_ptr, start, S, G * (M1 + M2), KEYS, M1, M2, MASKED)
    return add_mix((one, two), weights.to(v[0].dtype), v, M2, PRECISION), higher, total


@triton.jit
def forward(
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    first_ptr,
    ends_ptr,
    index_ptr,
    ancestor_ptr,
    position_ptr,
    U,
    o_ptr,
    log_total_ptr,
    L: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    C1: tl.constexpr,
    C2: tl.constexpr,
    M1: tl.constexpr,
    M2: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES  # the last queries see most: they start first
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_head = head // (H // G)
    k_ptr += row * S * G * (C1 + C2) + key_head * (C1 + C2)
    v_ptr += row * S * G * (M1 + M2) + key_head * (M1 + M2)
    query = S - L + begin + tl.arange(0, QUERIES)
    first = first_visible(first_ptr, ends_ptr, row, query, S, WINDOW, SEGMENTS)
    sight = query, first, tree_of_row(row, index_ptr, ancestor_ptr, position_ptr, U, S)
    q = load_rows(q_ptr + row * L * H * (C1 + C2) + head * (C1 + C2), begin, L, H * (C1 + C2), QUERIES, C1, C2, True)
    acc = zero_rows(QUERIES, M1, M2)
    peak, total = tl.full([QUERIES], NOTHING, tl.float32), tl.zeros([QUERIES], tl.float32)
    if HAS_SINKS:
        peak = tl.zeros([QUERIES], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        total += 1.0
    low = tl.min(first, 0)
    full_high = low if SEGMENTS == 2 else S - L + begin + 1  # in trees every tile is masked
    start, full, before, others = stretches(low, tl.max(first, 0), full_high, tl.minimum(S - L + begin + QUERIES, S), KEYS)
    for i in range(others):
        at = masked_start(i, low, start, full, before, KEYS)
        acc, peak, total = _one_tile(
            acc, peak, total, q, k_ptr, v_ptr, at, sight, S, G, C1, C2, M1, M2, KEYS, SCALE, WINDOW, SEGMENTS, True, PRECISION
        )
    for i in range(full):
        at = start + i * KEYS
        acc, peak, total = _one_tile(
            acc, peak, total, q, k_ptr, v_ptr, at, sight, S, G, C1, C2, M1, M2, KEYS, SCALE, WINDOW, SEGMENTS, False, PRECISION
        )
    total = tl.where(total > 0, total, 1.0)  # a query that sees nothing
    o_ptr += row * L * H * (M1 + M2) + head * (M1 + M2)
    store_rows(o_ptr, begin, acc, (1 / total)[:, None], L, H * (M1 + M2), QUERIES, M1, M2)
    tl.store(log_total_ptr + (row * H + head) * L + query - (S - L), peak + tl.log2(total), mask=query < S)
