"""The grouped MLP in one loop over blocks of rows each way: what lies between its matmuls exists for a turn's blocks at a time.

Kept for backward: the inputs and the results of the gate and up projections; the activation is redone.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax_kernels.gated_activation import reference
from moejax_kernels.row_blocks import over_blocks, transposed
from moejax_kernels.saved import EXPERT_HIDDEN
from moejax_kernels.varying import vary_alike


def grouped_mlp(x_RD, gate_EDF, up_EDF, down_EFD, group_sizes_E, **activation):
    if 0 in (*x_RD.shape, *gate_EDF.shape):
        return jnp.zeros_like(x_RD)
    arrays = vary_alike(x_RD, gate_EDF, up_EDF, down_EFD, group_sizes_E.astype(jnp.int32))
    return _mlp(tuple(activation.items()), *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(activation, x_RD, gate_EDF, up_EDF, down_EFD, group_sizes_E):
    return _save(activation, x_RD, gate_EDF, up_EDF, down_EFD, group_sizes_E)[0]


def _save(activation, x_RD, gate_EDF, up_EDF, down_EFD, group_sizes_E):
    num_rows, hidden, dtype = x_RD.shape[0], down_EFD.shape[1], x_RD.dtype

    def body(turn, results):
        x_NbD = turn.rows(x_RD)
        gate_NbF, up_NbF = (_dot(x_NbD, turn.weights(w_EDF, dtype)).astype(dtype) for w_EDF in (gate_EDF, up_EDF))
        h_NbF = reference.gated_activation(gate_NbF, up_NbF, **dict(activation))
        y_NbD = _dot(h_NbF, turn.weights(down_EFD, dtype)).astype(dtype)
        return tuple(turn.put(whole, part) for whole, part in zip(results, (y_NbD, gate_NbF, up_NbF), strict=True))

    nothing = vary_alike(tuple(jnp.zeros_like(x_RD, shape=(num_rows, width)) for width in (x_RD.shape[1], hidden, hidden)), x_RD)[0]
    y_RD, gate_RF, up_RF = over_blocks(body, nothing, group_sizes_E, num_rows)
    gate_RF, up_RF = checkpoint_name((gate_RF, up_RF), EXPERT_HIDDEN)
    return y_RD, (x_RD, gate_EDF, up_EDF, down_EFD, group_sizes_E, gate_RF, up_RF)


def _grads(activation, saved, dy_RD):
    x_RD, gate_EDF, up_EDF, down_EFD, group_sizes_E, gate_RF, up_RF = saved
    dtype = x_RD.dtype

    def body(turn, sums):
        dx_RD, dgate_EDF, dup_EDF, ddown_EFD = sums
        dy_NbD = turn.own_rows(dy_RD)
        activate = functools.partial(reference.gated_activation, **dict(activation))
        h_NbF, pull = jax.vjp(activate, turn.own_rows(gate_RF), turn.own_rows(up_RF))
        ddown_NFD = _dot(transposed(h_NbF), dy_NbD)
        dgate_NbF, dup_NbF = pull(_dot_turned(dy_NbD, turn.weights(down_EFD, dtype)).astype(dtype))
        x_NDb = transposed(turn.own_rows(x_RD))
        dx_NbD = _dot_turned(dgate_NbF, turn.weights(gate_EDF, dtype)) + _dot_turned(dup_NbF, turn.weights(up_EDF, dtype))
        return (
            turn.put(dx_RD, dx_NbD.astype(dtype)),
            turn.add(dgate_EDF, _dot(x_NDb, dgate_NbF)),
            turn.add(dup_EDF, _dot(x_NDb, dup_NbF)),
            turn.add(ddown_EFD, ddown_NFD),
        )

    weights = (gate_EDF, up_EDF, down_EFD)
    zeros = (jnp.zeros_like(x_RD), *(jnp.zeros(w_EDF.shape, _wide(dtype)) for w_EDF in weights))
    dx_RD, *dws = over_blocks(body, vary_alike(zeros, x_RD)[0], group_sizes_E, x_RD.shape[0])
    return dx_RD, *(dw_EDF.astype(w_EDF.dtype) for dw_EDF, w_EDF in zip(dws, weights, strict=True)), None


_mlp.defvjp(_save, _grads)


def _wide(dtype):
    return jnp.promote_types(dtype, jnp.float32)


def _dot(x_NbD, w_NDF):
    return jnp.matmul(x_NbD, w_NDF, preferred_element_type=_wide(x_NbD.dtype))


def _dot_turned(y_NbF, w_NDF):
    return jax.lax.dot_general(y_NbF, w_NDF, (((2,), (2,)), ((0,), (0,))), preferred_element_type=_wide(y_NbF.dtype))
