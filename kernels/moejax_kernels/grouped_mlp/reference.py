"""Definition of the grouped MLP: three grouped matmuls and the activation between them."""

from moejax_kernels.gated_activation.reference import gated_activation
from moejax_kernels.grouped_matmul.reference import grouped_matmul


def grouped_mlp(x_RD, gate_EDF, up_EDF, down_EFD, group_sizes_E, **activation):
    gate_RF, up_RF = grouped_matmul(x_RD, gate_EDF, group_sizes_E), grouped_matmul(x_RD, up_EDF, group_sizes_E)
    return grouped_matmul(gated_activation(gate_RF, up_RF, **activation), down_EFD, group_sizes_E)
