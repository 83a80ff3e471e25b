"""Checks arguments against their own names: `q_BLHC` must be a float array whose sizes B, L, H, C agree with everyone else's."""

import jax.numpy as jnp

MAY_BE_EMPTY = "RT"
"""Letters of rows and tokens that experts may have none of; every other size is at least 1."""
MAX_SIZE = 2**31 - 1


def check(op: str, *, integer: tuple[str, ...] = (), **arrays) -> dict[str, int]:
    """The size of every letter in the arrays' names.

    Args:
      op: name of the op, for messages.
      integer: names of the arrays that must hold integers; the others must hold floats.
      arrays: name ending in its shape -> array; None is left out.

    Raises:
      ValueError: number of dimensions, a size or the kind of dtype differs from what the names say, a size is 0 (see `MAY_BE_EMPTY`) or
        beyond what an int32 counts, or something is no array.
    """
    sizes, owner = {}, {}
    for name, array in arrays.items():
        if array is None:
            continue
        if not hasattr(array, "dtype"):
            raise ValueError(f"{op}: {name} must be an array, got {type(array).__name__}.")
        letters, shape = name.rsplit("_", 1)[1], jnp.shape(array)
        if len(letters) != len(shape):
            raise ValueError(f"{op}: {name} must have {len(letters)} dimensions ({', '.join(letters)}), got shape {shape}.")
        wanted = jnp.integer if name in integer else jnp.floating
        if not jnp.issubdtype(array.dtype, wanted):
            raise ValueError(f"{op}: {name} must hold {'integers' if wanted is jnp.integer else 'floats'}, got {array.dtype}.")
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"{op}: {name} is {shape}, so {letter}={size}, but {owner[letter]} has {letter}={sizes[letter]}. "
                    f"Give both the same {letter}."
                )
            if size == 0 and letter not in MAY_BE_EMPTY:
                raise ValueError(f"{op}: {name} is {shape}, so {letter}=0; at least 1 is needed.")
            if size > MAX_SIZE:
                raise ValueError(
                    f"{op}: {name} is {shape}, and {letter}={size} is beyond {MAX_SIZE}: positions are int32. Split the arrays."
                )
            owner.setdefault(letter, f"{name} {shape}")
    return sizes


def check_heads(op: str, num_heads: int, num_key_heads: int) -> None:
    """Raises ValueError unless the query heads fall evenly on the key heads."""
    if num_heads % num_key_heads:
        raise ValueError(f"{op}: H={num_heads} query heads must be a multiple of G={num_key_heads} key heads.")


def check_segments(op: str, segments, num_rows: int, length: int) -> None:
    """Raises ValueError unless the segments describe [num_rows, length] tokens."""
    if segments is not None and jnp.shape(segments.ids_BL) != (num_rows, length):
        raise ValueError(
            f"{op}: segments were built for ids of shape {jnp.shape(segments.ids_BL)}, the arrays have B={num_rows}, "
            f"L={length}. Build them from ids of that shape."
        )
