"""The grouped MLP in one loop over blocks of rows each way: what lies between its matmuls exists for one block at a time.

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

    def body(block, results):
        x_bD = block.rows(x_RD)
        gate_bF, up_bF = (_dot(x_bD, block.weight(w_EDF, dtype)).astype(dtype) for w_EDF in (gate_EDF, up_EDF))
        h_bF = reference.gated_activation(gate_bF, up_bF, **dict(activation))
        y_bD = _dot(h_bF, block.weight(down_EFD, dtype)).astype(dtype)
        return tuple(block.put(whole, part) for whole, part in zip(results, (y_bD, gate_bF, up_bF), strict=True))

    nothing = vary_alike(tuple(jnp.zeros_like(x_RD, shape=(num_rows, width)) for width in (x_RD.shape[1], hidden, hidden)), x_RD)[0]
    y_RD, gate_RF, up_RF = over_blocks(body, nothing, group_sizes_E, num_rows)
    gate_RF, up_RF = checkpoint_name((gate_RF, up_RF), EXPERT_HIDDEN)
    return y_RD, (x_RD, gate_EDF, up_EDF, down_EFD, group_sizes_E, gate_RF, up_RF)


def _grads(activation, saved, dy_RD):
    x_RD, gate_EDF, up_EDF, down_EFD, group_sizes_E, gate_RF, up_RF = saved
    dtype = x_RD.dtype

    def body(block, sums):
        dx_RD, dgate_EDF, dup_EDF, ddown_EFD = sums
        dy_bD = block.own_rows(dy_RD)
        activate = functools.partial(reference.gated_activation, **dict(activation))
        h_bF, pull = jax.vjp(activate, block.own_rows(gate_RF), block.own_rows(up_RF))
        ddown_FD = _dot(transposed(h_bF), dy_bD)
        dgate_bF, dup_bF = pull(_dot_turned(dy_bD, block.weight(down_EFD, dtype)).astype(dtype))
        x_Db = transposed(block.own_rows(x_RD))
        dx_bD = _dot_turned(dgate_bF, block.weight(gate_EDF, dtype)) + _dot_turned(dup_bF, block.weight(up_EDF, dtype))
        return (
            block.put(dx_RD, dx_bD.astype(dtype)),
            block.add(dgate_EDF, _dot(x_Db, dgate_bF)),
            block.add(dup_EDF, _dot(x_Db, dup_bF)),
            block.add(ddown_EFD, ddown_FD),
        )

    weights = (gate_EDF, up_EDF, down_EFD)
    zeros = (jnp.zeros_like(x_RD), *(jnp.zeros(w_EDF.shape, _wide(dtype)) for w_EDF in weights))
    dx_RD, *dws = over_blocks(body, vary_alike(zeros, x_RD)[0], group_sizes_E, x_RD.shape[0])
    return dx_RD, *(dw_EDF.astype(w_EDF.dtype) for dw_EDF, w_EDF in zip(dws, weights, strict=True)), None


_mlp.defvjp(_save, _grads)


def _wide(dtype):
    return jnp.promote_types(dtype, jnp.float32)


def _dot(x_bD, w_DF):
    return jnp.matmul(x_bD, w_DF, preferred_element_type=_wide(x_bD.dtype))


def _dot_turned(y_bF, w_DF):
    return jax.lax.dot_general(y_bF, w_DF, (((1,), (1,)), ((), ())), preferred_element_type=_wide(y_bF.dtype))
