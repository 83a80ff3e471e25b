"""Logits and what a loss makes of them in one launch: a tile of logits lives in registers alone.

A program multiplies BM tokens with BN columns over all of D. For sums it writes three numbers a token (tokens * columns / BN * 12 bytes in
all, which XLA reduces), for gradients a tile in the inputs' dtype. Programs that follow each other share tokens and columns in the L2 cache.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax_kernels.triton_launch import launch  # isort: skip (before triton)
import triton
import triton.language as tl

from moejax_kernels.gated_activation.triton_gpu import _tanh
from moejax_kernels.logits.reference import LogitSums

TILES_TOGETHER = 8
"""Tiles of tokens that are multiplied with one tile of columns before the next."""


class Tiling(NamedTuple):
    """Sizes of a program's tile and how it works on it."""

    tokens: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


@triton.jit
def _place(T: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TOGETHER: tl.constexpr):
    """This program's tile of tokens and tile of columns."""
    num_rows: tl.constexpr = (T + BM - 1) // BM
    num_columns: tl.constexpr = (V + BN - 1) // BN
    first = tl.program_id(0) // (TOGETHER * num_columns) * TOGETHER
    place = tl.program_id(0) % (TOGETHER * num_columns)
    height = tl.minimum(num_rows - first, TOGETHER)
    return first + place % height, place // height


@triton.jit
def _logits(
    hidden_ptr,
    weight_ptr,
    token,
    column,
    T: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Tokens and columns that are not there repeat the last one."""
    channel = tl.arange(0, BK)
    hidden_ptrs = hidden_ptr + tl.minimum(token, T - 1).to(tl.int64)[:, None] * D + channel[None, :]
    weight_ptrs = weight_ptr + channel.to(tl.int64)[:, None] * V + tl.minimum(column, V - 1)[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, D, BK):
        if D % BK == 0:
            hidden, weight = tl.load(hidden_ptrs), tl.load(weight_ptrs)
        else:
            hidden = tl.load(hidden_ptrs, mask=(start + channel < D)[None, :], other=0.0)
            weight = tl.load(weight_ptrs, mask=(start + channel < D)[:, None], other=0.0)
        total = tl.dot(hidden, weight, total, input_precision=PRECISION)
        hidden_ptrs += BK
        weight_ptrs += BK * V
    if CAP > 0:
        total = CAP * _tanh(total / CAP)
    return total


@triton.jit
def _sums(
    hidden_ptr,
    weight_ptr,
    targets_ptr,
    skip_ptr,
    parts_ptr,
    T: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TOGETHER: tl.constexpr,
    CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """parts = [3, tiles of columns, T]: peak, total and target's logit of each tile."""
    num_columns: tl.constexpr = (V + BN - 1) // BN
    tile, piece = _place(T, V, BM, BN, TOGETHER)
    token, column = tile * BM + tl.arange(0, BM), piece * BN + tl.arange(0, BN)
    logits = _logits(hidden_ptr, weight_ptr, token, column, T, V, D, BM, BN, BK, CAP, PRECISION)
    counts = (column < V) & (column >= tl.load(skip_ptr))
    peak = tl.max(tl.where(counts[None, :], logits, float("-inf")), axis=1)
    finite = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.where(counts[None, :], tl.exp(logits - finite[:, None]), 0.0), axis=1)
    wanted = tl.load(targets_ptr + token, mask=token < T, other=-1)
    target = tl.sum(tl.where(counts[None, :] & (column[None, :] == wanted[:, None]), logits, 0.0), axis=1)
    at = parts_ptr + piece.to(tl.int64) * T + token
    tl.store(at, peak, mask=token < T)
    tl.store(at + num_columns * T, total, mask=token < T)
    tl.store(at + 2 * num_columns * T, target, mask=token < T)


@triton.jit
def _gradients(
    hidden_ptr,
    weight_ptr,
    targets_ptr,
    lse_ptr,
    slope_ptr,
    weights_ptr,
    skip_ptr,
    dlogits_ptr,
    T: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TOGETHER: tl.constexpr,
    CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, piece = _place(T, V, BM, BN, TOGETHER)
    token, column = tile * BM + tl.arange(0, BM), piece * BN + tl.arange(0, BN)
    logits = _logits(hidden_ptr, weight_ptr, token, column, T, V, D, BM, BN, BK, CAP, PRECISION)
    is_token = token < T
    lse = tl.load(lse_ptr + token, mask=is_token, other=0.0)
    slope = tl.load(slope_ptr + token, mask=is_token, other=0.0)
    weight = tl.load(weights_ptr + token, mask=is_token, other=0.0)
    wanted = tl.load(targets_ptr + token, mask=is_token, other=-1)
    dlogits = slope[:, None] * tl.exp(logits - lse[:, None])
    dlogits -= tl.where(column[None, :] == wanted[:, None], weight[:, None], 0.0)
    if CAP > 0:
        dlogits *= 1 - (logits / CAP) * (logits / CAP)
    dlogits = tl.where((column >= tl.load(skip_ptr))[None, :], dlogits, 0.0)
    at = token.to(tl.int64)[:, None] * V + column[None, :]
    tl.store(dlogits_ptr + at, dlogits.to(dlogits_ptr.dtype.element_ty), mask=is_token[:, None] & (column < V)[None, :])


def logit_sums(hidden_TD, weight_DV, targets_T, skip, *, logit_cap):
    num_tokens, columns = targets_T.size, weight_DV.shape[1]
    pieces = triton.cdiv(columns, _tiling(hidden_TD.dtype, hidden_TD.shape[-1]).columns)
    like = jax.ShapeDtypeStruct((3, pieces, num_tokens), jnp.float32)
    peaks_PT, totals_PT, targets_PT = _launch(_sums, hidden_TD, weight_DV, like, (targets_T.astype(jnp.int32),), skip, logit_cap)
    peak_T = peaks_PT.max(0)
    finite_T = jnp.maximum(peak_T, jnp.finfo(jnp.float32).min)
    sums = LogitSums(peak_T, jnp.sum(totals_PT * jnp.exp(peaks_PT - finite_T), 0), targets_PT.sum(0))
    return jax.tree.map(lambda array_T: array_T.reshape(targets_T.shape), sums)


def logit_gradients(hidden_TD, weight_DV, targets_T, lse_T, slope_T, weights_T, skip, *, logit_cap):
    like = jax.ShapeDtypeStruct((targets_T.size, weight_DV.shape[1]), hidden_TD.dtype)
    of_tokens = (targets_T.astype(jnp.int32), *(array_T.astype(jnp.float32) for array_T in (lse_T, slope_T, weights_T)))
    return _launch(_gradients, hidden_TD, weight_DV, like, of_tokens, skip, logit_cap).reshape(*targets_T.shape, -1)


def _launch(kernel, hidden_TD, weight_DV, like, of_tokens, skip, logit_cap):
    width, columns = weight_DV.shape
    num_tokens, tiling = of_tokens[0].size, _tiling(hidden_TD.dtype, width)
    (out,) = launch(
        kernel,
        hidden_TD.reshape(num_tokens, width),
        weight_DV,
        *(array_T.reshape(num_tokens) for array_T in of_tokens),
        jnp.asarray(0 if skip is None else skip, jnp.int32).reshape(1),
        out_type=[like],
        grid=triton.cdiv(num_tokens, tiling.tokens) * triton.cdiv(columns, tiling.columns),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        T=num_tokens,
        V=columns,
        D=width,
        BM=tiling.tokens,
        BN=tiling.columns,
        BK=tiling.depth,
        TOGETHER=TILES_TOGETHER,
        CAP=float(logit_cap),
        PRECISION="ieee" if hidden_TD.dtype == jnp.float32 else "tf32",  # of float32 alone; bfloat16 has but one
    )
    return out


def _tiling(dtype, width: int) -> Tiling:
    if dtype == jnp.float32:
        return Tiling(64, 64, 32, num_warps=4, num_stages=2)
    if width % 64:  # the masks of a ragged depth take registers, and a B200 has none left
        return Tiling(64, 128, 64, num_warps=8, num_stages=3)
    return Tiling(128, 128, 64, num_warps=8, num_stages=3)
