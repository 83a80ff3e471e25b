"""Tokens and columns for tests, benchmarks and compilation of logit_sums and logit_gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class LogitsCase:
    """T tokens, V columns of the vocabulary, width D."""

    name: str
    tokens: int
    columns: int
    width: int
    skip: int | None = None
    logit_cap: float = 0.0

    def __str__(self):
        return self.name

    def shapes(self, dtype) -> dict:
        """All inputs of logit_gradients by name, without their values."""
        like = jax.ShapeDtypeStruct
        of_tokens = {name: like((self.tokens,), jnp.float32) for name in ("lse_T", "slope_T", "weights_T")}
        hidden_TD, weight_DV = like((self.tokens, self.width), dtype), like((self.width, self.columns), dtype)
        return {"hidden_TD": hidden_TD, "weight_DV": weight_DV, "targets_T": like((self.tokens,), jnp.int32)} | of_tokens

    def arrays(self, dtype, *, seed: int) -> dict:
        """The same with values: targets before, among and behind the columns, and a logsumexp near that of these columns."""
        rng = np.random.default_rng(seed)
        hidden_TD, weight_DV = rng.standard_normal((self.tokens, self.width)), rng.standard_normal((self.width, self.columns))
        values = {
            "hidden_TD": hidden_TD,
            "weight_DV": weight_DV * self.width**-0.5,
            "targets_T": rng.integers(-2, self.columns + 2, self.tokens),
            "lse_T": np.log(self.columns) + rng.random(self.tokens),
            "slope_T": rng.random(self.tokens),
            "weights_T": rng.random(self.tokens),
        }
        return {name: jnp.asarray(values[name], like.dtype) for name, like in self.shapes(dtype).items()}

    @property
    def options(self) -> dict:
        return {"skip": self.skip, "logit_cap": self.logit_cap}


SMALL = (
    LogitsCase("one", 1, 1, 1),
    LogitsCase("tiles", 64, 128, 64),
    LogitsCase("all_but_one_skipped", 5, 70, 8, skip=69),
    LogitsCase("none_counts", 3, 10, 4, skip=10),
    LogitsCase("one_more_than_tiles", 65, 129, 33, logit_cap=1.5),
    LogitsCase("skipped_over_a_tile", 70, 200, 40, skip=67, logit_cap=30.0),
)
REAL = (
    LogitsCase("kimi_k3", 8192, 2304, 7168),
    LogitsCase("kimi_linear", 8192, 2304, 2304, skip=0),
    LogitsCase("gemma", 4096, 4096, 2304, logit_cap=30.0),
    LogitsCase("odd", 1000, 1111, 1000, skip=5),
)
"""Pieces of the vocabulary as the loss cuts them."""
