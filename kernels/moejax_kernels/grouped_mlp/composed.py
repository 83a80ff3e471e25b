"""The grouped MLP made of the fastest grouped matmul and activation; keeps its input, gate and up, and redoes the activation."""

import functools

import jax

from moejax_kernels.gated_activation import gated_activation
from moejax_kernels.grouped_matmul import grouped_matmul


def grouped_mlp(x_RD, gate_EDF, up_EDF, down_EFD, group_sizes_E, *, matmul, **activation):
    """`matmul`: the grouped matmul's implementation."""
    product = functools.partial(grouped_matmul, implementation=matmul)

    @jax.checkpoint
    def down(gate_RF, up_RF, down_EFD):
        h_RF = gated_activation(gate_RF, up_RF, **activation, implementation="triton_gpu")
        # backward both gradients of this product are made before the activation's: from there on its rows, dy and h, are not held
        h_RF, down_EFD = jax.lax.optimization_barrier((h_RF, down_EFD))
        return product(h_RF, down_EFD, group_sizes_E)

    return down(product(x_RD, gate_EDF, group_sizes_E), product(x_RD, up_EDF, group_sizes_E), down_EFD)
