"""Pieces of the attention kernels: tiles of rows, their products, and which keys a tile of queries sees.

A width that is no power of two is two parts, e.g. 192 = 128 + 64: a `rows` here is a pair of tiles, the second one unused where
SECOND is 0. A row has S keys, and the queries are its last L positions: queries are numbered as keys are, from S - L on.
"""

# pyright: reportArgumentType=false
# Triton takes literals where a parameter is `tl.constexpr`.

from moejax_kernels import triton_launch as triton_launch  # isort: skip (before triton)
import triton
import triton.language as tl


@triton.jit
def _part(
    ptr, first, L: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, AT: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr
):
    row, column = tl.arange(0, ROWS), tl.arange(0, SIZE)
    at = ptr + first.to(tl.int64) * STRIDE + (row[:, None] * STRIDE + (AT + column)[None, :])
    if MASKED:
        return tl.load(at, mask=(first + row < L)[:, None], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def load_rows(
    ptr,
    first,
    L: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    MASKED: tl.constexpr,
):
    """ROWS tokens of one head, from token `first` on; 0 beyond the row. `ptr`: the head's numbers of the row's token 0."""
    one = _part(ptr, first, L, STRIDE, ROWS, 0, FIRST, MASKED)
    two = one
    if SECOND > 0:
        two = _part(ptr, first, L, STRIDE, ROWS, FIRST, SECOND, MASKED)
    return one, two


@triton.jit
def _put_part(ptr, first, values, L: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, AT: tl.constexpr, SIZE: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, SIZE)
    at = ptr + first.to(tl.int64) * STRIDE + (row[:, None] * STRIDE + (AT + column)[None, :])
    tl.store(at, values.to(ptr.dtype.element_ty), mask=(first + row < L)[:, None])


@triton.jit
def store_rows(
    ptr,
    first,
    rows,
    factor,
    L: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Writes rows times factor."""
    _put_part(ptr, first, rows[0] * factor, L, STRIDE, ROWS, 0, FIRST)
    if SECOND > 0:
        _put_part(ptr, first, rows[1] * factor, L, STRIDE, ROWS, FIRST, SECOND)


@triton.jit
def zero_rows(ROWS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    one = tl.zeros([ROWS, FIRST], tl.float32)
    two = one
    if SECOND > 0:
        two = tl.zeros([ROWS, SECOND], tl.float32)
    return one, two


@triton.jit
def products(a, b, SECOND: tl.constexpr, PRECISION: tl.constexpr):
    """Every row of a with every row of b."""
    total = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    if SECOND > 0:
        total = tl.dot(a[1], tl.trans(b[1]), acc=total, input_precision=PRECISION)
    return total


@triton.jit
def add_mix(total, weights, rows, SECOND: tl.constexpr, PRECISION: tl.constexpr):
    """total + weights @ rows."""
    one = tl.dot(weights, rows[0], acc=total[0], input_precision=PRECISION)
    two = one
    if SECOND > 0:
        two = tl.dot(weights, rows[1], acc=total[1], input_precision=PRECISION)
    return one, two


@triton.jit
def first_visible(first_ptr, ends_ptr, row, query, S: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr):
    """First key that each query may see; S where there is none (padding, beyond the row). In trees it need not see all from there on."""
    real, first = query < S, tl.zeros_like(query)
    if SEGMENTS > 0:
        first = tl.load(first_ptr + row * S + query, mask=query < S, other=0)
        real = query < tl.load(ends_ptr + row * S + query, mask=query < S, other=0)
    if WINDOW > 0 and SEGMENTS < 2:
        first = tl.maximum(first, query - (WINDOW - 1))
    return tl.where(real, first, S)


@triton.jit
def last_visible(last_ptr, row, key, S: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr):
    """One past the last query that may see each key; not beyond the key itself where there is none (padding, beyond the row)."""
    last = tl.full(key.shape, S, tl.int32)
    if SEGMENTS > 0:
        last = tl.load(last_ptr + row * S + key, mask=key < S, other=0)
    if WINDOW > 0 and SEGMENTS < 2:
        last = tl.minimum(last, key + WINDOW)
    return last


@triton.jit
def tree_of_row(row, index_ptr, ancestor_ptr, position_ptr, U, S: tl.constexpr):
    """What `related` reads."""
    return index_ptr + row * S, ancestor_ptr + row * U * U, position_ptr + row * S, U


@triton.jit
def related(query, key, tree, S: tl.constexpr, WINDOW: tl.constexpr):
    """Is the key's segment the query's or an ancestor of it, and the key inside the window? Shapes broadcast."""
    query_index = tl.load(tree[0] + query, mask=query < S, other=0)
    key_index = tl.load(tree[0] + key, mask=key < S, other=0)
    seen = tl.load(tree[1] + (query_index * tree[3] + key_index)) != 0
    if WINDOW > 0:
        query_position = tl.load(tree[2] + query, mask=query < S, other=0)
        key_position = tl.load(tree[2] + key, mask=key < S, other=0)
        seen = seen & (query_position - key_position < WINDOW)
    return seen


@triton.jit
def stretches(low, full_low, full_high, high, TILE: tl.constexpr):
    """Cuts [low, high) into tiles: `full` whole ones inside [full_low, full_high), `before` and `after` it the others.

    Returns start of the whole ones, their number, and the numbers before and in all of the others. A masked tile i starts at
    `masked_start(...)`.
    """
    start = low + tl.cdiv(tl.maximum(full_low - low, 0), TILE) * TILE
    full = tl.maximum(tl.minimum(full_high, high) - start, 0) // TILE
    start = tl.where(full > 0, start, low)
    before = (start - low) // TILE
    return start, full, before, before + tl.cdiv(tl.maximum(high - (start + full * TILE), 0), TILE)


@triton.jit
def masked_start(i, low, start, full, before, TILE: tl.constexpr):
    return tl.where(i < before, low + i * TILE, start + (full + i - before) * TILE)
