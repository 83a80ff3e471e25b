"""Sparse attention on NVIDIA GPUs, in Triton: each program gathers the chosen keys of one query and serves many of its heads.

The heads of a query share its keys, so they are the rows of the matmuls: with one latent key head (MLA) 128 rows over the same 576
channels. Widths that are no power of two are two tiles: 576 = 512 + 64, 192 = 128 + 64, 96 = 64 + 32.
Bytes per query: K rows of k and v per key head and block of heads, mostly from the L2 cache, for the output and for dq; once per key
head for dk and dv, which add as many float32. Saved for backward per token, beside q, k, v, ids and o: H float32.
"""

import functools
import math

from moejax_kernels.triton_launch import launch  # isort: skip (points Triton at its assembler: before triton)
import jax
import jax.numpy as jnp
import triton
from jax.ad_checkpoint import checkpoint_name

from moejax_kernels import gpu, saved
from moejax_kernels.sparse_attention import triton_visible
from moejax_kernels.sparse_attention.triton_backward import cast_both, gradient_of_keys, gradient_of_queries
from moejax_kernels.sparse_attention.triton_forward import attend
from moejax_kernels.sparse_attention.triton_tiles import Shape
from moejax_kernels.sparse_attention.widths import parts

CAST = 4096
"""Numbers of each of two arrays that one program casts."""


def sparse_attention(q_BLHC, k_BLGC, v_BLGM, ids_BLK, *, scale, value_dim=None, segments=None):
    return _attention(q_BLHC, k_BLGC, v_BLGM, ids_BLK.astype(jnp.int32), segments, float(scale), value_dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(q_BLHC, k_BLGC, v_BLGM, ids_BLK, segments, scale, value_dim):
    return _forward(q_BLHC, k_BLGC, v_BLGM, ids_BLK, segments, scale, value_dim)[0]


def _forward(q_BLHC, k_BLGC, v_BLGM, ids_BLK, segments, scale, value_dim):
    num_rows, length, num_heads, _ = q_BLHC.shape
    inputs, shape, options = _prepare("forward", q_BLHC, k_BLGC, v_BLGM, ids_BLK, segments, value_dim)
    o_BLHM = jax.ShapeDtypeStruct((num_rows, length, num_heads, shape.M1 + shape.M2), q_BLHC.dtype)
    lse_BLH = jax.ShapeDtypeStruct((num_rows, length, num_heads), jnp.float32)
    return launch(attend, *inputs, length, scale, out_type=[o_BLHM, lse_BLH], grid=_num_queries(q_BLHC, shape), s=shape, **options)


def _save(q_BLHC, k_BLGC, v_BLGM, ids_BLK, segments, scale, value_dim):
    o_BLHM, lse_BLH = _forward(q_BLHC, k_BLGC, v_BLGM, ids_BLK, segments, scale, value_dim)
    o_BLHM, lse_BLH = checkpoint_name((o_BLHM, lse_BLH), saved.ATTENTION)
    return o_BLHM, (q_BLHC, k_BLGC, v_BLGM, ids_BLK, segments, o_BLHM, lse_BLH)


def _grads(scale, value_dim, kept, do_BLHM):
    q_BLHC, k_BLGC, v_BLGM, ids_BLK, segments, o_BLHM, lse_BLH = kept
    length = q_BLHC.shape[1]
    inputs, shape, options = _prepare("queries", q_BLHC, k_BLGC, v_BLGM, ids_BLK, segments, value_dim)
    dq_BLHC, delta_BLH = launch(
        gradient_of_queries,
        *(*inputs, length, scale, o_BLHM, lse_BLH, do_BLHM),
        out_type=[q_BLHC, lse_BLH],
        grid=_num_queries(q_BLHC, shape),
        s=shape,
        **options,
    )
    inputs, shape, options = _prepare("keys", q_BLHC, k_BLGC, v_BLGM, ids_BLK, segments, value_dim)
    dv_shape = (1,) if v_BLGM is None else v_BLGM.shape  # latent keys: the values' gradient goes into dk, nothing into this one number
    dk_BLGC, dv_BLGM = launch(
        gradient_of_keys,
        *(*inputs, length, scale, lse_BLH, delta_BLH, do_BLHM),
        out_type=[jax.ShapeDtypeStruct(k_BLGC.shape, jnp.float32), jax.ShapeDtypeStruct(dv_shape, jnp.float32)],
        grid=_num_queries(q_BLHC, shape) * -(-shape.K // shape.BK),
        zeroed=(0, 1),
        s=shape,
        **options,
    )
    if v_BLGM is None:
        return dq_BLHC, dk_BLGC.astype(k_BLGC.dtype), None, None, None
    if k_BLGC.dtype != jnp.float32:
        widest = max(dk_BLGC.size, dv_BLGM.size)
        options = {"grid": triton.cdiv(widest, CAST), "num_warps": 8, "SIZE": CAST}
        dk_BLGC, dv_BLGM = launch(cast_both, dk_BLGC, dv_BLGM, dk_BLGC.size, dv_BLGM.size, out_type=[k_BLGC, v_BLGM], **options)
    return dq_BLHC, dk_BLGC, dv_BLGM, None, None


_attention.defvjp(_save, _grads)


def _prepare(kernel: str, q_BLHC, k_BLGC, v_BLGM, ids_BLK, segments, value_dim):
    """Operands that all kernels begin with, the shape that one is compiled for, and its warps and stages."""
    (C1, C2), (M1, M2) = parts(k_BLGC.shape[3]), parts(value_dim if v_BLGM is None else v_BLGM.shape[3])
    borders, mode = triton_visible.operands(segments, ids_BLK)
    num_heads, num_key_heads, num_chosen = q_BLHC.shape[2], k_BLGC.shape[2], ids_BLK.shape[2]
    BH, BK, num_warps, num_stages = _tile(kernel, num_heads // num_key_heads, C1 + C2 + M1 + M2, q_BLHC.dtype.itemsize)
    shape = Shape(
        H=num_heads,
        G=num_key_heads,
        C1=C1,
        C2=C2,
        M1=M1,
        M2=M2,
        K=num_chosen,
        KP=triton.next_power_of_2(num_chosen),
        BH=BH,
        BK=BK,
        STEP=min(C2 or C1, M2 or M1, 64),
        latent=v_BLGM is None,
        segments=mode,
        precision="tf32x3" if q_BLHC.dtype == jnp.float32 else "ieee",
    )
    inputs = q_BLHC, k_BLGC, k_BLGC if v_BLGM is None else v_BLGM, ids_BLK, *borders
    return inputs, shape, {"num_warps": num_warps, "num_stages": num_stages}


def _num_queries(q_BLHC, shape: Shape) -> int:
    """Programs of the kernels that go from query to query."""
    return math.prod(q_BLHC.shape[:2]) * shape.G * -(-shape.H // shape.G // shape.BH)


def _tile(kernel: str, heads_per_key_head: int, channels: int, itemsize: int) -> tuple[int, int, int, int]:
    """Heads and keys of a tile, warps and stages: the largest without spilled registers."""
    old = "A100" in (gpu.device_kind() or "")
    most = TILES[kernel, channels > 512, old]
    heads = min(most[0], max(16, triton.next_power_of_2(heads_per_key_head)))
    if itemsize > 2:  # float32: for checks; small enough for any
        return 16, 16, most[2], 1
    return heads, *most[1:]


TILES = {
    ("forward", False, False): (64, 64, 4, 2),
    ("forward", False, True): (64, 64, 4, 2),
    ("forward", True, False): (64, 32, 8, 2),
    ("forward", True, True): (32, 32, 8, 2),
    ("queries", False, False): (64, 32, 4, 2),
    ("queries", False, True): (64, 32, 4, 2),
    ("queries", True, False): (32, 32, 8, 1),
    ("queries", True, True): (32, 32, 8, 1),
    ("keys", False, False): (128, 64, 8, 2),
    ("keys", False, True): (128, 64, 8, 2),
    ("keys", True, False): (128, 64, 8, 2),
    ("keys", True, True): (128, 64, 8, 2),
}
"""(Kernel, more than 512 channels of keys and values together, A100) -> heads, keys, warps, stages."""
