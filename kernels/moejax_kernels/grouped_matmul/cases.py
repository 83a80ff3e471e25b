"""Inputs of the grouped matmul for tests, benchmarks and tuning."""

import dataclasses

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class GroupedCase:
    """One shape: `rows` of the buffer, of which the groups fill sum(sizes)."""

    name: str
    rows: int
    width: int
    hidden: int
    sizes: tuple[int, ...]

    def __str__(self):
        return self.name

    def arrays(self, dtype, *, seed: int):
        """x, w, group sizes, and a cotangent of the output."""
        random = np.random.default_rng(seed)
        x_RD, w_EDF, dy_RF = (
            jnp.asarray(random.standard_normal(shape), dtype)
            for shape in ((self.rows, self.width), (len(self.sizes), self.width, self.hidden), (self.rows, self.hidden))
        )
        return x_RD, w_EDF, jnp.asarray(self.sizes, jnp.int32), dy_RF


def skewed(rows: int, num_groups: int, *, seed: int = 0) -> tuple[int, ...]:
    """Sizes that sum to `rows`, the largest many times the mean, some empty."""
    random = np.random.default_rng(seed)
    return tuple(random.multinomial(rows, random.dirichlet(np.full(num_groups, 0.5))).tolist())


SMALL = (
    GroupedCase("one_row", 1, 3, 2, (0, 1)),
    GroupedCase("empty_groups", 40, 5, 7, (0, 13, 0, 0, 27, 0)),
    GroupedCase("one_takes_all", 300, 4, 6, (0, 300, 0)),
    GroupedCase("nobody_comes", 9, 4, 6, (0, 0, 0)),
    GroupedCase("unaligned_with_room", 400, 8, 5, (1, 128, 129, 0, 55)),
)
MEASURED = (
    GroupedCase("small_experts", 4096, 128, 64, (500, 700, 300, 548)),
    GroupedCase("skewed_64", 8192, 256, 512, skewed(8192, 64)),
    GroupedCase("skewed_896", 8192, 256, 512, skewed(8192, 896)),
)
