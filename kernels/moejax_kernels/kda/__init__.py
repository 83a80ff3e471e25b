"""KDA: the gated delta rule with a decay per key channel."""

from moejax_kernels.kda.api import kda as kda
from moejax_kernels.kda.shards import kda_shard_summary as kda_shard_summary
