"""Cases of kda."""

from moejax_kernels.delta_cases import MEASURED as MEASURED
from moejax_kernels.delta_cases import SMALL as SMALL
from moejax_kernels.delta_cases import DeltaCase

REAL = (
    DeltaCase("kimi_k3", 1, (5000, 3192), 96, 96, 128, 128),
    DeltaCase("kimi_linear", 1, (5000, 3192), 32, 32, 128, 128),
)
"""Layers of real models, packed."""
