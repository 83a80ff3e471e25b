"""The index's loss on NVIDIA GPUs, in Triton: over chosen keys one program per query, over all visible keys tiles of both.

Chosen keys: one launch forward, which gathers the attention's keys twice per block of heads, and one launch and a cast backward. Saved
per token, beside the index inputs: K + 1 float32, the targets and the log-sum-exp of the index; neither q nor k is kept.
All keys: two launches forward, one and a cast backward. Saved beside all inputs: H + 1 float32 per token. [L, L] never exists.
"""

import functools
import math

from moejax_kernels.sparse_attention import triton_visible  # isort: skip (points Triton at its assembler: before triton)
import jax
import jax.numpy as jnp
import triton

from moejax_kernels import gpu
from moejax_kernels.index_kl.triton_chosen import gradient_of_chosen, loss_of_chosen
from moejax_kernels.index_kl.triton_dense import gradient_of_all, loss_of_all, lse_of_all
from moejax_kernels.index_kl.triton_shape import Shape
from moejax_kernels.sparse_attention.widths import parts
from moejax_kernels.triton_launch import launch


def index_kl(q_BLHC, k_BLGC, index_q_BLJC, index_k_BLC, index_w_BLJ, ids_BLK, *, scale, segments=None):
    q_BLHC, k_BLGC = jax.lax.stop_gradient((q_BLHC, k_BLGC))
    if ids_BLK is None:
        return _over_all(index_q_BLJC, index_k_BLC, index_w_BLJ, q_BLHC, k_BLGC, segments, float(scale))
    return _over_chosen(index_q_BLJC, index_k_BLC, index_w_BLJ, q_BLHC, k_BLGC, ids_BLK.astype(jnp.int32), segments, float(scale))


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _over_chosen(index_q_BLJC, index_k_BLC, index_w_BLJ, q_BLHC, k_BLGC, ids_BLK, segments, scale):
    return _save_chosen(index_q_BLJC, index_k_BLC, index_w_BLJ, q_BLHC, k_BLGC, ids_BLK, segments, scale)[0]


def _save_chosen(index_q_BLJC, index_k_BLC, index_w_BLJ, q_BLHC, k_BLGC, ids_BLK, segments, scale):
    index = index_q_BLJC, index_k_BLC, index_w_BLJ
    num_rows, length, num_chosen = ids_BLK.shape
    borders, mode = triton_visible.operands(segments, ids_BLK)
    shape = _shape(index_q_BLJC, q_BLHC, k_BLGC, num_chosen, mode)
    kl_BL = jax.ShapeDtypeStruct((num_rows, length), jnp.float32)
    kl_BL, lse_BL, target_BLK = launch(
        loss_of_chosen,
        *(q_BLHC, k_BLGC, *index, ids_BLK, *borders, length, scale),
        out_type=[kl_BL, kl_BL, jax.ShapeDtypeStruct(ids_BLK.shape, jnp.float32)],
        grid=num_rows * length,
        num_warps=4,
        num_stages=2,
        s=shape,
    )
    return kl_BL, (index, ids_BLK, segments, lse_BL, target_BLK)


def _grads_chosen(scale, saved, dkl_BL):
    index, ids_BLK, segments, lse_BL, target_BLK = saved
    index_q_BLJC, index_k_BLC, index_w_BLJ = index
    borders, mode = triton_visible.operands(segments, ids_BLK)
    one_head_BL1C = index_k_BLC[:, :, None]  # the attention's sizes are of no interest to this kernel
    dq_BLJC, dw_BLJ, dk_BLC = launch(
        gradient_of_chosen,
        *(*index, ids_BLK, *borders, ids_BLK.shape[1], lse_BL, target_BLK, dkl_BL),
        out_type=[index_q_BLJC, index_w_BLJ, jax.ShapeDtypeStruct(index_k_BLC.shape, jnp.float32)],
        grid=math.prod(lse_BL.shape),
        num_warps=8,
        num_stages=2,
        zeroed=(2,),
        s=_shape(index_q_BLJC, one_head_BL1C, one_head_BL1C, ids_BLK.shape[2], mode),
    )
    return dq_BLJC, dk_BLC.astype(index_k_BLC.dtype), dw_BLJ, None, None, None, None


_over_chosen.defvjp(_save_chosen, _grads_chosen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _over_all(index_q_BLJC, index_k_BLC, index_w_BLJ, q_BLHC, k_BLGC, segments, scale):
    return _save_all(index_q_BLJC, index_k_BLC, index_w_BLJ, q_BLHC, k_BLGC, segments, scale)[0]


def _save_all(index_q_BLJC, index_k_BLC, index_w_BLJ, q_BLHC, k_BLGC, segments, scale):
    index = index_q_BLJC, index_k_BLC, index_w_BLJ
    num_rows, length, num_heads, _ = q_BLHC.shape
    borders, shape = _all_operands(index_q_BLJC, q_BLHC, k_BLGC, segments)
    tiles = num_rows * -(-length // shape.BQ)
    (attention_lse_BHL,) = launch(
        lse_of_all,
        *(q_BLHC, k_BLGC, *borders, length, scale),
        out_type=[jax.ShapeDtypeStruct((num_rows, num_heads, length), jnp.float32)],
        grid=tiles * num_heads,
        num_warps=8,
        s=shape,
    )
    kl_BL = jax.ShapeDtypeStruct((num_rows, length), jnp.float32)
    kl_BL, lse_BL = launch(
        loss_of_all,
        *(q_BLHC, k_BLGC, *index, *borders, length, scale, attention_lse_BHL),
        out_type=[kl_BL, kl_BL],
        grid=tiles,
        num_warps=8,
        s=shape,
    )
    return kl_BL, (index, q_BLHC, k_BLGC, segments, attention_lse_BHL, lse_BL)


def _grads_all(scale, saved, dkl_BL):
    index, q_BLHC, k_BLGC, segments, attention_lse_BHL, lse_BL = saved
    num_rows, length = lse_BL.shape
    borders, shape = _all_operands(index[0], q_BLHC, k_BLGC, segments)
    index_q_BLJC, index_k_BLC, index_w_BLJ = index
    sums = [jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in (index_q_BLJC, index_w_BLJ, index_k_BLC)]
    dq_BLJC, dw_BLJ, dk_BLC = launch(
        gradient_of_all,
        *(q_BLHC, k_BLGC, *index, *borders, length, scale, attention_lse_BHL, lse_BL, dkl_BL),
        out_type=sums,
        grid=num_rows * -(-length // shape.BQ) * -(-length // shape.BK),
        num_warps=8,
        zeroed=(0, 1, 2),
        s=shape,
    )
    return dq_BLJC.astype(index_q_BLJC.dtype), dk_BLC.astype(index_k_BLC.dtype), dw_BLJ.astype(index_w_BLJ.dtype), None, None, None


_over_all.defvjp(_save_all, _grads_all)


def _all_operands(index_q_BLJC, q_BLHC, k_BLGC, segments):
    stand_in = jnp.zeros((1,), jnp.int32)
    borders, mode = triton_visible.operands(segments, stand_in)
    starts_BL = stand_in if segments is None else jnp.asarray(segments.starts_BL)
    return (starts_BL, *borders), _shape(index_q_BLJC, q_BLHC, k_BLGC, 0, mode)


def _shape(index_q_BLJC, q_BLHC, k_BLGC, num_chosen, mode):
    num_heads, num_key_heads, width = q_BLHC.shape[2], *k_BLGC.shape[2:]
    C1, C2 = parts(width)
    num_index_heads, index_width = index_q_BLJC.shape[2:]
    in_float32 = q_BLHC.dtype == jnp.float32
    old = "A100" in (gpu.device_kind() or "")
    heads = max(16, triton.next_power_of_2(num_heads // num_key_heads))
    return Shape(
        H=num_heads,
        G=num_key_heads,
        C=width,
        C1=C1,
        C2=C2,
        STEP=min(C2 or C1, 64),
        J=num_index_heads,
        JP=max(16, triton.next_power_of_2(num_index_heads)),
        I=index_width,
        IP=triton.next_power_of_2(index_width),
        K=num_chosen,
        KP=triton.next_power_of_2(max(num_chosen, 1)),
        BH=min(heads, 16 if in_float32 else 32 if width > 256 else 64),
        BQ=16 if in_float32 else 64,
        BK=16 if in_float32 else 32 if (width > 256 if num_chosen else old) else 64,
        segments=mode,
        precision="tf32x3" if in_float32 else "ieee",
    )
