"""Inputs of the grouped matmul for tests, benchmarks and tuning."""

import dataclasses

import jax
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

    def shapes(self, dtype, *, w_dtype=None):
        """The same without their values."""
        shape, num_groups = jax.ShapeDtypeStruct, len(self.sizes)
        x_RD, dy_RF = shape((self.rows, self.width), dtype), shape((self.rows, self.hidden), dtype)
        return x_RD, shape((num_groups, self.width, self.hidden), w_dtype or dtype), shape((num_groups,), jnp.int32), dy_RF


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
REAL = (
    GroupedCase("kimi_k3_all_experts", 32768, 3584, 3072, skewed(32768, 896)),
    GroupedCase("kimi_k3_on_64_devices", 131072, 3584, 3072, skewed(100000, 14)),
    GroupedCase("kimi_linear_on_8_devices", 65536, 2304, 1024, skewed(60000, 32)),
    GroupedCase("deepseek_v32_on_32_devices", 65536, 7168, 2048, skewed(60000, 8)),
    GroupedCase("qwen3_next_on_8_devices", 81920, 2048, 512, skewed(80000, 64)),
)
"""Rows and experts of one device."""
