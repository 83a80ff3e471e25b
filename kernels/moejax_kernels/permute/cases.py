"""Routings for tests, benchmarks and tuning of permute and unpermute."""

import dataclasses

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


SMALL = (
    PermuteCase("room_to_spare", 7, 3, 30, 5),
    PermuteCase("rows_run_out", 11, 2, 9, 4),
    PermuteCase("one_token", 1, 1, 1, 3),
)
MEASURED = (PermuteCase("small_experts", 2048, 4, 16384, 128), PermuteCase("transformer_engine", 8192, 8, 65536, 512))
