"""The grouped MLP made of the fastest grouped matmul and activation; keeps its input, gate and up, and redoes the activation."""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name

from moejax_kernels.gated_activation import gated_activation
from moejax_kernels.grouped_matmul import grouped_matmul
from moejax_kernels.saved import EXPERT_HIDDEN


def grouped_mlp(x_RD, gate_EDF, up_EDF, down_EFD, group_sizes_E, *, matmul, **activation):
    """`matmul`: the grouped matmul's implementation."""
    product = functools.partial(grouped_matmul, implementation=matmul)

    @jax.checkpoint
    def down(gate_RF, up_RF, down_EFD):
        h_RF = gated_activation(gate_RF, up_RF, **activation, implementation="triton_gpu")
        # backward both gradients of this product are made before the activation's: from there on its rows, dy and h, are not held
        h_RF, down_EFD = jax.lax.optimization_barrier((h_RF, down_EFD))
        return product(h_RF, down_EFD, group_sizes_E)

    gate_RF, up_RF = (checkpoint_name(product(x_RD, w_EDF, group_sizes_E), EXPERT_HIDDEN) for w_EDF in (gate_EDF, up_EDF))
    return down(gate_RF, up_RF, down_EFD)
