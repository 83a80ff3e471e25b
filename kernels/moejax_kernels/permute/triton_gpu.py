"""The way to the routed rows and back on the GPU: one launch each, and one for each gradient.

Every pass reads each routed row once and writes each result once (the way there reads a token once for each of its copies). Sums over
a token's rows stay in registers, and no pass needs atomics: a routed row belongs to one token at most.
Saved for backward: the plan, and for unpermute its own inputs.
"""

import jax
import jax.numpy as jnp

from moejax_kernels import triton_launch  # isort: skip  (before triton: it points triton at the right assembler)

import triton
import triton.language as tl

from moejax_kernels.permute.plan import RowPlan

GATHER_TILE = 4096
"""Elements of one program of the gather: 32 in each of 128 threads, four 16-byte loads in flight for bfloat16."""
SUM_CHANNELS = 1024
"""Channels of one program of the sum: 8 in each of 128 threads, one 16-byte load for every choice."""
GRAD_CHANNELS = 256
"""Channels that a token's program of the gradient takes at once, for all choices: a warp holds 256 bfloat16 channels of a row."""


@triton.jit
def _gather(x_ptr, source_ptr, num_rows, out_ptr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """out[r] = x[source[r]], 0 where the source is -1."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    channel = tl.program_id(1) * BD + tl.arange(0, BD)
    source = tl.load(source_ptr + row, mask=row < num_rows, other=-1).to(tl.int64)
    inside = channel[None, :] < D
    x = tl.load(x_ptr + source[:, None] * D + channel[None, :], mask=(source >= 0)[:, None] & inside, other=0.0)
    tl.store(out_ptr + row[:, None] * D + channel[None, :], x, mask=(row < num_rows)[:, None] & inside)


@triton.jit
def _sum(y_ptr, slot_ptr, probs_ptr, out_ptr, D: tl.constexpr, K: tl.constexpr, BD: tl.constexpr, WEIGHTED: tl.constexpr):
    """out[t] = sum over k of probs[t, k] * y[slot[t, k]]; without weights each is 1."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros((BD,), tl.float32)
    for k in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
        slot = tl.load(slot_ptr + token * K + k).to(tl.int64)
        y = tl.load(y_ptr + slot * D + channel, mask=channel < tl.where(slot >= 0, D, 0), other=0.0).to(tl.float32)
        if WEIGHTED:
            y *= tl.where(slot >= 0, tl.load(probs_ptr + token * K + k).to(tl.float32), 0.0)
        total += y
    tl.store(out_ptr + token * D + channel, total.to(out_ptr.dtype.element_ty), mask=channel < D)


@triton.jit
def _token_grads(
    dout_ptr, y_ptr, slot_ptr, probs_ptr, dy_ptr, dprobs_ptr, token, D: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BD: tl.constexpr
):
    """A token's rows get its gradient times their weight, its weights the product of its gradient with their rows."""
    k = tl.arange(0, KP)
    slot = tl.load(slot_ptr + token * K + k, mask=k < K, other=-1).to(tl.int64)
    kept = slot >= 0
    prob = tl.load(probs_ptr + token * K + k, mask=kept, other=0.0).to(tl.float32)
    products = tl.zeros((KP, BD), tl.float32)
    for start in range(0, D, BD):
        channel = start + tl.arange(0, BD)
        mask = kept[:, None] & (channel[None, :] < D)
        at = slot[:, None] * D + channel[None, :]
        dout = tl.load(dout_ptr + token * D + channel, mask=channel < D, other=0.0).to(tl.float32)[None, :]
        products += tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32) * dout
        tl.store(dy_ptr + at, (prob[:, None] * dout).to(dy_ptr.dtype.element_ty), mask=mask)
    tl.store(dprobs_ptr + token * K + k, tl.sum(products, axis=1).to(dprobs_ptr.dtype.element_ty), mask=k < K)


@triton.jit
def _clear_empty(source_ptr, dy_ptr, first, num_rows, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Rows that no token fills get 0."""
    row = first + tl.arange(0, BR)
    empty = (row < num_rows) & (tl.load(source_ptr + row, mask=row < num_rows, other=0) < 0)
    if tl.max(empty.to(tl.int32), axis=0) > 0:  # pyright: ignore[reportOperatorIssue]
        for start in range(0, D, BD):
            channel = start + tl.arange(0, BD)
            zero = tl.zeros((BR, BD), dy_ptr.dtype.element_ty)
            tl.store(dy_ptr + row[:, None] * D + channel[None, :], zero, mask=empty[:, None] & (channel[None, :] < D))


@triton.jit
def _unpermute_grads(
    dout_ptr,
    y_ptr,
    slot_ptr,
    probs_ptr,
    source_ptr,
    num_tokens,
    num_rows,
    dy_ptr,
    dprobs_ptr,
    D: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    """The first programs have a token each; those after them clear BR rows each where they are empty."""
    program = tl.program_id(0).to(tl.int64)
    if program < num_tokens:
        _token_grads(dout_ptr, y_ptr, slot_ptr, probs_ptr, dy_ptr, dprobs_ptr, program, D, K, KP, BD)
    else:
        _clear_empty(source_ptr, dy_ptr, (program - num_tokens) * BR, num_rows, D, BR, BD)


@jax.custom_vjp
def permute(x_TD, plan: RowPlan):
    num_rows, width = plan.source_R.shape[0], x_TD.shape[1]
    out = jax.ShapeDtypeStruct((num_rows, width), x_TD.dtype)
    if 0 in (x_TD.size, num_rows):
        return jnp.zeros(out.shape, out.dtype)
    channels = min(512, triton.next_power_of_2(width))
    rows = min(GATHER_TILE // channels, triton.next_power_of_2(num_rows))
    grid = triton.cdiv(num_rows, rows), triton.cdiv(width, channels)
    return triton_launch.launch(_gather, x_TD, plan.source_R, num_rows, out_type=[out], grid=grid, D=width, BR=rows, BD=channels)[0]


def _permute_save(x_TD, plan):
    return permute(x_TD, plan), plan


def _permute_grads(plan, dx_RD):
    return _summed(dx_RD, plan, None), None


permute.defvjp(_permute_save, _permute_grads)


@jax.custom_vjp
def unpermute(y_RD, plan: RowPlan, probs_TK):
    return _summed(y_RD, plan, probs_TK)


def _unpermute_save(y_RD, plan, probs_TK):
    return unpermute(y_RD, plan, probs_TK), (y_RD, plan, probs_TK)


def _unpermute_grads_of(saved, dout_TD):
    y_RD, plan, probs_TK = saved
    (num_rows, width), (num_tokens, choices) = y_RD.shape, plan.slot_TK.shape
    if 0 in (dout_TD.size, choices, num_rows):
        return jnp.zeros_like(y_RD), None, jnp.zeros_like(probs_TK)
    rows = 8
    dy_RD, dprobs_TK = triton_launch.launch(
        _unpermute_grads,
        *(dout_TD, y_RD, plan.slot_TK, probs_TK, plan.source_R, num_tokens, num_rows),
        out_type=[y_RD, probs_TK],
        grid=num_tokens + triton.cdiv(num_rows, rows),
        D=width,
        K=choices,
        KP=triton.next_power_of_2(choices),
        BR=rows,
        BD=min(GRAD_CHANNELS, triton.next_power_of_2(width)),
    )
    return dy_RD, None, dprobs_TK


unpermute.defvjp(_unpermute_save, _unpermute_grads_of)


def _summed(y_RD, plan: RowPlan, probs_TK):
    num_tokens, choices = plan.slot_TK.shape
    out = jax.ShapeDtypeStruct((num_tokens, y_RD.shape[1]), y_RD.dtype)
    if 0 in (*out.shape, choices, y_RD.shape[0]):
        return jnp.zeros(out.shape, out.dtype)
    channels = min(SUM_CHANNELS, triton.next_power_of_2(y_RD.shape[1]))
    return triton_launch.launch(
        _sum,
        *(y_RD, plan.slot_TK, plan.slot_TK if probs_TK is None else probs_TK),  # without weights their pointer is never followed
        out_type=[out],
        grid=(num_tokens, triton.cdiv(y_RD.shape[1], channels)),
        D=y_RD.shape[1],
        K=choices,
        BD=channels,
        WEIGHTED=probs_TK is not None,
    )[0]
