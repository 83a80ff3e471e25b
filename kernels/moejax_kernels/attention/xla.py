"""Attention in tiles of queries and keys; tiles that no query sees are left out. Saves its inputs, its output and a number per query and head.

Queries are the last L positions of a row of S. Inside, arrays are head-major: [B, G, L, N, ...], N query heads to a key head.
Source: the online softmax of FlashAttention, Dao et al. 2022.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax_kernels import saved
from moejax_kernels.query_blocks import MIN_QUERIES
from moejax_kernels.varying import vary_alike
from moejax_kernels.visibility import chosen, visible

TILE_KEYS = 128
TILE_NUMBERS = 2**18
"""Scores of one tile, all rows and heads together, about: what stays in a cache."""


def attention(q_BLHC, k_BSGC, v_BSGM, *, scale, segments=None, window=None, sinks_H=None):
    return masked_attention(q_BLHC, k_BSGC, v_BSGM, None, sinks_H, segments, scale=scale, window=window)


def masked_attention(q_BLHC, k_BSGC, v_BSGM, ids_BLK, sinks_H, segments, *, scale, window=None):
    """Attention over the visible keys, and of those only the ones that ids_BLK names unless it is None."""
    return _attend(*vary_alike(q_BLHC, k_BSGC, v_BSGM, ids_BLK, sinks_H, segments), scale, window)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attend(q_BLHC, k_BSGC, v_BSGM, ids_BLK, sinks_H, segments, scale, window):
    return _save(q_BLHC, k_BSGC, v_BSGM, ids_BLK, sinks_H, segments, scale, window)[0]


def _save(q_BLHC, k_BSGC, v_BSGM, ids_BLK, sinks_H, segments, scale, window):
    tiles = _Tiles.build(q_BLHC, k_BSGC, ids_BLK, segments, window)
    inside = jnp.promote_types(q_BLHC.dtype, jnp.float32)
    dot = functools.partial(jnp.einsum, preferred_element_type=inside)
    q_BGLNC, k_BGKC, v_BGKM = tiles.of_queries(q_BLHC), tiles.of_keys(k_BSGC), tiles.of_keys(v_BSGM)
    sinks_G1N = None if sinks_H is None else sinks_H.astype(inside).reshape(k_BSGC.shape[2], 1, -1)

    def forward(_, number):
        q_BGQNC = tiles.queries(q_BGLNC, number)
        sees = tiles.visibility(number)

        def add(tile, sums):
            peak_BGQN, total_BGQN, o_BGQNM = sums
            scores_BGQNK = _scores(dot, q_BGQNC, tiles.keys(k_BGKC, tile), sees(tile), scale)
            new_peak_BGQN = jnp.maximum(peak_BGQN, jnp.max(scores_BGQNK, axis=-1))
            around_BGQN = _finite(new_peak_BGQN)
            weights_BGQNK, keep_BGQN = jnp.exp(scores_BGQNK - around_BGQN[..., None]), jnp.exp(peak_BGQN - around_BGQN)
            o_tile_BGQNM = dot("BGQNK,BGKM->BGQNM", weights_BGQNK.astype(v_BSGM.dtype), tiles.keys(v_BGKM, tile))
            total_BGQN = keep_BGQN * total_BGQN + jnp.sum(weights_BGQNK, axis=-1)
            return new_peak_BGQN, total_BGQN, keep_BGQN[..., None] * o_BGQNM + o_tile_BGQNM

        nothing = jnp.full(q_BGQNC.shape[:-1], -jnp.inf, inside), jnp.zeros(q_BGQNC.shape[:-1], inside)
        start = vary_alike(*nothing, jnp.zeros((*q_BGQNC.shape[:-1], v_BSGM.shape[-1]), inside), q_BGQNC)[:3]
        peak_BGQN, total_BGQN, o_BGQNM = jax.lax.fori_loop(*tiles.seen(number), add, start)
        if sinks_G1N is not None:
            around_BGQN = jnp.maximum(peak_BGQN, sinks_G1N)
            keep_BGQN = jnp.exp(peak_BGQN - around_BGQN)
            total_BGQN, o_BGQNM = keep_BGQN * total_BGQN + jnp.exp(sinks_G1N - around_BGQN), keep_BGQN[..., None] * o_BGQNM
            peak_BGQN = around_BGQN
        total_BGQN = jnp.where(total_BGQN > 0, total_BGQN, 1)  # a query that sees nothing
        o_BGQNM = (o_BGQNM / total_BGQN[..., None]).astype(q_BLHC.dtype)
        return None, (o_BGQNM, _finite(peak_BGQN) + jnp.log(total_BGQN))

    _, (o, log_total) = jax.lax.scan(forward, None, jnp.arange(tiles.num_blocks))
    o_BLHM, log_total_BLH = checkpoint_name((tiles.join(o), tiles.join(log_total[..., None])[..., 0]), saved.ATTENTION)
    return o_BLHM, (q_BLHC, k_BSGC, v_BSGM, ids_BLK, sinks_H, segments, o_BLHM, log_total_BLH)


def _grads(scale, window, kept, do_BLHM):
    q_BLHC, k_BSGC, v_BSGM, ids_BLK, sinks_H, segments, o_BLHM, log_total_BLH = kept
    tiles = _Tiles.build(q_BLHC, k_BSGC, ids_BLK, segments, window)
    inside = log_total_BLH.dtype
    dot = functools.partial(jnp.einsum, preferred_element_type=inside)
    delta_BLH = jnp.sum(do_BLHM.astype(inside) * o_BLHM.astype(inside), axis=-1)
    q_BGLNC, do_BGLNM, k_BGKC, v_BGKM = tiles.of_queries(q_BLHC), tiles.of_queries(do_BLHM), tiles.of_keys(k_BSGC), tiles.of_keys(v_BSGM)
    log_total_BGLN1, delta_BGLN1 = tiles.of_queries(log_total_BLH[..., None]), tiles.of_queries(delta_BLH[..., None])

    def backward(sums, number):
        q_BGQNC, do_BGQNM, log_total_BGQN1, delta_BGQN1 = (
            tiles.queries(x, number) for x in (q_BGLNC, do_BGLNM, log_total_BGLN1, delta_BGLN1)
        )
        sees = tiles.visibility(number)
        flat = lambda x_BGQNX: x_BGQNX.reshape(*x_BGQNX.shape[:2], -1, x_BGQNX.shape[-1])
        q_BGCR, do_BGMR = jax.lax.optimization_barrier(tuple(flat(x).swapaxes(2, 3) for x in (q_BGQNC, do_BGQNM)))  # R: Q and N

        def add(tile, sums):
            dk_BGCK, dv_BGMK, dq_BGQNC = sums
            k_BGTC, v_BGTM = tiles.keys(k_BGKC, tile), tiles.keys(v_BGKM, tile)
            probs_BGQNT = jnp.exp(_scores(dot, q_BGQNC, k_BGTC, sees(tile), scale) - log_total_BGQN1)
            dprobs_BGQNT = dot("BGQNM,BGTM->BGQNT", do_BGQNM, v_BGTM)
            dscores_BGQNT = (scale * probs_BGQNT * (dprobs_BGQNT - delta_BGQN1)).astype(q_BLHC.dtype)
            dk_BGCT = dot("BGCR,BGRT->BGCT", q_BGCR, flat(dscores_BGQNT))
            dv_BGMT = dot("BGMR,BGRT->BGMT", do_BGMR, flat(probs_BGQNT.astype(do_BLHM.dtype)))
            dq_BGQNC += dot("BGQNT,BGTC->BGQNC", dscores_BGQNT, k_BGTC)
            return tiles.add_keys(dk_BGCK, dk_BGCT, tile), tiles.add_keys(dv_BGMK, dv_BGMT, tile), dq_BGQNC

        start = vary_alike(jnp.zeros(q_BGQNC.shape, inside), q_BGQNC)[0]
        *sums, dq_BGQNC = jax.lax.fori_loop(*tiles.seen(number), add, (*sums, start))
        return tuple(sums), dq_BGQNC.astype(q_BLHC.dtype)

    zeros = vary_alike(*(jnp.zeros((*x.shape[:2], x.shape[3], x.shape[2]), inside) for x in (k_BGKC, v_BGKM)), do_BLHM)[:2]
    (dk_BGCK, dv_BGMK), dq = jax.lax.scan(backward, zeros, jnp.arange(tiles.num_blocks))
    # turned on its own: a fusion of what comes next (a rotation) would read it column by column
    dk_BSGC, dv_BSGM = (jax.lax.optimization_barrier(x.transpose(0, 3, 1, 2))[:, : tiles.num_keys] for x in (dk_BGCK, dv_BGMK))
    dsinks_H = None
    if sinks_H is not None:
        dsinks_H = -jnp.sum(jnp.exp(sinks_H.astype(inside) - log_total_BLH) * delta_BLH, axis=(0, 1)).astype(sinks_H.dtype)
    return tiles.join(dq), dk_BSGC.astype(k_BSGC.dtype), dv_BSGM.astype(v_BSGM.dtype), None, dsinks_H, None


_attend.defvjp(_save, _grads)


def _finite(peak_BGQN):
    """0 for the peak of nothing."""
    return jnp.where(jnp.isfinite(peak_BGQN), peak_BGQN, 0)


def _scores(dot, q_BGQNC, k_BGTC, allowed_BQT, scale):
    scores_BGQNT = scale * dot("BGQNC,BGTC->BGQNT", q_BGQNC, k_BGTC)
    return jnp.where(allowed_BQT[:, None, :, None], scores_BGQNT, -jnp.inf)  # exp makes an exact 0 of it


class _Tiles(NamedTuple):
    """How a row is cut: blocks of queries, tiles of keys. Both ends are filled up with zeros."""

    block: int
    """Queries of one block."""
    tile: int
    """Keys of one tile."""
    length: int
    """Queries of a row."""
    num_keys: int
    """Keys of a row; the first query stands at position num_keys - length."""
    num_key_heads: int
    window: int | None
    segments: Any
    ids_BLK: Any

    @classmethod
    def build(cls, q_BLHC, k_BSGC, ids_BLK, segments, window):
        num_rows, length, num_heads, _ = q_BLHC.shape
        num_keys = k_BSGC.shape[1]
        tile = min(num_keys, TILE_KEYS)
        block = min(length, max(MIN_QUERIES, TILE_NUMBERS // (num_rows * num_heads * tile)))
        return cls(block, tile, length, num_keys, k_BSGC.shape[2], window, segments, ids_BLK)

    @property
    def num_blocks(self) -> int:
        return -(-self.length // self.block)

    def of_queries(self, x_BLHC):
        """[B, L, H, C] -> [B, G, whole blocks, N, C]."""
        B, L, H, C = x_BLHC.shape
        x_BLHC = jnp.pad(x_BLHC, ((0, 0), (0, -L % self.block), (0, 0), (0, 0)))
        return x_BLHC.reshape(B, -1, self.num_key_heads, H // self.num_key_heads, C).transpose(0, 2, 1, 3, 4)

    def of_keys(self, x_BSGC):
        """[B, S, G, C] -> [B, G, whole tiles, C]."""
        return jnp.pad(x_BSGC, ((0, 0), (0, -self.num_keys % self.tile), (0, 0), (0, 0))).transpose(0, 2, 1, 3)

    def join(self, x_nBGQNC):
        """The blocks' [n, B, G, Q, N, C] -> [B, L, H, C]."""
        n, B, G, Q, N, C = x_nBGQNC.shape
        return x_nBGQNC.transpose(1, 0, 3, 2, 4, 5).reshape(B, n * Q, G * N, C)[:, : self.length]

    def queries(self, x_BGLNC, number):
        return jax.lax.dynamic_slice_in_dim(x_BGLNC, number * self.block, self.block, axis=2)

    def keys(self, x_BGKC, tile):
        return jax.lax.dynamic_slice_in_dim(x_BGKC, tile * self.tile, self.tile, axis=2)

    def add_keys(self, sum_BGCK, d_BGCT, tile):
        old_BGCT = jax.lax.dynamic_slice_in_dim(sum_BGCK, tile * self.tile, self.tile, axis=3)
        return jax.lax.dynamic_update_slice_in_dim(sum_BGCK, old_BGCT + d_BGCT, tile * self.tile, axis=3)

    def seen(self, number):
        """First tile that a block of queries may see, and one past the last."""
        first = self.num_keys - self.length + number * self.block
        end = jnp.minimum(first + self.block, self.num_keys)
        start = jnp.zeros_like(first) if self.window is None else jnp.maximum(first + 1 - self.window, 0)
        if self.segments is not None:
            in_tree = self.segments.ancestor_BUU is not None  # a parent may lie far to the left
            starts_BS = jnp.pad(
                jnp.asarray(self.segments.starts_BL), ((0, 0), (0, -self.length % self.block)), constant_values=self.num_keys
            )
            start_of_document = jnp.min(jax.lax.dynamic_slice_in_dim(starts_BS, first, self.block, axis=1))
            start = jnp.zeros_like(first) if in_tree else jnp.maximum(start, start_of_document)
        return start // self.tile, -(-end // self.tile)

    def visibility(self, number):
        """Function of a tile to bool [1 or B, Q, T]: which query of a block may see which of its keys."""
        query_Q = self.num_keys - self.length + number * self.block + jnp.arange(self.block, dtype=jnp.int32)
        chosen_BQK = None
        if self.ids_BLK is not None:
            num_keys = self.num_keys + -self.num_keys % self.tile
            ids_BLK = jnp.pad(self.ids_BLK, ((0, 0), (0, -self.length % self.block), (0, 0)), constant_values=-1)
            chosen_BQK = chosen(jax.lax.dynamic_slice_in_dim(ids_BLK, number * self.block, self.block, axis=1), num_keys)

        def sees(tile):
            key_T = tile * self.tile + jnp.arange(self.tile, dtype=jnp.int32)
            inside_T = key_T < self.num_keys
            key_T, at_Q = jnp.minimum(key_T, self.num_keys - 1), jnp.minimum(query_Q, self.num_keys - 1)
            allowed_BQT = visible(self.segments, at_Q, key_T, window=self.window) & inside_T
            if chosen_BQK is not None:
                allowed_BQT &= jax.lax.dynamic_slice_in_dim(chosen_BQK, tile * self.tile, self.tile, axis=2)
            return jax.lax.optimization_barrier(allowed_BQT)  # made once, not anew for each head in what reads it

        return sees
