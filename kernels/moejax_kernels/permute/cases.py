"""Routings for tests, benchmarks and tuning of permute and unpermute."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax_kernels.permute.plan import RowPlan


@dataclasses.dataclass(frozen=True)
class PermuteCase:
    """One shape: T tokens with K choices each among `rows` rows; choices that find no row are dropped."""

    name: str
    tokens: int
    choices: int
    rows: int
    width: int

    def __str__(self):
        return self.name

    def plan(self, *, seed: int) -> RowPlan:
        """Choices on random rows; some rows stay empty and some choices without a row."""
        random = np.random.default_rng(seed)
        num_choices = self.tokens * self.choices
        slot = np.full(num_choices, -1, np.int32)
        kept = random.permutation(num_choices)[: min(self.rows, num_choices - num_choices // 5)]
        slot[kept] = random.permutation(self.rows)[: kept.size]
        source_R = np.full(self.rows, -1, np.int32)
        source_R[slot[kept]] = kept // self.choices
        return RowPlan(jnp.asarray(source_R), jnp.asarray(slot.reshape(self.tokens, self.choices)))

    def arrays(self, dtype, *, seed: int):
        """x_TD, y_RD, probs_TK."""
        random = np.random.default_rng(seed)
        return tuple(
            jnp.asarray(random.standard_normal(shape), dtype)
            for shape in ((self.tokens, self.width), (self.rows, self.width), (self.tokens, self.choices))
        )

    def shapes(self, dtype):
        """x_TD, y_RD, probs_TK and the plan, without their values; weights are float32, as a router gives them."""
        shape: Any = jax.ShapeDtypeStruct
        plan = RowPlan(shape((self.rows,), jnp.int32), shape((self.tokens, self.choices), jnp.int32))
        y_RD, probs_TK = shape((self.rows, self.width), dtype), shape((self.tokens, self.choices), jnp.float32)
        return shape((self.tokens, self.width), dtype), y_RD, probs_TK, plan


SMALL = (
    PermuteCase("room_to_spare", 7, 3, 30, 5),
    PermuteCase("rows_run_out", 11, 2, 9, 4),
    PermuteCase("one_token", 1, 1, 1, 3),
)
MEASURED = (PermuteCase("small_experts", 2048, 4, 16384, 128), PermuteCase("transformer_engine", 8192, 8, 65536, 512))
REAL = (
    PermuteCase("kimi_k3", 8192, 16, 131072, 3584),
    PermuteCase("kimi_linear", 8192, 8, 65536, 2304),
    PermuteCase("deepseek_v32", 8192, 8, 65536, 7168),
    PermuteCase("qwen3_next", 8192, 10, 81920, 2048),
)
"""8192 tokens of a device, in the width that goes to the experts."""
