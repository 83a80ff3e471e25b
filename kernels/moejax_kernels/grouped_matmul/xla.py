"""Grouped matmul as a loop over blocks of rows of one group: the work follows the real rows, not R and not E."""

import jax
import jax.numpy as jnp

from moejax_kernels.row_blocks import over_blocks, transposed
from moejax_kernels.varying import vary_alike


def grouped_matmul(x_RD, w_EDF, group_sizes_E):
    if 0 in (*x_RD.shape, *w_EDF.shape):
        return jnp.zeros((x_RD.shape[0], w_EDF.shape[2]), x_RD.dtype)
    return _product(*vary_alike(x_RD, w_EDF, group_sizes_E.astype(jnp.int32)))


@jax.custom_vjp
def _product(x_RD, w_EDF, group_sizes_E):
    return _rows_times_weights(x_RD, w_EDF, group_sizes_E, w_dim=1)


def _save(x_RD, w_EDF, group_sizes_E):
    return _product(x_RD, w_EDF, group_sizes_E), (x_RD, w_EDF, group_sizes_E)


def _grads(saved, dy_RF):
    x_RD, w_EDF, group_sizes_E = saved
    return _rows_times_weights(dy_RF, w_EDF, group_sizes_E, w_dim=2), _weight_grads(x_RD, dy_RF, group_sizes_E, w_EDF), None


_product.defvjp(_save, _grads)


def _rows_times_weights(x_RD, w_EDF, group_sizes_E, *, w_dim: int):
    """Rows times their group's weight, contracted with dim `w_dim` of it (2: the transpose)."""
    dtype = x_RD.dtype
    inside = jnp.promote_types(dtype, jnp.float32)

    def body(turn, y_RF):
        dims = (((2,), (w_dim,)), ((0,), (0,)))
        y_NbF = jax.lax.dot_general(turn.rows(x_RD), turn.weights(w_EDF, dtype), dims, preferred_element_type=inside)
        return turn.put(y_RF, y_NbF.astype(dtype))

    y_RF = jnp.zeros_like(x_RD, shape=(x_RD.shape[0], w_EDF.shape[3 - w_dim]))
    return over_blocks(body, vary_alike(y_RF, x_RD)[0], group_sizes_E, x_RD.shape[0])


def _weight_grads(x_RD, dy_RF, group_sizes_E, w_EDF):
    inside = jnp.promote_types(x_RD.dtype, jnp.float32)

    def body(turn, dw_EDF):
        dw_NDF = jnp.matmul(transposed(turn.own_rows(x_RD)), turn.own_rows(dy_RF), preferred_element_type=inside)
        return turn.add(dw_EDF, dw_NDF)

    dw_EDF = vary_alike(jnp.zeros(w_EDF.shape, inside), x_RD)[0]
    return over_blocks(body, dw_EDF, group_sizes_E, x_RD.shape[0]).astype(w_EDF.dtype)
