"""Rows and groups for tests, benchmarks and compilation of group_ranks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class RanksCase:
    """R rows among E groups; the ids are drawn from `drawn`, both ends included, or with rows of no group on either side."""

    name: str
    rows: int
    groups: int
    drawn: tuple[int, int] | None = None

    def __str__(self):
        return self.name

    def ids(self, *, seed: int):
        """ids_R."""
        lowest, highest = self.drawn or (-1, self.groups)
        return jnp.asarray(np.random.default_rng(seed).integers(lowest, highest + 1, self.rows), jnp.int32)

    def shape(self):
        """ids_R, without its values."""
        return jax.ShapeDtypeStruct((self.rows,), jnp.int32)


SMALL = (
    RanksCase("one_row", 1, 1, (0, 0)),
    RanksCase("no_rows", 0, 4),
    RanksCase("block_of_xla", 64, 3),
    RanksCase("one_row_more", 65, 3),
    RanksCase("all_in_the_last_group", 500, 3, (2, 2)),
    RanksCase("nobody_comes", 500, 3, (-1, -1)),
    RanksCase("ids_far_outside", 300, 4, (-(2**31), 2**31 - 1)),
    RanksCase("many_groups", 3000, 896),
)
REAL = (
    RanksCase("kimi_k3", 131072, 896, (0, 895)),
    RanksCase("deepseek_v32", 65536, 256, (0, 255)),
    RanksCase("qwen3_next", 81920, 512, (0, 511)),
)
"""8192 tokens of a device, each with all of its choices."""
