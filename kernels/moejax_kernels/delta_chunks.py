"""The gated delta rule in chunks of 16 tokens: what KDA and GDN share. Plain XLA; only the state goes from chunk to chunk.

Chunked arrays are [N, B, H, t, ...]: N chunks of t = 16 tokens, row, head. A trailing c is C (a decay per channel, KDA) or 1
(per head, GDN). Source: the WY form of Yang et al. 2024, "Gated Delta Networks", and Kimi Linear 2025, with chunks as short as
FlashKDA's: on a CPU the quadratic part of longer ones costs more than the scan saves (16: 38k, 32: 32k, 64: 22k tokens/s forward +
backward, 4 heads of 32, one core of an EPYC Milan).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moejax_kernels import delta_inputs
from moejax_kernels.implementation import UnsupportedError
from moejax_kernels.segments import Segments

CHUNK = 16
AT = np.arange(CHUNK)
STRICT = AT[:, None] > AT[None]
CAUSAL = AT[:, None] >= AT[None]
LEVELS = tuple(2**level for level in range(4))
"""Halves of 1, 2, 4 and 8 tokens: exactly one level splits a pair i > j of a chunk, j in a lower half, i in the upper half beside it."""
UPPER = {half: AT // half % 2 == 1 for half in LEVELS}
SPLIT = {half: (AT[:, None] // (2 * half) == AT[None] // (2 * half)) & UPPER[half][:, None] & ~UPPER[half][None] for half in LEVELS}


@dataclasses.dataclass(frozen=True)
class Borders:
    """Documents seen from the chunks. Masks are bool; all True without segments."""

    same_NB1tt: Any
    """Two tokens of a chunk are of one document."""
    enters_NB1t1: Any
    """The token's document reaches the chunk from the left: the incoming state belongs to it."""
    leaves_NB1t1: Any
    """The token's document holds the chunk's last token: it writes the outgoing state."""
    passes_NB111: Any
    """One document fills the chunk and reaches it from the left: the state goes through."""

    @classmethod
    def build(cls, segments: Segments | None, num_rows: int, num_chunks: int) -> "Borders":
        if segments is None:
            true = np.ones((1, 1, 1, 1, 1), bool)
            return cls(np.ones((1, 1, 1, CHUNK, CHUNK), bool), true, true, true)
        label_BL = delta_inputs.labels(segments)
        label_BL = jnp.pad(label_BL, ((0, 0), (0, num_chunks * CHUNK - label_BL.shape[1])), mode="edge")
        label_NBt = label_BL.reshape(num_rows, num_chunks, CHUNK).swapaxes(0, 1)
        last_NB1 = label_NBt[:, :, -1:]
        before_NB1 = jnp.concatenate([label_NBt[:1, :, :1], last_NB1[:-1]])  # an initial state belongs to the row's first token
        same_NBtt = label_NBt[..., :, None] == label_NBt[..., None, :]
        by_token = (label_NBt == before_NB1, label_NBt == last_NB1, last_NB1 == before_NB1)
        return cls(same_NBtt[:, :, None], *(mask_NBt[:, :, None, :, None] for mask_NBt in by_token))


def chunked(decays, q_BLGC, k_BLGC, v_BLHM, g_BLHc, beta_BLH, *, segments: Segments | None, initial_state_BHCM, scale, op: str):
    """Outputs [B, L, H, M] and the state after the last token.

    Args:
      decays: function of (q, k, g, borders), chunked, to (kk, qk) [N, B, H, t, t] = sum_c x_ic k_jc exp(g_j+1 + .. + g_i), and the
        decays from the chunk's start to each token (that one included) and from each token (excluded) to the chunk's end. Anything
        may stand at pairs of two documents or above the diagonal, as long as it is finite.
    """
    if segments is not None and segments.index_BL is not None:
        raise UnsupportedError(
            f"{op}: implementation='xla' takes packed documents, not segments with parents. "
            f"Pass implementation='reference', or build the segments without parent."
        )
    (B, L), dtype = beta_BLH.shape[:2], v_BLHM.dtype
    num_chunks = -(-L // CHUNK)
    q_BLHC, k_BLHC, v_BLHM, g_BLHc, beta_BLH, state_BHCM = delta_inputs.widen(
        q_BLGC, k_BLGC, v_BLHM, g_BLHc, beta_BLH, initial_state_BHCM, scale=scale
    )
    inputs = (q_BLHC, k_BLHC, v_BLHM, g_BLHc, beta_BLH[..., None])
    if segments is not None:
        inputs = delta_inputs.clear_padding(segments, inputs)
    q, k, v, g, beta = (_split(x, num_chunks) for x in inputs)
    borders = Borders.build(segments, B, num_chunks)

    kk, qk, from_start, to_end = decays(q, k, g, borders)
    from_start, to_end = jnp.where(borders.enters_NB1t1, from_start, 0), jnp.where(borders.leaves_NB1t1, to_end, 0)
    passing = jnp.where(borders.passes_NB111, from_start[..., -1:, :], 0).swapaxes(-1, -2)
    passing = jnp.broadcast_to(passing, (*k.shape[:3], k.shape[-1], 1))
    solve = inverse(jnp.where(borders.same_NB1tt & STRICT, beta * kk, 0)) * beta.swapaxes(-1, -2)
    written, state_BHCM, entering = carry_state(solve @ (from_start * k), solve @ v, to_end * k, passing, state_BHCM)
    o = (from_start * q) @ entering + jnp.where(borders.same_NB1tt & CAUSAL, qk, 0) @ written
    o_BLHM = o.transpose(1, 0, 3, 2, 4).reshape(B, num_chunks * CHUNK, *v_BLHM.shape[2:])[:, :L]
    return o_BLHM.astype(dtype), state_BHCM


def _split(x_BLHc, num_chunks: int):
    B, L, H, c = x_BLHc.shape
    x_BLHc = jnp.pad(x_BLHc, ((0, 0), (0, num_chunks * CHUNK - L), (0, 0), (0, 0)))
    return x_BLHc.reshape(B, num_chunks, CHUNK, H, c).transpose(1, 0, 3, 2, 4)


@jax.custom_vjp
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


def _inverse_save(a_tt):
    r_tt = inverse(a_tt)
    return r_tt, r_tt


def _inverse_grad(r_tt, dr_tt):
    turned_tt = r_tt.swapaxes(-1, -2)
    return (-(turned_tt @ dr_tt @ turned_tt),)


inverse.defvjp(_inverse_save, _inverse_grad)


@jax.custom_vjp
def carry_state(w_tC, u_tM, k_tC, passing_C1, state_BHCM):
    """The sequential part: `written = u - w S; S <- passing S + k' written` from chunk to chunk.

    Returns:
      written [N, B, H, t, M], the state after the last chunk, the state at the start of each chunk [N, B, H, C, M].
    """

    def step(state_CM, chunk):
        w_tC, u_tM, k_tC, passing_C1 = chunk
        written_tM = u_tM - w_tC @ state_CM
        return passing_C1 * state_CM + k_tC.swapaxes(-1, -2) @ written_tM, (written_tM, state_CM)

    final_BHCM, (written_tM, entering_CM) = lax.scan(step, state_BHCM, (w_tC, u_tM, k_tC, passing_C1))
    return written_tM, final_BHCM, entering_CM


def _carry_save(w_tC, u_tM, k_tC, passing_C1, state_BHCM):
    out = written_tM, _, entering_CM = carry_state(w_tC, u_tM, k_tC, passing_C1, state_BHCM)
    return out, (w_tC, k_tC, passing_C1, written_tM, entering_CM)


def _carry_grads(saved, grads):
    w_tC, k_tC, passing_C1, written_tM, entering_CM = saved
    dwritten_tM, dfinal_BHCM, dentering_CM = grads

    def step(dstate_CM, chunk):
        w_tC, k_tC, passing_C1, dwritten_tM, dentering_CM = chunk
        du_tM = dwritten_tM + k_tC @ dstate_CM
        return dentering_CM + passing_C1 * dstate_CM - w_tC.swapaxes(-1, -2) @ du_tM, (du_tM, dstate_CM)

    dstate_BHCM, (du_tM, dleaving_CM) = lax.scan(step, dfinal_BHCM, (w_tC, k_tC, passing_C1, dwritten_tM, dentering_CM), reverse=True)
    dw_tC = -(du_tM @ entering_CM.swapaxes(-1, -2))
    dk_tC = written_tM @ dleaving_CM.swapaxes(-1, -2)
    return dw_tC, du_tM, dk_tC, (entering_CM * dleaving_CM).sum(-1, keepdims=True), dstate_BHCM


carry_state.defvjp(_carry_save, _carry_grads)
