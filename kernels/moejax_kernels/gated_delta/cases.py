"""Cases of gated_delta."""

from moejax_kernels.delta_cases import MEASURED as MEASURED
from moejax_kernels.delta_cases import SMALL as SMALL
from moejax_kernels.delta_cases import DeltaCase

REAL = (DeltaCase("qwen3_next", 1, (5000, 3192), 16, 32, 128, 128),)
"""Layers of real models, packed."""
