"""Pieces of the delta rule's Triton kernels: a chunk of 64 tokens, its documents, its decays.

Every exponent is a sum of g <= 0 over the tokens between two points, never a difference of sums: no decay overflows, and a strong
one costs no digits of the mild ones after it. Pairs (i, j) of a chunk are taken apart by halves of 1, 2, .., 32 tokens: exactly one
level has j in a lower half and i in the upper half beside it, and measures both from the border between them.
"""

from moejax_kernels import triton_launch as triton_launch  # before triton

import numpy as np  # isort: skip
import triton  # isort: skip
import triton.language as tl  # isort: skip

CHUNK = 64
T = tl.constexpr(CHUNK)
LEVELS = tl.constexpr(6)
TO_END, FROM_START = tl.constexpr(6), tl.constexpr(7)


def choices() -> np.ndarray:
    """Bool [8, T, T]: which tokens' g add up for a row. Levels 0 to 5: those up to the row in an upper half, those after it in a
    lower one. TO_END: those after the row; FROM_START: those up to it.
    """
    at = np.arange(CHUNK)
    row, token = at[:, None], at[None, :]
    levels = [(row >> level == token >> level) & ((row >> level) % 2 == (token <= row)) for level in range(6)]
    return np.stack([*levels, token > row, token <= row])


@triton.jit
def dot(a, b, FULL: tl.constexpr):
    """Product with float32 sums; FULL keeps float32 operands, else they are rounded to bfloat16."""
    if FULL:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32x3")
    else:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))


@triton.jit
def fine_dot(a, b, FULL: tl.constexpr):
    """For the inverse of a chunk's matrix, whose roundings add up over the levels."""
    return tl.dot(a, b, input_precision="tf32x3" if FULL else "tf32")


@triton.jit
def add_up(chosen, x, FULL: tl.constexpr):
    """Sums of rows of x: `chosen @ x`, where `chosen` holds 0 and 1. Two bfloat16 parts of x carry 16 bits of it."""
    if FULL:
        return tl.dot(chosen, x, input_precision="tf32x3")
    else:
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(chosen, low, acc=tl.dot(chosen, high))


@triton.jit
def grid_tt():
    """Row numbers [T, 1] and column numbers [1, T]."""
    return tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]


@triton.jit
def chosen_tokens(choices_ptr, level):
    """Row i marks the tokens that lie between token i and the level's border; see `choices`."""
    i, j = grid_tt()
    return tl.load(choices_ptr + level * (T * T) + i * T + j)


@triton.jit
def split_at(level):
    """Pairs (i, j) that the level splits, halves of 2**level: i in an upper half, j in the lower half beside it."""
    i, j = grid_tt()
    return ((j >> level) % 2 == 0) & ((i >> level) == (j >> level) + 1)


@triton.jit
def labels(ids_ptr, starts_ptr, b, n, L: tl.constexpr, PACKED: tl.constexpr):
    """First position of each token's document; -1 for padding and beyond the row."""
    at = n * T + tl.arange(0, T)
    if PACKED:
        row = b.to(tl.int64) * L
        ids = tl.load(ids_ptr + row + at, mask=at < L, other=-1)
        return tl.where(ids >= 0, tl.load(starts_ptr + row + at, mask=at < L, other=-1), -1)
    else:
        return tl.where(at < L, 0, -1)


@triton.jit
def same_document(label):
    return label[:, None] == label[None, :]


@triton.jit
def borders(label, n):
    """Whether the incoming state reaches a token, whether a token writes the outgoing one, and whether the state passes the chunk.

    The incoming state belongs to a document that began in an earlier chunk, in the first chunk (the initial state) to one that begins
    the row. The outgoing one is written by the last document to begin; padding lets it by.
    """
    first, last = tl.maximum(n * T, 1), tl.max(label)
    return (label >= 0) & (label < first), (label >= 0) & (label == last), last < first


@triton.jit
def rows(ptr, b, n, h, c0, label, L: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Channels c0 .. c0 + BLOCK of head h in a chunk of [B, L, HEADS, WIDTH]; padding reads 0."""
    at = b.to(tl.int64) * L + n * T + tl.arange(0, T)
    place = (at * HEADS + h)[:, None] * WIDTH + c0 + tl.arange(0, BLOCK)[None, :]
    return tl.load(ptr + place, mask=(label >= 0)[:, None], other=0.0).to(tl.float32)


@triton.jit
def put_rows(ptr, x, b, n, h, c0, L: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    at = n * T + tl.arange(0, T)
    place = ((b.to(tl.int64) * L + at) * HEADS + h)[:, None] * WIDTH + c0 + tl.arange(0, BLOCK)[None, :]
    tl.store(ptr + place, x.to(ptr.dtype.element_ty), mask=(at < L)[:, None])


@triton.jit
def column(ptr, b, n, h, label, L: tl.constexpr, HEADS: tl.constexpr):
    """One number per token of [B, L, HEADS]; padding reads 0."""
    at = b.to(tl.int64) * L + n * T + tl.arange(0, T)
    return tl.load(ptr + at * HEADS + h, mask=label >= 0, other=0.0).to(tl.float32)


@triton.jit
def decays(g_ptr, b, n, h, c0, label, L: tl.constexpr, H: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """g of a chunk: [T, BC], or [T, 1] where it is per head."""
    if PER_CHANNEL:
        return rows(g_ptr, b, n, h, c0, label, L, H, C, BC)
    else:
        return column(g_ptr, b, n, h, label, L, H)[:, None]


@triton.jit
def through(choices_ptr, level, g, FULL: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """Sums of g over the tokens between each row and the level's border."""
    chosen = chosen_tokens(choices_ptr, level)
    if PER_CHANNEL:
        return add_up(chosen, g, FULL)
    else:
        return tl.sum(chosen.to(tl.float32) * tl.trans(g), axis=1, keep_dims=True)


@triton.jit
def from_start(choices_ptr, g, label, n, FULL: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """Decay from the chunk's start to each token, that one included; 0 where another document lies between."""
    enters, _, _ = borders(label, n)
    return tl.where(enters[:, None], tl.exp(through(choices_ptr, FROM_START, g, FULL, PER_CHANNEL)), 0.0)


@triton.jit
def to_end(choices_ptr, g, label, n, FULL: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """Decay from each token, that one excluded, to the chunk's end; 0 where another document lies between."""
    _, leaves, _ = borders(label, n)
    return tl.where(leaves[:, None], tl.exp(through(choices_ptr, TO_END, g, FULL, PER_CHANNEL)), 0.0)


@triton.jit
def past(g, label, n, BC: tl.constexpr):
    """Decay of the state over the whole chunk, [BC]; 0 where a document begins in it."""
    _, _, passes = borders(label, n)
    return tl.broadcast_to(tl.where(passes, tl.exp(tl.sum(g, axis=0)), 0.0), (BC,))


@triton.jit
def stations(route_ptr, b, n, N: tl.constexpr):
    """Of a chunk in a tree: the slot of the state that enters it, its segment's own, and that of the chunk after it (-1: there is none)."""
    at = route_ptr + (b * N + n) * 2
    return tl.load(at), tl.load(at + 1), tl.load(at + 3, mask=n + 1 < N, other=-1)


@triton.jit
def tile(ptr, index, row0, c0, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Addresses of [ROWS, COLUMNS] at (row0, c0) of the index-th matrix [HEIGHT, WIDTH]."""
    at = (row0 + tl.arange(0, ROWS))[:, None] * WIDTH + c0 + tl.arange(0, COLUMNS)[None, :]
    return ptr + index.to(tl.int64) * (HEIGHT * WIDTH) + at


@triton.jit
def put(ptr, x):
    """Stores in the dtype of the array."""
    tl.store(ptr, x.to(ptr.dtype.element_ty))
