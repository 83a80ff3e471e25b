"""Gated activations in one pass over memory: one launch forward, one backward, which saves the two inputs alone.

Moves 3 numbers per number of the output forward and 5 backward; arithmetic in float32, rounded once.
"""

import functools
import math

import jax

from moejax_kernels.triton_launch import launch  # isort: skip (before triton)
import triton
import triton.language as tl

TILE = 1024
"""Numbers of one program: 16 bytes of bfloat16 for each of 128 threads."""


@triton.jit
def _tanh(x):
    size = tl.abs(x)
    power = tl.exp(-2 * size)
    large = (1 - power) / (1 + power)
    square = x * x  # near 0 the quotient loses digits; the series up to x**9 is off by 1e-8 of tanh(x) at 0.25
    small = 1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    return tl.where(size < 0.25, x * small, tl.where(x < 0, -large, large))


@triton.jit
def _halves(gate, up, KIND: tl.constexpr, LIMIT: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """The two factors of the output, and the derivative of each."""
    if KIND == "situ":
        bent, sigmoid = _tanh(gate / BETA), tl.sigmoid(gate)
        left = BETA * bent * sigmoid
        dleft = (1 - bent * bent) * sigmoid + left * (1 - sigmoid)
        right, dright = up, tl.full(up.shape, 1.0, tl.float32)
        if LINEAR_BETA > 0:
            bent_up = _tanh(up / LINEAR_BETA)
            right, dright = LINEAR_BETA * bent_up, 1 - bent_up * bent_up
    else:
        dgate, dright = tl.full(gate.shape, 1.0, tl.float32), tl.full(up.shape, 1.0, tl.float32)
        if KIND == "swiglu_clamped":  # at the limit itself half of the gradient passes, as through jnp.minimum and jnp.clip
            dgate = tl.where(gate < LIMIT, 1.0, tl.where(gate == LIMIT, 0.5, 0.0))
            dright = tl.where(tl.abs(up) < LIMIT, 1.0, tl.where(tl.abs(up) == LIMIT, 0.5, 0.0))
            gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        sigmoid = tl.sigmoid(gate)
        left, right = gate * sigmoid, up
        dleft = dgate * sigmoid * (1 + gate * (1 - sigmoid))
    return left, right, dleft, dright


@triton.jit
def _forward(
    gate_ptr,
    up_ptr,
    out_ptr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < SIZE
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    left, right, _, _ = _halves(gate, up, KIND, LIMIT, BETA, LINEAR_BETA)
    tl.store(out_ptr + at, (left * right).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    gate_ptr,
    up_ptr,
    dout_ptr,
    dgate_ptr,
    dup_ptr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < SIZE
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + at, mask=inside, other=0.0).to(tl.float32)
    left, right, dleft, dright = _halves(gate, up, KIND, LIMIT, BETA, LINEAR_BETA)
    tl.store(dgate_ptr + at, (dout * right * dleft).to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + at, (dout * left * dright).to(dup_ptr.dtype.element_ty), mask=inside)


def _launch(kernel, options, *arrays, num_outputs: int):
    kind, limit, beta, linear_beta = options
    like = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
    size = math.prod(like.shape)
    return launch(
        kernel,
        *arrays,
        out_type=[like] * num_outputs,
        grid=triton.cdiv(size, TILE),
        SIZE=size,
        TILE=TILE,
        KIND=kind,
        LIMIT=float(limit or 0),
        BETA=float(beta or 0),
        LINEAR_BETA=float(linear_beta or 0),
    )


def gated_activation(gate_RF, up_RF, *, kind, limit, beta, linear_beta):
    if gate_RF.size == 0:
        return gate_RF
    return _activate(gate_RF, up_RF, (kind, limit, beta, linear_beta))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _activate(gate_RF, up_RF, options):
    return _launch(_forward, options, gate_RF, up_RF, num_outputs=1)[0]


def _save(gate_RF, up_RF, options):
    return _activate(gate_RF, up_RF, options), (gate_RF, up_RF)


def _grads(options, saved, dout_RF):
    return tuple(_launch(_backward, options, *saved, dout_RF, num_outputs=2))


_activate.defvjp(_save, _grads)
