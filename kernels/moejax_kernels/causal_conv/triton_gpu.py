"""The short convolution on GPUs: one launch forward; one backward, and one reduction of the weight's partial gradients.

A program owns some channels of a stretch of tokens and walks along it four tokens at a time, the last three inputs in registers:
x is read once and y written once. Backward walks the same way with the gradients of the last three sums in registers too: it reads
x and dy and writes dx, all once (and 3 tokens of x and dy more per stretch). The weight's gradient is summed per stretch, in
registers, then over stretches: no atomics. Saved for backward: the inputs. In a tree copies of the three inputs before a segment are put
in front of it, and the kernels run over that longer row.
"""

# pyright: reportArgumentType=false
# Triton takes literals where a parameter is `tl.constexpr`.

import functools

import jax
import jax.numpy as jnp
import numpy as np

from moejax_kernels.causal_conv import xla
from moejax_kernels.causal_conv.reference import TAPS

from moejax_kernels.triton_launch import launch  # isort: skip (before triton)
import triton
import triton.language as tl

STRETCH = 64
"""Tokens of one program."""
MAX_CHANNELS = 256
"""Channels of one program: 4 bytes of bfloat16 for each of 128 threads; with twice as many, backward needs too many registers."""


@triton.jit
def _reach(ids_ptr, starts_ptr, row, t, L: tl.constexpr, PACKED: tl.constexpr):
    """How many tokens to the left belong to token t's document: 3 at most matter; what lies left of the row belongs to the first
    document; -1: t is padding or beyond the row."""
    inside = t < L
    if PACKED:
        at = row * L + t
        start = tl.load(starts_ptr + at, mask=inside, other=0)
        real = tl.load(ids_ptr + at, mask=inside, other=-1) >= 0
        return tl.where(real, tl.where(start == 0, 3, t - start), -1)
    return tl.where(inside, 3, -1)


@triton.jit
def _input(x_ptr, history_ptr, row, t, d, L: tl.constexpr, D: tl.constexpr, HAS_HISTORY: tl.constexpr):
    """x at token t, float32; left of the row: history."""
    x = tl.load(x_ptr + (row * L + t) * D + d, mask=d < tl.where((t >= 0) & (t < L), D, 0), other=0.0).to(tl.float32)
    if HAS_HISTORY:
        x += tl.load(history_ptr + (row * 3 + t + 3) * D + d, mask=d < tl.where(t < 0, D, 0), other=0.0).to(tl.float32)
    return x


@triton.jit
def _three_before(x_ptr, history_ptr, row, t, d, L: tl.constexpr, D: tl.constexpr, HAS_HISTORY: tl.constexpr):
    a = _input(x_ptr, history_ptr, row, t - 3, d, L, D, HAS_HISTORY)
    b = _input(x_ptr, history_ptr, row, t - 2, d, L, D, HAS_HISTORY)
    return a, b, _input(x_ptr, history_ptr, row, t - 1, d, L, D, HAS_HISTORY)


@triton.jit
def _four_from(x_ptr, row, t, d, L: tl.constexpr, D: tl.constexpr):
    """Rows t to t + 3 of an array [B, L, D]: four loads under way before the first is needed."""
    e = _input(x_ptr, x_ptr, row, t, d, L, D, False)
    f = _input(x_ptr, x_ptr, row, t + 1, d, L, D, False)
    g = _input(x_ptr, x_ptr, row, t + 2, d, L, D, False)
    return e, f, g, _input(x_ptr, x_ptr, row, t + 3, d, L, D, False)


@triton.jit
def _four_reaches(ids_ptr, starts_ptr, row, t, L: tl.constexpr, PACKED: tl.constexpr):
    e = _reach(ids_ptr, starts_ptr, row, t, L, PACKED)
    f = _reach(ids_ptr, starts_ptr, row, t + 1, L, PACKED)
    g = _reach(ids_ptr, starts_ptr, row, t + 2, L, PACKED)
    return e, f, g, _reach(ids_ptr, starts_ptr, row, t + 3, L, PACKED)


@triton.jit
def _taps(weight_ptr, d, D: tl.constexpr):
    """Weight of the token itself, then of the first, second and third before it."""
    w0 = tl.load(weight_ptr + d * 4 + 3, mask=d < D, other=0.0).to(tl.float32)
    w1 = tl.load(weight_ptr + d * 4 + 2, mask=d < D, other=0.0).to(tl.float32)
    w2 = tl.load(weight_ptr + d * 4 + 1, mask=d < D, other=0.0).to(tl.float32)
    return w0, w1, w2, tl.load(weight_ptr + d * 4, mask=d < D, other=0.0).to(tl.float32)


@triton.jit
def _mix(w, x0, x1, x2, x3, reach1, reach2, reach3):
    """w0 x0 + w1 x1 + w2 x2 + w3 x3, of which the n-th only if what lies n tokens apart is of one document."""
    x1, x2, x3 = tl.where(reach1 >= 1, x1, 0.0), tl.where(reach2 >= 2, x2, 0.0), tl.where(reach3 >= 3, x3, 0.0)
    return w[0] * x0 + w[1] * x1 + w[2] * x2 + w[3] * x3


@triton.jit
def _put_y(y_ptr, total, reach, row, t, d, L: tl.constexpr, D: tl.constexpr, SILU: tl.constexpr):
    y = total
    if SILU:
        y = total * tl.sigmoid(total)
    y = tl.where(reach >= 0, y, 0.0)
    tl.store(y_ptr + (row * L + t) * D + d, y.to(y_ptr.dtype.element_ty), mask=d < tl.where(t < L, D, 0))


@triton.jit
def _place(L: tl.constexpr, STRETCH: tl.constexpr, CHANNELS: tl.constexpr):
    """Row, first token and channels of this program."""
    stretches: tl.constexpr = (L + STRETCH - 1) // STRETCH
    row = (tl.program_id(0) // stretches).to(tl.int64)
    return row, tl.program_id(0) % stretches * STRETCH, tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)


@triton.jit
def _forward(
    x_ptr,
    weight_ptr,
    history_ptr,
    ids_ptr,
    starts_ptr,
    y_ptr,
    L: tl.constexpr,
    D: tl.constexpr,
    STRETCH: tl.constexpr,
    CHANNELS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    SILU: tl.constexpr,
):
    row, first, d = _place(L, STRETCH, CHANNELS)
    w = _taps(weight_ptr, d, D)
    a, b, c = _three_before(x_ptr, history_ptr, row, first, d, L, D, HAS_HISTORY)
    for step in range(STRETCH // 4):
        t = first + 4 * step
        e, f, g, h = _four_from(x_ptr, row, t, d, L, D)
        re, rf, rg, rh = _four_reaches(ids_ptr, starts_ptr, row, t, L, PACKED)
        _put_y(y_ptr, _mix(w, e, c, b, a, re, re, re), re, row, t, d, L, D, SILU)
        _put_y(y_ptr, _mix(w, f, e, c, b, rf, rf, rf), rf, row, t + 1, d, L, D, SILU)
        _put_y(y_ptr, _mix(w, g, f, e, c, rg, rg, rg), rg, row, t + 2, d, L, D, SILU)
        _put_y(y_ptr, _mix(w, h, g, f, e, rh, rh, rh), rh, row, t + 3, d, L, D, SILU)
        a, b, c = f, g, h


@triton.jit
def _dsum(dy, w, x0, x1, x2, x3, reach, SILU: tl.constexpr):
    """Gradient of a token's sum; 0 for padding and beyond the row."""
    if SILU:
        total = _mix(w, x0, x1, x2, x3, reach, reach, reach)
        sigmoid = tl.sigmoid(total)
        dy *= sigmoid * (1 + total * (1 - sigmoid))
    return tl.where(reach >= 0, dy, 0.0)


@triton.jit
def _add_dw(dw, p, x0, x1, x2, x3, reach, mine):
    """The weight's gradient with that of one token, if it is this program's and not the next one's."""
    p = tl.where(mine, p, 0.0)
    one = dw[1] + tl.where(reach >= 1, p * x1, 0.0)
    two = dw[2] + tl.where(reach >= 2, p * x2, 0.0)
    return dw[0] + p * x0, one, two, dw[3] + tl.where(reach >= 3, p * x3, 0.0)


@triton.jit
def _put_dx(dx_ptr, dhistory_ptr, dx, row, t, d, mine, L: tl.constexpr, D: tl.constexpr, HAS_HISTORY: tl.constexpr):
    tl.store(dx_ptr + (row * L + t) * D + d, dx.to(dx_ptr.dtype.element_ty), mask=d < tl.where(mine & (t < L), D, 0))
    if HAS_HISTORY:
        tl.store(dhistory_ptr + (row * 3 + t + 3) * D + d, dx.to(dhistory_ptr.dtype.element_ty), mask=d < tl.where(t < 0, D, 0))


@triton.jit
def _backward(
    x_ptr,
    weight_ptr,
    history_ptr,
    ids_ptr,
    starts_ptr,
    dy_ptr,
    dx_ptr,
    dweight_ptr,
    dhistory_ptr,
    L: tl.constexpr,
    D: tl.constexpr,
    STRETCH: tl.constexpr,
    CHANNELS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    SILU: tl.constexpr,
):
    row, first, d = _place(L, STRETCH, CHANNELS)
    end = first + STRETCH
    w = _taps(weight_ptr, d, D)
    a, b, c = _three_before(x_ptr, history_ptr, row, first, d, L, D, HAS_HISTORY)
    zero = tl.zeros([CHANNELS], tl.float32)
    dw = (zero, zero, zero, zero)
    pa, pb, pc = zero, zero, zero  # gradients of the sums of the three tokens before: their inputs belong to the program before
    rb, rc = tl.full([], -1, tl.int32), tl.full([], -1, tl.int32)
    for step in range(STRETCH // 4 + 1):  # dx lags three tokens behind
        t = first + 4 * step
        e, f, g, h = _four_from(x_ptr, row, t, d, L, D)
        dye, dyf, dyg, dyh = _four_from(dy_ptr, row, t, d, L, D)
        re, rf, rg, rh = _four_reaches(ids_ptr, starts_ptr, row, t, L, PACKED)
        pe, pf = _dsum(dye, w, e, c, b, a, re, SILU), _dsum(dyf, w, f, e, c, b, rf, SILU)
        pg, ph = _dsum(dyg, w, g, f, e, c, rg, SILU), _dsum(dyh, w, h, g, f, e, rh, SILU)
        dw = _add_dw(_add_dw(dw, pe, e, c, b, a, re, t < end), pf, f, e, c, b, rf, t < end)
        dw = _add_dw(_add_dw(dw, pg, g, f, e, c, rg, t < end), ph, h, g, f, e, rh, t < end)
        before = (t > first) & (t <= end)
        _put_dx(dx_ptr, dhistory_ptr, _mix(w, pa, pb, pc, pe, rb, rc, re), row, t - 3, d, before, L, D, HAS_HISTORY)
        _put_dx(dx_ptr, dhistory_ptr, _mix(w, pb, pc, pe, pf, rc, re, rf), row, t - 2, d, before, L, D, HAS_HISTORY)
        _put_dx(dx_ptr, dhistory_ptr, _mix(w, pc, pe, pf, pg, re, rf, rg), row, t - 1, d, before, L, D, HAS_HISTORY)
        _put_dx(dx_ptr, dhistory_ptr, _mix(w, pe, pf, pg, ph, rf, rg, rh), row, t, d, t < end, L, D, HAS_HISTORY)
        a, b, c, pa, pb, pc, rb, rc = f, g, h, pf, pg, ph, rg, rh
    at = tl.program_id(0).to(tl.int64) * 4 * D + d
    tl.store(dweight_ptr + at, dw[3], mask=d < D)
    tl.store(dweight_ptr + at + D, dw[2], mask=d < D)
    tl.store(dweight_ptr + at + 2 * D, dw[1], mask=d < D)
    tl.store(dweight_ptr + at + 3 * D, dw[0], mask=d < D)


def causal_conv(x_BLD, weight_D4, *, segments=None, history_B3D=None, activation="silu"):
    """As `reference.causal_conv`."""
    history_B3D = None if history_B3D is None else history_B3D.astype(x_BLD.dtype)
    if segments is not None and segments.index_BL is not None:
        y_BLD = _over_trees(x_BLD, weight_D4, history_B3D, segments, activation)
    else:
        borders = None if segments is None else (jnp.asarray(segments.ids_BL), jnp.asarray(segments.starts_BL))
        y_BLD = _convolve(x_BLD, weight_D4, history_B3D, borders, activation)
    return y_BLD, xla.history_after(x_BLD, history_B3D, segments)


def _over_trees(x_BLD, weight_D4, history_B3D, segments, activation):
    """Outputs of a tree: in a row of L + 3 U tokens segments are documents that bring the inputs before them along."""
    (B, L, D), row_B1, back = x_BLD.shape, np.arange(x_BLD.shape[0])[:, None], TAPS - 1
    index_BL, first_BU, ids_BL = (jnp.asarray(x) for x in (segments.index_BL, segments.first_BU, segments.ids_BL))
    U = first_BU.shape[1]
    start_BU = first_BU + back * jnp.arange(U, dtype=jnp.int32)
    place_BL = jnp.arange(L, dtype=jnp.int32) + back * (index_BL + 1)
    front_BN = jnp.concatenate([start_BU + back - 1 - n for n in range(back)], axis=1)

    def lay_out(of_tokens, of_fronts):
        longer = jnp.zeros((B, L + back * U, *of_tokens.shape[2:]), of_tokens.dtype)
        longer = longer.at[row_B1, place_BL].set(of_tokens, unique_indices=True)
        return longer.at[row_B1, front_BN].set(of_fronts, unique_indices=True)

    history_B3D = jnp.zeros((B, back, D), x_BLD.dtype) if history_B3D is None else history_B3D
    before = xla.inputs_before(jnp.concatenate([history_B3D, x_BLD], axis=1), segments)
    id_BU = jnp.where(first_BU < L, ids_BL[row_B1, jnp.minimum(first_BU, L - 1)], -1)
    borders = lay_out(ids_BL, jnp.tile(id_BU, back)), lay_out(start_BU[row_B1, index_BL], jnp.tile(start_BU, back))
    y_BPD = _convolve(lay_out(x_BLD, jnp.concatenate(before, axis=1)), weight_D4, None, borders, activation)
    return y_BPD[row_B1, place_BL]


def _launch(kernel, x_BLD, weight_D4, history_B3D, borders, activation, *more, out_type):
    B, L, D = x_BLD.shape
    channels = min(MAX_CHANNELS, max(32, triton.next_power_of_2(D)))
    ids_BL, starts_BL = (x_BLD, x_BLD) if borders is None else borders  # not read where there are none
    return launch(
        kernel,
        x_BLD,
        weight_D4,
        x_BLD if history_B3D is None else history_B3D,
        ids_BL,
        starts_BL,
        *more,
        out_type=out_type,
        grid=(B * triton.cdiv(L, STRETCH), triton.cdiv(D, channels)),
        L=L,
        D=D,
        STRETCH=STRETCH,
        CHANNELS=channels,
        PACKED=borders is not None,
        HAS_HISTORY=history_B3D is not None,
        SILU=activation == "silu",
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _convolve(x_BLD, weight_D4, history_B3D, borders, activation):
    return _launch(_forward, x_BLD, weight_D4, history_B3D, borders, activation, out_type=[x_BLD])[0]


def _save(x_BLD, weight_D4, history_B3D, borders, activation):
    return _convolve(x_BLD, weight_D4, history_B3D, borders, activation), (x_BLD, weight_D4, history_B3D, borders)


def _grads(activation, saved, dy_BLD):
    x_BLD, weight_D4, history_B3D, _ = saved
    B, L, D = x_BLD.shape
    partial_N4D = jax.ShapeDtypeStruct((B * triton.cdiv(L, STRETCH), TAPS, D), jnp.float32)
    dhistory_B3D = jax.ShapeDtypeStruct((B, TAPS - 1, D), x_BLD.dtype)
    dx_BLD, partial_N4D, dhistory_B3D = _launch(_backward, *saved, activation, dy_BLD, out_type=[x_BLD, partial_N4D, dhistory_B3D])
    dweight_D4 = partial_N4D.sum(axis=0).T.astype(weight_D4.dtype)
    return dx_BLD, dweight_D4, None if history_B3D is None else dhistory_B3D, None


_convolve.defvjp(_save, _grads)
