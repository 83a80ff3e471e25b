"""What KDA and GDN share before any chunk: checks of shapes and dtypes, grouped heads, padding, document labels."""

import jax.numpy as jnp

from moejax_kernels.segments import Segments
from moejax_kernels.varying import vary_alike


def check(op: str, q_BLGC, k_BLGC, v_BLHM, g, beta_BLH, segments: Segments | None, initial_state_BHCM, *, decay_per_channel: bool) -> None:
    """Raises ValueError, with the numbers, for inputs that do not fit each other."""
    if q_BLGC.ndim != 4 or v_BLHM.ndim != 4:
        raise ValueError(f"{op}: q is [B, L, G, C] and v is [B, L, H, M], got q {q_BLGC.shape} and v {v_BLHM.shape}.")
    if 0 in q_BLGC.shape or 0 in v_BLHM.shape:
        raise ValueError(f"{op}: q is {q_BLGC.shape} and v is {v_BLHM.shape}; every size must be at least 1.")
    B, L, G, C = q_BLGC.shape
    H, M = v_BLHM.shape[2:]
    if H % G:
        raise ValueError(
            f"{op}: v has H={H} heads, no multiple of the G={G} heads of q and k; q {q_BLGC.shape}, v {v_BLHM.shape}. "
            f"Use a number of value heads that G divides."
        )
    g_shape = (B, L, H, C) if decay_per_channel else (B, L, H)
    wanted = {
        "q_BLGC": (q_BLGC, (B, L, G, C)),
        "k_BLGC": (k_BLGC, (B, L, G, C)),
        "v_BLHM": (v_BLHM, (B, L, H, M)),
        "g_BLHC" if decay_per_channel else "g_BLH": (g, g_shape),
        "beta_BLH": (beta_BLH, (B, L, H)),
    }
    if initial_state_BHCM is not None:
        wanted["initial_state_BHCM"] = (initial_state_BHCM, (B, H, C, M))
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise ValueError(f"{op}: {name} must be {shape} beside q {q_BLGC.shape} and v {v_BLHM.shape}, got {array.shape}.")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{op}: {name} must be floating point, got {array.dtype}. Cast it, for example to float32.")
    if segments is not None and segments.ids_BL.shape != (B, L):
        raise ValueError(f"{op}: segments are for {segments.ids_BL.shape} tokens, q has {(B, L)}. Build them from the ids of this batch.")


def inside(*arrays):
    """Dtype of the computation: at least float32."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


GPU_WIDTHS = (64, 96, 128, 192, 256)


def why_not_triton(q_BLGC, k_BLGC, v_BLHM, g, beta_BLH) -> str | None:
    """Why the Triton kernels cannot take these inputs, as the end of a sentence; None if they can."""
    C, M = q_BLGC.shape[-1], v_BLHM.shape[-1]
    if C not in GPU_WIDTHS or M not in GPU_WIDTHS:
        return (
            f"needs widths of 64, 96, 128, 192 or 256, got C={C} (q is {q_BLGC.shape}) and M={M} (v is {v_BLHM.shape}). "
            "Pass implementation='xla'."
        )
    dtypes = [x.dtype.name for x in (q_BLGC, k_BLGC, v_BLHM)]
    if len(set(dtypes)) > 1 or dtypes[0] not in ("bfloat16", "float32") or "float64" in (g.dtype.name, beta_BLH.dtype.name):
        return (
            f"needs q, k and v all in bfloat16 or all in float32, and g and beta no wider, got q, k, v {', '.join(dtypes)}, "
            f"g {g.dtype.name}, beta {beta_BLH.dtype.name}. Cast them, or pass implementation='xla'."
        )
    return None


def widen(q_BLGC, k_BLGC, v_BLHM, g, beta_BLH, initial_state_BHCM, *, scale: float | None):
    """Inputs in the dtype of the computation (at least float32), q scaled, q and k repeated for grouped heads, the state made if None."""
    num_heads, dtype = v_BLHM.shape[2], inside(q_BLGC, k_BLGC, v_BLHM, g, beta_BLH)
    q_BLGC, k_BLGC, v_BLHM, g, beta_BLH = (x.astype(dtype) for x in (q_BLGC, k_BLGC, v_BLHM, g, beta_BLH))
    B, _, G, C = q_BLGC.shape
    q_BLHC, k_BLHC = q_BLGC * (C**-0.5 if scale is None else scale), k_BLGC
    if num_heads != G:
        q_BLHC, k_BLHC = (jnp.repeat(x, num_heads // G, axis=2) for x in (q_BLHC, k_BLHC))
    state_BHCM = jnp.zeros((B, num_heads, C, v_BLHM.shape[3]), dtype) if initial_state_BHCM is None else initial_state_BHCM.astype(dtype)
    return vary_alike(q_BLHC, k_BLHC, v_BLHM, g, beta_BLH, state_BHCM)


def labels(segments: Segments):
    """int32 [B, L]: the same number for tokens that share a recurrent state. Padding after the row's last document has that one's."""
    last_start_B1 = jnp.where(jnp.asarray(segments.ids_BL) >= 0, segments.starts_BL, 0).max(axis=1, keepdims=True)
    return jnp.minimum(segments.starts_BL, last_start_B1)


def clear_padding(segments: Segments, arrays):
    """Arrays [B, L, ...] with zeros at padding: nothing is written, nothing decays, nothing is read."""
    real_BL = jnp.asarray(segments.ids_BL) >= 0
    return tuple(jnp.where(real_BL.reshape(real_BL.shape + (1,) * (x.ndim - 2)), x, 0) for x in arrays)
