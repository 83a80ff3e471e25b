"""The gated delta rule in chunks of 16 tokens: what KDA and GDN compute for a few chunks, forward and backward. Plain XLA.

Arrays are [N, B, H, t, ...]: N chunks of t = 16 tokens, row, head. A trailing c is C (a decay per channel, KDA) or 1 (per head, GDN).
Source: the WY form of Yang et al. 2024, "Gated Delta Networks", and Kimi Linear 2025, with chunks as short as FlashKDA's: on a CPU
the quadratic part of longer ones costs more than the scan saves (16: 38k, 32: 32k, 64: 22k tokens/s forward + backward, 4 heads of
32, one core of an EPYC Milan).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from moejax_kernels import delta_states

CHUNK = 16
AT = np.arange(CHUNK)
STRICT = AT[:, None] > AT[None]
CAUSAL = AT[:, None] >= AT[None]
IS_LAST = AT[:, None] == CHUNK - 1
UNROLL = 8
"""Chunks in one turn of the loop over them: XLA copies the state once a turn."""
LEVELS = tuple(2**level for level in range(4))
"""Halves of 1, 2, 4 and 8 tokens: exactly one level splits a pair i > j of a chunk, j in a lower half, i in the upper half beside it."""
UPPER = {half: AT // half % 2 == 1 for half in LEVELS}
SPLIT = {half: (AT[:, None] // (2 * half) == AT[None] // (2 * half)) & UPPER[half][:, None] & ~UPPER[half][None] for half in LEVELS}


@dataclasses.dataclass(frozen=True)
class Borders:
    """Documents seen from the chunks. Masks are bool; all True without labels."""

    same_NB1tt: Any
    """Two tokens of a chunk are of one document."""
    enters_NB1t1: Any
    """The token's document reaches the chunk from the left: the incoming state belongs to it."""
    leaves_NB1t1: Any
    """The token's document holds the chunk's last token: it writes the outgoing state."""
    passes_NB111: Any
    """One document fills the chunk and reaches it from the left: the state goes through."""

    @classmethod
    def build(cls, label_NBt, before_NB1) -> "Borders":
        """From each token's label and that of the token before the chunk, or from None for one document."""
        if label_NBt is None:
            true = np.ones((1, 1, 1, 1, 1), bool)
            return cls(np.ones((1, 1, 1, CHUNK, CHUNK), bool), true, true, true)
        last_NB1 = label_NBt[:, :, -1:]
        same_NBtt = label_NBt[..., :, None] == label_NBt[..., None, :]
        by_token = (label_NBt == before_NB1, label_NBt == last_NB1, last_NB1 == before_NB1)
        return cls(same_NBtt[:, :, None], *(mask_NBt[:, :, None, :, None] for mask_NBt in by_token))

    def sums(self, g_tc, mask_tt):
        """[N, B, H, t, t] for arrays like g: row i adds up its document's tokens where the mask is True.

        Sums begin anew at each document, so that the rounding of one document knows nothing of another.
        """
        sum_NB1tt = jnp.where(self.same_NB1tt & mask_tt, jnp.ones((), g_tc.dtype), 0)
        return jnp.broadcast_to(sum_NB1tt, (*g_tc.shape[:3], CHUNK, CHUNK))


class Factors(NamedTuple):
    """The decays of some chunks. A pair's decay is exp(g_j+1 + .. + g_i), j < i."""

    from_start_tc: Any
    """From the chunk's start to each token, that one included."""
    to_end_tc: Any
    """From each token, that one excluded, to the chunk's end."""
    of_pairs: Any
    """What the pairs' functions need."""


class Decays(NamedTuple):
    """How one op computes with its decays. Anything may stand at pairs of two documents or above the diagonal; no NaN may come from it."""

    factors: Callable[..., Factors]
    """(g_tc, borders) -> Factors."""
    pairs: Callable[..., tuple]
    """(factors, q_tC, k_tC) -> (kk_tt, qk_tt) = sum_c x_ic k_jc exp(g_j+1 + .. + g_i)."""
    pair_grads: Callable[..., tuple]
    """(factors, q_tC, k_tC, dkk_tt, dqk_tt) -> gradients of q and k, and of k as the later token i minus that as the earlier one j.

    Those of a token's pair with itself are not in it: the cotangents are 0 there and wherever anything may stand.
    """


def forward(decays: Decays, inputs, states, route, borders: Borders):
    """Outputs of some chunks, the states after them, and what `backward` needs.

    Args:
      inputs: q, k, v, g, beta; beta with a last dim of 1.
      states: what `delta_states` reads and writes along `route`.
    """
    q_tC, k_tC, v_tM, g_tc, beta_t1 = inputs
    factors = decays.factors(g_tc, borders)
    kk_tt, qk_tt = decays.pairs(factors, q_tC, k_tC)
    kk_tt = jnp.where(borders.same_NB1tt & STRICT, kk_tt, 0)
    qk_tt = jnp.where(borders.same_NB1tt & CAUSAL, qk_tt, 0)
    from_start_tc, to_end_tc, passing_C1 = _at_borders(k_tC, factors, borders)
    solve_tt = inverse(beta_t1 * kk_tt) * _turned(beta_t1)
    w_tC, u_tM = solve_tt @ (from_start_tc * k_tC), solve_tt @ v_tM

    def step(states, chunk):
        (source, target), w_tC, u_tM, k_tC, passing_C1 = chunk
        entering_CM = delta_states.read(states, source)
        written_tM = u_tM - w_tC @ entering_CM
        states = delta_states.write(states, target, passing_C1 * entering_CM + _turned(k_tC) @ written_tM)
        return states, (written_tM, entering_CM)

    states, (written_tM, entering_CM) = lax.scan(step, states, (route, w_tC, u_tM, to_end_tc * k_tC, passing_C1), unroll=UNROLL)
    o_tM = (from_start_tc * q_tC) @ entering_CM + qk_tt @ written_tM
    return o_tM, states, (kk_tt, qk_tt, written_tM, entering_CM)


def backward(decays: Decays, inputs, saved, do_tM, dstates, route, borders: Borders):
    """Gradients of the inputs and of the states before the chunks, from those of the outputs and of the states after them.

    That of g comes from the others: with b_i = g up to token i, q_i and k_i as a pair's later token stand beside exp(b_i), as the earlier
    one beside exp(-b_i). So the gradient of b_i is q_i dq_i + k_i (dk_i as later - dk_i as earlier), and each g has those of its b.
    """
    q_tC, k_tC, v_tM, g_tc, beta_t1 = inputs
    kk_tt, qk_tt, written_tM, entering_CM = saved
    factors = decays.factors(g_tc, borders)
    from_start_tc, to_end_tc, passing_C1 = _at_borders(k_tC, factors, borders)
    inverse_tt = inverse(beta_t1 * kk_tt)
    solve_tt, from_start_k_tC = inverse_tt * _turned(beta_t1), from_start_tc * k_tC

    def step(dstates, chunk):
        (source, target), reads_tC, k_tC, passing_C1, do_tM, dwritten_tM = chunk
        dleaving_CM, dstates = delta_states.unwrite(dstates, target)
        dread_tM = jnp.concatenate([do_tM, dwritten_tM + k_tC @ dleaving_CM], axis=-2)
        dentering_CM = passing_C1 * dleaving_CM + _turned(reads_tC) @ dread_tM
        return delta_states.unread(dstates, source, dentering_CM), (dread_tM, dleaving_CM)

    reads_tC = jnp.concatenate([from_start_tc * q_tC, -(solve_tt @ from_start_k_tC)], axis=-2)  # what reads the entering state: o and u
    chunks = route, reads_tC, to_end_tc * k_tC, passing_C1, do_tM, _turned(qk_tt) @ do_tM
    dstates, (dread_tM, dleaving_CM) = lax.scan(step, dstates, chunks, reverse=True, unroll=UNROLL)
    du_tM = dread_tM[..., CHUNK:, :]
    dq_entering_tC, dw_tC = jnp.split(dread_tM @ _turned(entering_CM), 2, axis=-2)
    dw_tC, dv_tM = -dw_tC, _turned(solve_tt) @ du_tM

    dsolve_tt = dw_tC @ _turned(from_start_k_tC) + du_tM @ _turned(v_tM)
    dbeta_t1 = _row_sums(_turned(dsolve_tt * inverse_tt))
    dlower_tt = -(_turned(inverse_tt) @ (dsolve_tt * _turned(beta_t1)) @ _turned(inverse_tt))
    dlower_tt = jnp.where(borders.same_NB1tt & STRICT, dlower_tt, 0)
    dbeta_t1 += _row_sums(dlower_tt * kk_tt)
    dqk_tt = jnp.where(borders.same_NB1tt & STRICT, do_tM @ _turned(written_tM), 0)
    down_t1 = _row_sums(do_tM * written_tM)  # a token's pair with itself: no decay stands in it

    dq_tC, dk_tC, dk_signed_tC = decays.pair_grads(factors, q_tC, k_tC, dlower_tt * beta_t1, dqk_tt)
    dq_tC += from_start_tc * dq_entering_tC
    dk_entering_tC = from_start_tc * (_turned(solve_tt) @ dw_tC)
    dk_leaving_tC = to_end_tc * (written_tM @ _turned(dleaving_CM))
    dpassing_C1 = passing_C1 * _row_sums(entering_CM * dleaving_CM)
    dsum_tC = q_tC * dq_tC + k_tC * (dk_signed_tC + dk_entering_tC) + jnp.where(IS_LAST, _turned(dpassing_C1), 0)
    dleft_tC = k_tC * dk_leaving_tC  # falls to the tokens after, up to the chunk's end: each has decayed it
    if g_tc.shape[-1] == 1:
        dsum_tC, dleft_tC = dsum_tC.sum(-1, keepdims=True), dleft_tC.sum(-1, keepdims=True)
    dg_tc = _turned(borders.sums(g_tc, CAUSAL)) @ dsum_tC + borders.sums(g_tc, STRICT) @ dleft_tC
    dq_tC, dk_tC = dq_tC + down_t1 * k_tC, dk_tC + dk_entering_tC + dk_leaving_tC + down_t1 * q_tC
    return (dq_tC, dk_tC, dv_tM, dg_tc, dbeta_t1), dstates


def _at_borders(k_tC, factors: Factors, borders: Borders):
    """The decays where the incoming state reaches a token, where a token reaches the outgoing one, and from the one to the other."""
    from_start_tc = jnp.where(borders.enters_NB1t1, factors.from_start_tc, 0)
    to_end_tc = jnp.where(borders.leaves_NB1t1, factors.to_end_tc, 0)
    passing_c1 = _turned(jnp.where(borders.passes_NB111, from_start_tc[..., -1:, :], 0))
    return from_start_tc, to_end_tc, jnp.broadcast_to(passing_c1, (*k_tC.shape[:3], k_tC.shape[-1], 1))


def inverse(a_tt):
    """(I + a)^-1 of strictly lower triangular matrices [..., 16, 16].

    Doubles the inverted diagonal blocks: with R the inverse of I and a's blocks of `half`, R - R (a at SPLIT[half]) R is that of twice
    the size. As stable as forward substitution; a product of (I + a^2^n) is not, its terms grow like binomials. Zeros between
    documents stay exact zeros.
    """
    r_tt = jnp.eye(CHUNK, dtype=a_tt.dtype) - jnp.where(SPLIT[1], a_tt, 0)
    for half in LEVELS[1:]:
        r_tt = r_tt - r_tt @ (jnp.where(SPLIT[half], a_tt, 0) @ r_tt)
    return r_tt


def _turned(x):
    return x.swapaxes(-1, -2)


def _row_sums(x):
    """[..., n] -> [..., 1] as a product with ones, which on a CPU costs XLA less than a sum over short rows; not rounded to TF32 on a GPU."""
    return jnp.matmul(x, jnp.ones((x.shape[-1], 1), x.dtype), precision=lax.Precision.HIGHEST)
