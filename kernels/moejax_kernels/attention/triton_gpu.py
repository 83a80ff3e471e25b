"""Attention on GPUs that never holds scores in memory: one launch forward; two backward, four where few key heads would leave the GPU idle.

Forward reads k and v once per tile of queries (mostly from cache) and writes o and one float32 per query and head. Backward has one
kernel for the queries' gradients, which also sums o * do, and one for those of keys and values: scores are redone in both, 7 products
of tiles instead of 5, and nothing is added with atomics. Tiles of which no pair is visible are skipped. Tiles of which every pair is
visible are not masked, but in trees and in the keys' kernel, where a second loop costs registers that it does not have. Saved for backward: q, k,
v, o, the 4-byte logarithm per query and head, and what the caller holds anyway.

Sources: Dao 2023, arXiv 2307.08691 (FlashAttention-2): online softmax and the two loops of backward.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax_kernels import gpu, saved
from moejax_kernels.visibility import tree_positions

from moejax_kernels.triton_launch import launch  # isort: skip (before triton)
import triton

from moejax_kernels.attention import triton_backward, triton_forward
from moejax_kernels.sparse_attention.triton_visible import DOCUMENTS, NO_SEGMENTS, TREES

LOG2E = 1.4426950408889634
ENOUGH_PROGRAMS = 264
"""Two for each processor of an H200: below it, key_gradients splits the query heads of a key head among programs."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """Queries and keys of one step of a kernel, warps of a program, and steps whose loads are under way."""

    queries: int
    keys: int
    warps: int
    stages: int

    def halved(self) -> "Tile":
        """Half as wide either way: in trees, looking up who sees whom takes registers too."""
        return dataclasses.replace(self, queries=max(self.queries // 2, 32), keys=max(self.keys // 2, 32))

    def launched(self) -> dict:
        return {"QUERIES": self.queries, "KEYS": self.keys, "num_warps": self.warps, "num_stages": self.stages}


def tiles(kind: str | None, C: int, M: int, dtype) -> tuple[Tile, Tile, Tile]:
    """Of forward, query_gradients and key_gradients: about the largest that the assembler fits into registers without spilling.

    On Hopper and older the sums of gradients lie in registers, 32 keys or queries of 256 channels for each 64 registers of 256 threads;
    on Blackwell in a memory of their own.
    """
    wide = max(C, M)
    ampere, blackwell = "A100" in (kind or ""), "B200" in (kind or "")
    if jnp.dtype(dtype).itemsize == 4:
        return Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)
    if wide > 192:
        return Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(64, 64 if blackwell else 32, 8, 1)
    if wide > 128:
        return Tile(128, 64, 8, 2), Tile(32 if ampere else 64, 64, 8, 2), Tile(64, 32 if ampere else 64, 8, 1)
    return Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 1) if blackwell else Tile(64, 64, 8, 1 if ampere else 2)


def attention(q_BLHC, k_BSGC, v_BSGM, *, scale, segments=None, window=None, sinks_H=None):
    borders = None if segments is None else Borders.build(segments, window)
    return _attend(q_BLHC, k_BSGC, v_BSGM, sinks_H, borders, float(scale), window)


class Borders(NamedTuple):
    """What the kernels read of segments."""

    first_BS: Any
    """First key that a token may see: its document's start, in a tree that of the root."""
    last_BS: Any
    """One past the last token that may see it: its document's end, in a tree that of the last descendant; itself for padding."""
    ends_BS: Any
    """One past the end of its segment; itself for padding."""
    tree: Any = None
    """Trees: number of its segment [B, S], int8 [B, U, U] which segments a segment sees, and with a window positions in the document."""

    @classmethod
    def build(cls, segments, window) -> "Borders":
        starts_BS, ends_BS = jnp.asarray(segments.starts_BL), jnp.asarray(segments.ends_BL)
        if segments.index_BL is None:
            return cls(starts_BS, ends_BS, ends_BS)
        index_BS, first_BU, ancestor_BUU = (jnp.asarray(x) for x in (segments.index_BL, segments.first_BU, segments.ancestor_BUU))
        root_BU = jnp.min(jnp.where(ancestor_BUU, first_BU[:, None, :], ends_BS.shape[1]), axis=2)
        last_BU = jnp.max(jnp.where(ancestor_BUU, (first_BU + segments.sizes())[:, :, None], 0), axis=1)
        of_token = lambda array_BU: jnp.take_along_axis(array_BU, index_BS, axis=1)
        last_BS = jnp.where(jnp.asarray(segments.ids_BL) < 0, ends_BS, of_token(last_BU))
        positions_BS = index_BS if window is None else tree_positions(segments)  # not read without a window
        return cls(of_token(root_BU), last_BS, ends_BS, (index_BS, ancestor_BUU.astype(jnp.int8), positions_BS))


def _operands(borders: Borders | None, stand_in):
    """first_BS, last_BS, ends_BS, and of trees index, ancestors, positions and U; the stand-in where a kernel reads nothing."""
    first_BS, last_BS, ends_BS, tree = borders or Borders(stand_in, stand_in, stand_in)
    return first_BS, last_BS, ends_BS, (stand_in, stand_in, stand_in, 0) if tree is None else (*tree, tree[1].shape[1])


def _constants(q_BLHC, k_BSGC, v_BSGM, borders, scale, window):
    """What all kernels take, and the tiles of each."""
    L, H, C = q_BLHC.shape[1:]
    S, G, M = v_BSGM.shape[1:]
    (C1, C2), (M1, M2) = _parts(C), _parts(M)
    constants = {"L": L, "S": S, "H": H, "G": G, "C1": C1, "C2": C2, "M1": M1, "M2": M2, "SCALE": scale, "WINDOW": min(window or 0, S)}
    kind = NO_SEGMENTS if borders is None else DOCUMENTS if borders.tree is None else TREES
    constants |= {"SEGMENTS": kind, "PRECISION": "tf32x3" if q_BLHC.dtype == jnp.float32 else "tf32"}
    sizes = tiles(gpu.device_kind(), C, M, q_BLHC.dtype)
    return constants, tuple(size.halved() for size in sizes) if kind == TREES else sizes


def _parts(width: int) -> tuple[int, int]:
    first = 1 << (width.bit_length() - 1)
    return first, width - first


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(q_BLHC, k_BSGC, v_BSGM, sinks_H, borders, scale, window):
    return _save(q_BLHC, k_BSGC, v_BSGM, sinks_H, borders, scale, window)[0]


def _save(q_BLHC, k_BSGC, v_BSGM, sinks_H, borders, scale, window):
    B, L, H, _ = q_BLHC.shape
    constants, (tile, _, _) = _constants(q_BLHC, k_BSGC, v_BSGM, borders, scale, window)
    first_BS, _, ends_BS, tree = _operands(borders, q_BLHC)
    o_BLHM, log_total_BHL = launch(
        triton_forward.forward,
        q_BLHC,
        k_BSGC,
        v_BSGM,
        q_BLHC if sinks_H is None else sinks_H,
        first_BS,
        ends_BS,
        *tree,
        out_type=[
            jax.ShapeDtypeStruct((B, L, H, v_BSGM.shape[3]), q_BLHC.dtype),
            jax.ShapeDtypeStruct((B, H, L), jnp.float32),
        ],
        grid=(triton.cdiv(L, tile.queries), H, B),
        HAS_SINKS=sinks_H is not None,
        **constants,
        **tile.launched(),
    )
    o_BLHM, log_total_BHL = checkpoint_name((o_BLHM, log_total_BHL), saved.ATTENTION)
    return o_BLHM, (q_BLHC, k_BSGC, v_BSGM, sinks_H, borders, o_BLHM, log_total_BHL)


def _grads(scale, window, kept, do_BLHM):
    q_BLHC, k_BSGC, v_BSGM, sinks_H, borders, o_BLHM, log_total_BHL = kept
    B, L, H, _ = q_BLHC.shape
    constants, (_, tile, _) = _constants(q_BLHC, k_BSGC, v_BSGM, borders, scale, window)
    first_BS, _, ends_BS, tree = _operands(borders, q_BLHC)
    dq_BLHC, delta_BHL = launch(
        triton_backward.query_gradients,
        q_BLHC,
        k_BSGC,
        v_BSGM,
        o_BLHM,
        do_BLHM,
        log_total_BHL,
        first_BS,
        ends_BS,
        *tree,
        out_type=[q_BLHC, log_total_BHL],
        grid=(triton.cdiv(L, tile.queries), H, B),
        **constants,
        **tile.launched(),
    )
    dk_BSGC, dv_BSGM = _key_gradients(kept, do_BLHM, delta_BHL, scale, window)
    dsinks_H = None
    if sinks_H is not None:
        share_BHL = jnp.exp2(sinks_H.astype(jnp.float32)[:, None] * LOG2E - log_total_BHL)
        dsinks_H = -jnp.sum(share_BHL * delta_BHL, axis=(0, 2)).astype(sinks_H.dtype)
    return dq_BLHC, dk_BSGC, dv_BSGM, dsinks_H, None


def _key_gradients(kept, do_BLHM, delta_BHL, scale, window):
    q_BLHC, k_BSGC, v_BSGM, _, borders, _, log_total_BHL = kept
    B, S, G, _ = k_BSGC.shape
    _, last_BS, _, tree = _operands(borders, q_BLHC)
    constants, (_, _, tile) = _constants(q_BLHC, k_BSGC, v_BSGM, borders, scale, window)
    num_tiles = triton.cdiv(S, tile.keys)
    splits = num_splits(num_tiles * G * B, q_BLHC.shape[2] // G)
    out_dtype = k_BSGC.dtype if splits == 1 else jnp.float32
    dk_ZBSGC, dv_ZBSGM = launch(
        triton_backward.key_gradients,
        q_BLHC,
        k_BSGC,
        v_BSGM,
        do_BLHM,
        log_total_BHL,
        delta_BHL,
        last_BS,
        *tree,
        out_type=[jax.ShapeDtypeStruct((splits, *like.shape), out_dtype) for like in (k_BSGC, v_BSGM)],
        grid=(num_tiles, G * splits, B),
        SPLITS=splits,
        **constants,
        **tile.launched(),
    )
    if splits == 1:
        return dk_ZBSGC[0], dv_ZBSGM[0]
    return dk_ZBSGC.sum(axis=0).astype(k_BSGC.dtype), dv_ZBSGM.sum(axis=0).astype(v_BSGM.dtype)


def num_splits(programs: int, heads_per_key: int) -> int:
    """Parts into which the query heads of a key head are cut, so that there are programs enough."""
    wanted = math.ceil(ENOUGH_PROGRAMS / programs)
    return next(parts for parts in range(min(wanted, heads_per_key), heads_per_key + 1) if heads_per_key % parts == 0)


_attend.defvjp(_save, _grads)
