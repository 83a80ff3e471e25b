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
    if reason := gpu.why_no_triton():
        return reason
    dtypes = {array.dtype.name for array in (q_BLHC, k_BLGC, v_BLGM) if array is not None}
    if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float16", "float32"}:
        return f"needs q, k and v all in bfloat16, float16 or float32, got {', '.join(sorted(dtypes))}. Pass implementation='xla'."
    width, value_width = k_BLGC.shape[3], value_dim if v_BLGM is None else v_BLGM.shape[3]
    if width not in WIDTHS:
        return f"needs a key width of {_listed(WIDTHS)}, got C={width} (k is {jnp.shape(k_BLGC)}). Pass implementation='xla'."
    if v_BLGM is None and value_width not in (parts(width)[0], width):
        return f"needs value_dim={parts(width)[0]} or {width} with C={width}, got {value_width}. Pass implementation='xla'."
    if v_BLGM is not None and value_width not in VALUE_WIDTHS:
        return f"needs a value width of {_listed(VALUE_WIDTHS)}, got M={value_width} (v is {v_BLGM.shape}). Pass implementation='xla'."
    if 0 in ids_BLK.shape:
        return f"needs a token and a slot for keys at least, got ids of {ids_BLK.shape}. Pass implementation='xla'."
    return None


def _listed(numbers) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
