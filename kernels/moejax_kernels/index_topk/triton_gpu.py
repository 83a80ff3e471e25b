"""The index's choice on NVIDIA GPUs, in Triton: one launch, each query's scores pass by once and only the best are kept.

A program goes over the keys of a few queries from the newest to the oldest. Scores above the lowest that can still be chosen are
appended to a list of at most CAP per query, which a bitonic top-k cuts back to KP >= K when it is full, raising that lowest score:
about log2(S / K) times where scores are in random order, S / K times at worst. Score and position are packed into one int64, so
that the larger number is the better key, ties included, and the result comes out sorted.

Moves the keys once per BQ queries (mostly from the L2 cache) and 4 K bytes of ids per query; the lists, 8 CAP bytes per query in
flight, belong to PROGRAMS programs that take one block of queries after the other, so that nothing grows with L times S.
"""

import dataclasses

from moejax_kernels.sparse_attention import triton_visible  # isort: skip (points Triton at its assembler: before triton)
import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from moejax_kernels import gpu
from moejax_kernels.sparse_attention.triton_visible import sees
from moejax_kernels.triton_launch import launch

PROGRAMS = 512
"""About four for each multiprocessor of the GPUs that are here today."""
NOTHING = tl.constexpr(-(2**63))
LOW = tl.constexpr(2**31 - 1)
"""`key ^ LOW` is LOW - key: of equal scores the lower position is the larger number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What the kernel is compiled for."""

    J: int
    JP: int
    """J, rounded up to a power of two from 16."""
    C: int
    CP: int
    """C, rounded up to a power of two."""
    K: int
    KP: int
    """K, rounded up to a power of two."""
    CAP: int
    """Entries of a query's list, a power of two."""
    CHUNK: int
    """Keys between two looks at how full the list is, at most CAP - KP."""
    BQ: int
    """Queries of a program."""
    BK: int
    """Keys of a tile."""
    pools: bool
    """Keys are visible with the token at their key_end."""
    segments: int
    """As triton_visible.operands says."""
    precision: str
    """Of matmuls of float32."""


def index_topk(index_q_BLJC, index_k_BSC, index_w_BLJ, *, topk, segments=None, key_end_BS=None):
    index_q_BLJC, index_k_BSC, index_w_BLJ = jax.lax.stop_gradient((index_q_BLJC, index_k_BSC, index_w_BLJ))
    pools = key_end_BS is not None
    num_rows, length = index_q_BLJC.shape[:2]
    stand_in = jnp.zeros((1,), jnp.int32)
    borders, mode = triton_visible.operands(segments, stand_in)
    starts_BL = stand_in if segments is None else jnp.asarray(segments.starts_BL)
    key_end_BS = key_end_BS.astype(jnp.int32) if pools else stand_in
    shape, options = _shape(index_q_BLJC, topk, pools, mode)
    num_items = num_rows * -(-length // shape.BQ)
    programs = min(PROGRAMS, num_items)
    lists = jax.ShapeDtypeStruct((programs, shape.BQ, shape.CAP, 2), jnp.int32)  # int64, which JAX has only where x64 is on
    ids_BLK, _ = launch(
        choose_keys,
        *(index_q_BLJC, index_k_BSC, index_w_BLJ, key_end_BS, starts_BL, *borders, length, index_k_BSC.shape[1], num_rows, num_items),
        out_type=[jax.ShapeDtypeStruct((num_rows, length, topk), jnp.int32), lists],
        grid=programs,
        s=shape,
        **options,
    )
    return ids_BLK


def _shape(index_q_BLJC, topk, pools, mode):
    num_heads, width = index_q_BLJC.shape[2:]
    JP, KP = max(16, triton.next_power_of_2(num_heads)), max(16, triton.next_power_of_2(topk))
    BQ, BK, num_warps = (1, 16, 4) if index_q_BLJC.dtype == jnp.float32 else (max(1, 128 // JP), 64, 8)
    BQ = 1 if "A100" in (gpu.device_kind() or "") else min(BQ, 4)  # an A100's matmuls read their operands from registers
    CHUNK = max(BK, KP // 4)
    shape = Shape(
        J=num_heads,
        JP=JP,
        C=width,
        CP=triton.next_power_of_2(width),
        K=topk,
        KP=KP,
        CAP=triton.next_power_of_2(KP + CHUNK),
        CHUNK=CHUNK,
        BQ=BQ,
        BK=BK,
        pools=pools,
        segments=mode,
        precision="tf32x3" if index_q_BLJC.dtype == jnp.float32 else "ieee",
    )
    return shape, {"num_warps": num_warps, "num_stages": 2}


@triton.jit
def choose_keys(
    q_ptr,
    k_ptr,
    w_ptr,
    key_end_ptr,
    starts_ptr,
    segments_ptr,
    index_ptr,
    ancestor_ptr,
    U,
    L,
    S,
    B,
    num_items,
    ids_ptr,
    list_ptr,
    s: tl.constexpr,
):
    """Blocks of queries, one after the other, those with the most keys to see first."""
    lists = list_ptr.to(tl.pointer_type(tl.int64)) + tl.program_id(0).to(tl.int64) * (s.BQ * s.CAP)
    number_Q = tl.arange(0, s.BQ)
    for number in range(tl.program_id(0), num_items, tl.num_programs(0)):
        item = num_items - 1 - number
        sequence, first = (item % B).to(tl.int64), (item // B) * s.BQ
        q, w = _load_queries(q_ptr, w_ptr, first, sequence, L, s)
        begin, top = _range_of_keys(first, sequence, starts_ptr, L, S, s)
        count = tl.zeros([s.BQ], tl.int32)
        least = tl.full([s.BQ], NOTHING, tl.int64)
        while top > begin:
            bottom = tl.maximum(top - s.CHUNK, begin)
            for start in range(bottom, top, s.BK):
                better = _score(q, w, k_ptr, key_end_ptr, segments_ptr, index_ptr, ancestor_ptr, U, L, S, first, sequence, start, top, s)
                keep = better > least[:, None]
                at = count[:, None] + tl.cumsum(keep.to(tl.int32), 1) - 1
                tl.store(lists + number_Q[:, None] * s.CAP + at, better, mask=keep)
                count += tl.sum(keep.to(tl.int32), 1)
            if tl.max(count) + s.CHUNK > s.CAP:
                tl.debug_barrier()  # the list is read by other threads than wrote it
                for i in range(s.BQ):
                    best = _best(lists + i * s.CAP, tl.sum(tl.where(number_Q == i, count, 0)), s)
                    tl.store(lists + i * s.CAP + tl.arange(0, s.KP), best)
                    least = tl.where(number_Q == i, tl.min(best), least)
                count = tl.minimum(count, s.KP)
                tl.debug_barrier()
            top = bottom
        tl.debug_barrier()
        for i in range(s.BQ):
            best = _best(lists + i * s.CAP, tl.sum(tl.where(number_Q == i, count, 0)), s)
            slot = tl.arange(0, s.KP)
            key = tl.where(best == NOTHING, -1, (best & LOW).to(tl.int32) ^ LOW)
            tl.store(ids_ptr + (sequence * L + first + i) * s.K + slot, key, mask=slot < tl.where(first + i < L, s.K, 0))
        tl.debug_barrier()


@triton.jit
def _load_queries(q_ptr, w_ptr, first, sequence, L, s: tl.constexpr):
    """Heads of BQ queries, one after the other, [BQ * JP, CP], and their weights, [BQ * JP]; 0 where there is none."""
    row = tl.arange(0, s.BQ * s.JP)
    head, channel = row % s.JP, tl.arange(0, s.CP)
    real = (head < s.J) & (first + row // s.JP < L)
    at = (sequence * L + first + row // s.JP) * s.J + head
    q = tl.load(q_ptr + at[:, None] * s.C + channel[None, :], mask=real[:, None] & (channel < s.C)[None, :], other=0.0)
    return q, tl.load(w_ptr + at, mask=real, other=0.0).to(tl.float32)


@triton.jit
def _range_of_keys(first, sequence, starts_ptr, L, S, s: tl.constexpr):
    """First key, and one past the last, that a block of queries may see."""
    if s.pools:
        return 0 * first, S + 0 * first
    elif s.segments == 1:
        return tl.load(starts_ptr + sequence * L + first), tl.minimum(first + s.BQ, L)
    else:
        return 0 * first, tl.minimum(first + s.BQ, L)


@triton.jit
def _score(q, w, k_ptr, key_end_ptr, segments_ptr, index_ptr, ancestor_ptr, U, L, S, first, sequence, start, top, s: tl.constexpr):
    """Keys from `start` on, below `top`, as seen by BQ queries: score and position in one number, [BQ, BK]; the larger the better."""
    key, channel = start + tl.arange(0, s.BK), tl.arange(0, s.CP)
    there = key < top
    mask = there[:, None] & (channel < s.C)[None, :]
    k = tl.load(k_ptr + (sequence * S + key)[:, None] * s.C + channel[None, :], mask=mask, other=0.0)
    dots = tl.maximum(tl.dot(q, tl.trans(k), input_precision=s.precision), 0.0) * w[:, None]
    scores = tl.sum(tl.reshape(dots, [s.BQ, s.JP, s.BK]), 1)
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)  # -0 would rank below 0
    rank = tl.where(bits < 0, bits ^ LOW, bits).to(tl.int64)  # integers in the order of the floats
    position = tl.where(there, key, -1)
    if s.pools:
        position = tl.load(key_end_ptr + sequence * S + key, mask=there, other=-1)
    query = first + tl.arange(0, s.BQ)
    own = tl.minimum(query, L - 1)[:, None]
    seen = sees(own, position[None, :], sequence, L, segments_ptr, index_ptr, ancestor_ptr, U, s.segments)
    seen = seen & (query < L)[:, None] & (scores != float("-inf"))
    return tl.where(seen, (rank << 32) | (key ^ LOW).to(tl.int64)[None, :], NOTHING)


@triton.jit
def _best(list_ptr, count, s: tl.constexpr):
    """The KP best of a list, sorted, filled up with NOTHING."""
    slot = tl.arange(0, s.CAP)
    return tl.topk(tl.load(list_ptr + slot, mask=slot < count, other=NOTHING), s.KP)
