"""KDA: the gated delta rule with a decay per key channel."""

from moejax_kernels.kda.api import kda as kda
