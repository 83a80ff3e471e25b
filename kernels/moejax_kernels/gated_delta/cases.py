"""Cases of gated_delta."""

from moejax_kernels.delta_cases import MEASURED as MEASURED
from moejax_kernels.delta_cases import SMALL as SMALL
