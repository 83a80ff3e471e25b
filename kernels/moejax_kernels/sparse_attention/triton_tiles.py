"""Tiles of the sparse attention kernels: rows that are gathered by number, widths in two parts, one query's place in the batch."""

from moejax_kernels.sparse_attention.triton_visible import sees  # isort: skip (points Triton at its assembler: before triton)
import dataclasses

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
"""exp(x) = 2 ** (x * LOG2_E)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What a kernel is compiled for."""

    H: int
    G: int
    C1: int
    """First channels of q and k, a power of two."""
    C2: int
    """The others, a power of two or 0."""
    M1: int
    M2: int
    K: int
    """Keys chosen per query."""
    KP: int
    """K, rounded up to a power of two."""
    BH: int
    """Heads of a tile, a power of two from 16."""
    BK: int
    """Keys of a tile."""
    STEP: int
    """Channels of a tile, where it is not as wide as the rows."""
    latent: bool
    """Values are the first channels of the keys: M1 is C1, and M2 is 0 or C2."""
    segments: int
    """As triton_visible.operands says."""
    precision: str
    """Of matmuls of float32."""


@triton.jit
def rows(ptr, at, mask, FROM: tl.constexpr, WIDTH: tl.constexpr):
    """[len(at), WIDTH]: channels FROM and up of the rows that begin at offsets `at`; 0 where masked."""
    channel = FROM + tl.arange(0, WIDTH)
    return tl.load(ptr + at[:, None] + channel[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def more_rows(ptr, at, mask, first, FROM: tl.constexpr, WIDTH: tl.constexpr):
    """The second part of rows whose first part is `first`, which stands in where there is none (WIDTH 0)."""
    if WIDTH > 0:
        return rows(ptr, at, mask, FROM, WIDTH)
    else:
        return first


@triton.jit
def values(v_ptr, row, seen, k1, k2, M1: tl.constexpr, M2: tl.constexpr, LATENT: tl.constexpr):
    """Values of some rows, in two parts; latent: the keys' own."""
    if LATENT:
        return k1, k2
    else:
        v1 = rows(v_ptr, row * (M1 + M2), seen, 0, M1)
        return v1, more_rows(v_ptr, row * (M1 + M2), seen, v1, M1, M2)


@triton.jit
def store_rows(ptr, at, mask, tile, FROM: tl.constexpr, WIDTH: tl.constexpr):
    channel = FROM + tl.arange(0, WIDTH)
    tl.store(ptr + at[:, None] + channel[None, :], tile.to(ptr.dtype.element_ty), mask=mask[:, None])


@triton.jit
def add_rows(ptr, at, mask, tile, FROM: tl.constexpr, WIDTH: tl.constexpr):
    channel = FROM + tl.arange(0, WIDTH)
    tl.atomic_add(ptr + at[:, None] + channel[None, :], tile, mask=mask[:, None], sem="relaxed")


@triton.jit
def products(a1, a2, b1, b2, SECOND: tl.constexpr, PRECISION: tl.constexpr):
    """Scalar products of rows of a with rows of b, [len(a), len(b)], float32; SECOND: width of the second parts, 0 for none."""
    out = tl.dot(a1, tl.trans(b1), input_precision=PRECISION)
    if SECOND > 0:
        out = tl.dot(a2, tl.trans(b2), out, input_precision=PRECISION)
    return out


@triton.jit
def products_of_rows(a_ptr, a_at, a_real, b_ptr, b_at, b_real, WIDTH: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr):
    """Scalar products of rows of two arrays, [len(a_at), len(b_at)], float32; reads STEP channels at a time."""
    out = tl.zeros([a_at.shape[0], b_at.shape[0]], tl.float32)
    for first in range(0, WIDTH, STEP):
        b = rows(b_ptr, b_at + first, b_real, 0, STEP)
        out = tl.dot(rows(a_ptr, a_at + first, a_real, 0, STEP), tl.trans(b), out, input_precision=PRECISION)
    return out


@triton.jit
def place(program, L, s: tl.constexpr):
    """One query and a block of the heads that read one key head.

    Returns:
      token (int64, b * L + query), sequence (int64), query (int32), key head, heads [BH], and which of those exist.
    """
    N: tl.constexpr = s.H // s.G
    BLOCKS: tl.constexpr = (N + s.BH - 1) // s.BH
    token = program // (s.G * BLOCKS)
    block = (program % (s.G * BLOCKS)).to(tl.int32)
    among = (block % BLOCKS) * s.BH + tl.arange(0, s.BH)
    g = block // BLOCKS
    return token, token // L, (token % L).to(tl.int32), g, g * N + among, among < N


@triton.jit
def num_slots(ids_ptr, s: tl.constexpr):
    """One past the last slot of a query's ids that holds one."""
    slot = tl.arange(0, s.KP)
    return tl.max(tl.where(tl.load(ids_ptr + slot, mask=slot < s.K, other=-1) >= 0, slot + 1, 0))


@triton.jit
def chosen_keys(ids_ptr, start, query, sequence, L, segments_ptr, index_ptr, ancestor_ptr, U, s: tl.constexpr):
    """Keys in BK slots of one query's ids, from `start` on, and which of them the query sees."""
    slot = start + tl.arange(0, s.BK)
    key = tl.load(ids_ptr + slot, mask=slot < s.K, other=-1)
    return key, sees(query, key, sequence, L, segments_ptr, index_ptr, ancestor_ptr, U, s.segments)
