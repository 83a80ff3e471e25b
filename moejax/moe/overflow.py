"""Rows that find no place: who takes over their weight. Nothing is lost without being counted."""

import dataclasses

import jax
import jax.numpy as jnp

from moejax.config.moe import MoEConfig
from moejax.moe.dispatch import SendPlan, kept

NOTHING = 1e-6
"""Share of a token's weight below which what is missing counts as rounding, and what is left is too little to take over the rest."""


@dataclasses.dataclass(frozen=True)
class Similar:
    """A row without a place takes the result of the kept row of the same expert whose input is most similar, with a part of its weight:
    their cosine, at least 0."""

    share: float
    """Share of a device's rows that can do so; the first ones do."""
    candidates: int
    """Kept rows of the expert that are compared, spread evenly over them."""

    def num_rows(self, choices: int) -> int:
        """How many of so many choices can borrow."""
        return min(choices, max(1, round(self.share * choices)))

    def borrow(self, x_TD, out_RD, home_RD, plan: SendPlan, slots_TK, probs_TK):
        """What the tokens get, [T, D], and the weight of it, [T].

        Args:
          x_TD: inputs of the tokens.
          out_RD: rows as they were sent.
          home_RD: their results.
        """
        num_tokens, k = slots_TK.shape
        num = self.num_rows(slots_TK.size)  # B rows
        dropped_R = ((slots_TK >= 0) & (plan.rows.slot_TK < 0)).reshape(-1)
        (at_B,) = jnp.nonzero(dropped_R, size=num, fill_value=slots_TK.size)
        real_B, at_B = at_B < slots_TK.size, jnp.minimum(at_B, slots_TK.size - 1)
        slot_B, token_B = jnp.maximum(slots_TK.reshape(-1)[at_B], 0), at_B // k
        count_X = plan.counts_Sx.reshape(-1)
        first_X = (plan.start_S[:, None] + jnp.cumsum(plan.counts_Sx, 1) - plan.counts_Sx).reshape(-1)
        spread_BC = jnp.arange(self.candidates) * count_X[slot_B][:, None] // self.candidates
        row_BC = jnp.minimum(first_X[slot_B][:, None] + spread_BC, out_RD.shape[0] - 1)
        part_B, row_B = kept(self._most_similar(jax.lax.stop_gradient(out_RD), row_BC, jax.lax.stop_gradient(x_TD[token_B])))
        part_B = jnp.where(real_B & (count_X[slot_B] > 0), part_B, 0)
        weight_B = jax.lax.stop_gradient(part_B) * probs_TK.reshape(-1)[at_B]
        wide = weight_B.dtype
        result_BD = home_RD[row_B].astype(wide) * weight_B[:, None]
        add = lambda like, parts: jnp.zeros((num_tokens, *like.shape[1:]), wide).at[token_B].add(parts)
        return add(home_RD, result_BD).astype(home_RD.dtype), add(weight_B, weight_B)

    def _most_similar(self, out_RD, row_BC, x_BD):
        wide = jnp.promote_types(out_RD.dtype, jnp.float32)
        unit = lambda x: x.astype(wide) * jax.lax.rsqrt(jnp.sum(jnp.square(x.astype(wide)), -1, keepdims=True) + jnp.finfo(wide).tiny)
        cosine_BC = jnp.einsum("bcd,bd->bc", unit(out_RD[row_BC]), unit(x_BD))
        best_B1 = jnp.argmax(cosine_BC, -1)[:, None]
        take = lambda array_BC: jnp.take_along_axis(array_BC, best_B1, 1)[:, 0]
        return jnp.clip(take(cosine_BC), 0, 1), take(row_BC)


def of(config: MoEConfig) -> Similar | None:
    """What a config asks for; None: renormalise."""
    return Similar(config.overflow_share, config.overflow_candidates) if config.overflow == "similar" else None


def settle(y_TD, weight_T, given_T, total_T, *, renormalise: bool):
    """Lets the kept rows of each token take over the weight of those that found no place, if so asked, and counts.

    Args:
      y_TD: sums over the rows that found a place, whose weights sum to weight_T (and given_T, borrowed results among them).
      total_T: weight that was asked for.

    Returns:
      y_TD, scaled exactly by 1 where nothing was dropped, 0 where (nearly) all was; `weight_lost`, the weight of the rows that found no place, and
      `weight_given`, the part of it that others took over; without gradients.
    """
    missing_T = total_T - weight_T
    some_T, lost_T = weight_T > NOTHING * total_T, jnp.where(missing_T > NOTHING * total_T, missing_T, 0)
    if renormalise:
        scale_T = jnp.where(some_T, jnp.where(lost_T > 0, total_T / jnp.where(some_T, weight_T, 1), 1), 0)
        y_TD = (y_TD.astype(scale_T.dtype) * scale_T[:, None]).astype(y_TD.dtype)
        given_T = jnp.where(some_T, lost_T, 0)
    return y_TD, jax.lax.stop_gradient({"weight_lost": jnp.sum(lost_T), "weight_given": jnp.sum(given_T)})
