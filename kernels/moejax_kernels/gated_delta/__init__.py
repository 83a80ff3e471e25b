"""Gated DeltaNet: the delta rule with one decay per head."""

from moejax_kernels.gated_delta.api import gated_delta as gated_delta
from moejax_kernels.gated_delta.shards import gated_delta_shard_summary as gated_delta_shard_summary
