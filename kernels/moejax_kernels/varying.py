"""Arrays of one loop inside `shard_map`: its carry must vary over the same mesh axes as what is put into it."""

import jax


def vary_alike(*trees):
    """The trees, each array marked as varying over every mesh axis that one of them varies over; the transpose of marking sums."""
    arrays, structure = jax.tree.flatten(trees)
    axes_of = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    every = frozenset().union(*axes_of)
    return jax.tree.unflatten(
        structure,
        [
            jax.lax.pcast(array, tuple(sorted(every - axes)), to="varying") if every - axes else array
            for array, axes in zip(arrays, axes_of, strict=True)
        ],
    )
