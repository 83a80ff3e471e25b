"""Where each device works on its own rows."""

import jax

from moejax.parallel.axes import ROWS


def per_rows(function, *arrays):
    """Runs `function` on each device's rows: every array argument and result has rows as its first dim.

    Ops along the sequence need nothing from other rows; inside this island no partitioner can decide otherwise, and a GPU
    kernel, which XLA cannot split, sees only local rows. None and trees of arrays are allowed.
    """
    return jax.shard_map(function, in_specs=ROWS, out_specs=ROWS, check_vma=False)(*arrays)
