"""Definition of the grouped matmul: every row times the weight of its group."""

import jax
import jax.numpy as jnp


def grouped_matmul(x_RD, w_EDF, group_sizes_E):
    inside = jnp.promote_types(x_RD.dtype, jnp.float32)
    ends_E = jnp.cumsum(group_sizes_E)
    row_R1 = jnp.arange(x_RD.shape[0])[:, None]
    member_RE = (row_R1 >= ends_E - group_sizes_E) & (row_R1 < ends_E)
    x_RD = jnp.where(jnp.any(member_RE, axis=1, keepdims=True), x_RD, 0)  # padding may hold NaN, which 0 * NaN would hand to dw
    rounded_EDF, w_EDF = w_EDF.astype(x_RD.dtype).astype(inside), w_EDF.astype(inside)
    w_EDF += jax.lax.stop_gradient(rounded_EDF - w_EDF)  # exactly the rounded weight, whose gradient is not rounded
    every_REF = jnp.einsum("RD,EDF->REF", x_RD.astype(inside), w_EDF)
    return jnp.sum(jnp.where(member_RE[:, :, None], every_REF, 0), axis=1).astype(x_RD.dtype)
