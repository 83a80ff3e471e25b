"""Attention backward, without atomics: one kernel has tiles of queries and walks over keys, one has tiles of keys and walks over queries."""

# pyright: reportArgumentType=false
# Triton takes literals where a parameter is `tl.constexpr`.

from moejax_kernels.attention.triton_tiles import (  # isort: skip (before triton)
    add_mix,
    first_visible,
    last_visible,
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


@triton.jit
def _delta(o, do, M2: tl.constexpr):
    """Sum of o * do over each query's values."""
    total = tl.sum(o[0].to(tl.float32) * do[0].to(tl.float32), 1)
    if M2 > 0:
        total += tl.sum(o[1].to(tl.float32) * do[1].to(tl.float32), 1)
    return total


@triton.jit
def _keys_tile(
    dq,
    of_queries,
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
    """`of_queries`: their q, do, log_total and delta."""
    q, do, log_total, delta = of_queries
    k = load_rows(k_ptr, start, S, G * (C1 + C2), KEYS, C1, C2, MASKED)
    scores = products(q, k, C2, PRECISION)
    if MASKED:
        query, first, key = sight[0], sight[1], start + tl.arange(0, KEYS)
        seen = (key[None, :] >= first[:, None]) & (key[None, :] <= query[:, None])
        if SEGMENTS == 2:
            seen = seen & related(query[:, None], key[None, :], sight[2], S, WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    probs = tl.exp2(scores * (SCALE * LOG2E) - log_total[:, None])
    v = load_rows(v_ptr, start, S, G * (M1 + M2), KEYS, M1, M2, MASKED)
    dscores = probs * (products(do, v, M2, PRECISION) - delta[:, None])
    return add_mix(dq, dscores.to(k[0].dtype), k, C2, PRECISION)


@triton.jit
def query_gradients(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    do_ptr,
    log_total_ptr,
    first_ptr,
    ends_ptr,
    index_ptr,
    ancestor_ptr,
    position_ptr,
    U,
    dq_ptr,
    delta_ptr,
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
    to_head = row * L * H * (M1 + M2) + head * (M1 + M2)
    do = load_rows(do_ptr + to_head, begin, L, H * (M1 + M2), QUERIES, M1, M2, True)
    delta = _delta(load_rows(o_ptr + to_head, begin, L, H * (M1 + M2), QUERIES, M1, M2, True), do, M2)
    at_rows = (row * H + head) * L + query - (S - L)
    tl.store(delta_ptr + at_rows, delta, mask=query < S)
    log_total = tl.load(log_total_ptr + at_rows, mask=query < S, other=0.0)
    to_head = row * L * H * (C1 + C2) + head * (C1 + C2)
    q = load_rows(q_ptr + to_head, begin, L, H * (C1 + C2), QUERIES, C1, C2, True)
    of_queries, dq = (q, do, log_total, delta), zero_rows(QUERIES, C1, C2)
    low = tl.min(first, 0)
    full_high = low if SEGMENTS == 2 else S - L + begin + 1  # in trees every tile is masked
    start, full, before, others = stretches(low, tl.max(first, 0), full_high, tl.minimum(S - L + begin + QUERIES, S), KEYS)
    for i in range(others):
        at = masked_start(i, low, start, full, before, KEYS)
        dq = _keys_tile(dq, of_queries, k_ptr, v_ptr, at, sight, S, G, C1, C2, M1, M2, KEYS, SCALE, WINDOW, SEGMENTS, True, PRECISION)
    for i in range(full):
        at = start + i * KEYS
        dq = _keys_tile(dq, of_queries, k_ptr, v_ptr, at, sight, S, G, C1, C2, M1, M2, KEYS, SCALE, WINDOW, SEGMENTS, False, PRECISION)
    store_rows(dq_ptr + to_head, begin, dq, SCALE, L, H * (C1 + C2), QUERIES, C1, C2)


@triton.jit
def _queries_tile(
    dk,
    dv,
    k,
    v,
    of_head,
    start,
    sight,
    L: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    C1: tl.constexpr,
    C2: tl.constexpr,
    M1: tl.constexpr,
    M2: tl.constexpr,
    QUERIES: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores lie with keys down and queries across, so that they are the left factor of both sums.

    `start` is the number of the first query, `of_head` points to a head's q, do, log_total and delta.
    """
    at = start + tl.arange(0, QUERIES)
    key, last, query = sight[0], sight[1], S - L + at
    q = load_rows(of_head[0], start, L, H * (C1 + C2), QUERIES, C1, C2, True)
    scores = products(k, q, C2, PRECISION)
    seen = (query[None, :] >= key[:, None]) & (query[None, :] < last[:, None])
    if SEGMENTS == 2:
        seen = seen & related(query[None, :], key[:, None], sight[2], S, WINDOW)
    scores = tl.where(seen, scores, float("-inf"))
    log_total = tl.load(of_head[2] + at, mask=at < L, other=0.0)
    probs = tl.exp2(scores * (SCALE * LOG2E) - log_total[None, :])
    do = load_rows(of_head[1], start, L, H * (M1 + M2), QUERIES, M1, M2, True)
    dv = add_mix(dv, probs.to(do[0].dtype), do, M2, PRECISION)
    delta = tl.load(of_head[3] + at, mask=at < L, other=0.0)
    dscores = probs * (products(v, do, M2, PRECISION) - delta[None, :])
    return add_mix(dk, dscores.to(q[0].dtype), q, C2, PRECISION), dv


@triton.jit
def key_gradients(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    log_total_ptr,
    delta_ptr,
    last_ptr,
    index_ptr,
    ancestor_ptr,
    position_ptr,
    U,
    dk_ptr,
    dv_ptr,
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
    SPLITS: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of a tile of keys of one key head, summed over 1/SPLITS of the query heads that read it."""
    begin = tl.program_id(0) * KEYS  # the first keys are seen most: they start first
    key_head, split, row = tl.program_id(1) // SPLITS, tl.program_id(1) % SPLITS, tl.program_id(2).to(tl.int64)
    heads: tl.constexpr = H // G // SPLITS
    to_k = row * S * G * (C1 + C2) + key_head * (C1 + C2)
    to_v = row * S * G * (M1 + M2) + key_head * (M1 + M2)
    k = load_rows(k_ptr + to_k, begin, S, G * (C1 + C2), KEYS, C1, C2, True)
    v = load_rows(v_ptr + to_v, begin, S, G * (M1 + M2), KEYS, M1, M2, True)
    key = begin + tl.arange(0, KEYS)
    last = last_visible(last_ptr, row, key, S, WINDOW, SEGMENTS)
    sight = key, last, tree_of_row(row, index_ptr, ancestor_ptr, position_ptr, U, S)
    dk, dv = zero_rows(KEYS, C1, C2), zero_rows(KEYS, M1, M2)
    low = begin  # a maximum with 0 would hide from the compiler what it divides by
    if S > L:
        low = tl.maximum(begin - (S - L), 0)
    num_tiles = tl.cdiv(tl.maximum(tl.max(last, 0) - (S - L) - low, 0), QUERIES)
    for n in range(heads):
        head = (key_head * SPLITS + split) * heads + n
        at_q, at_o, at_L = (row * L * H + head) * (C1 + C2), (row * L * H + head) * (M1 + M2), (row * H + head) * L
        of_head = q_ptr + at_q, do_ptr + at_o, log_total_ptr + at_L, delta_ptr + at_L
        for i in range(num_tiles):
            at = low + i * QUERIES
            dk, dv = _queries_tile(dk, dv, k, v, of_head, at, sight, L, S, H, C1, C2, M1, M2, QUERIES, SCALE, WINDOW, SEGMENTS, PRECISION)
    dk_ptr += split.to(tl.int64) * tl.num_programs(2) * S * G * (C1 + C2) + to_k
    dv_ptr += split.to(tl.int64) * tl.num_programs(2) * S * G * (M1 + M2) + to_v
    store_rows(dk_ptr, begin, dk, SCALE, S, G * (C1 + C2), KEYS, C1, C2)
    store_rows(dv_ptr, begin, dv, 1.0, S, G * (M1 + M2), KEYS, M1, M2)
