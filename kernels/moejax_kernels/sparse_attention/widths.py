"""What the GPU kernels of sparse attention take, in words that need no Triton."""

import jax.numpy as jnp

from moejax_kernels import gpu

WIDTHS = (64, 96, 128, 192, 256, 576)
VALUE_WIDTHS = (64, 96, 128, 192, 256, 512)


def parts(width: int) -> tuple[int, int]:
    """A width as a power of two and the rest, which is one too, or 0: 576 = 512 + 64."""
    first = 1 << (width.bit_length() - 1)
    return first, width - first


def why_no_triton(q_BLHC, k_BLGC, v_BLGM, ids_BLK, value_dim) -> str | None:
    """Why the Triton kernels cannot run these arrays here, and what can; None if they can."""
    if reason := gpu.why_no_triton() or why_not_these(q_BLHC, k_BLGC):
        return reason
    width = k_BLGC.shape[3]
    if v_BLGM is None and value_dim not in (parts(width)[0], width):
        return f"needs value_dim={parts(width)[0]} or {width} with C={width}, got {value_dim}. Pass implementation='xla'."
    if v_BLGM is not None and v_BLGM.dtype != k_BLGC.dtype:
        return f"needs v in the dtype of k, {k_BLGC.dtype}, got {v_BLGM.dtype}. Pass implementation='xla'."
    if v_BLGM is not None and v_BLGM.shape[3] not in VALUE_WIDTHS:
        return f"needs a value width of {_listed(VALUE_WIDTHS)}, got M={v_BLGM.shape[3]} (v is {v_BLGM.shape}). Pass implementation='xla'."
    if 0 in ids_BLK.shape:
        return f"needs a token and a slot for keys at least, got ids of {ids_BLK.shape}. Pass implementation='xla'."
    return None


def why_not_these(q_BLHC, k_BLGC) -> str | None:
    """Why the Triton kernels cannot take these queries and keys of an attention, and what can; None if they can."""
    dtypes = {array.dtype.name for array in (q_BLHC, k_BLGC)}
    if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float16", "float32"}:
        return f"needs q and k both in bfloat16, float16 or float32, got {', '.join(sorted(dtypes))}. Pass implementation='xla'."
    if k_BLGC.shape[3] not in WIDTHS:
        return f"needs a key width of {_listed(WIDTHS)}, got C={k_BLGC.shape[3]} (k is {jnp.shape(k_BLGC)}). Pass implementation='xla'."
    return None


def _listed(numbers) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
