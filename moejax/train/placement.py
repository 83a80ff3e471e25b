"""From a process's rows to arrays on the mesh."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.parallel.axes import TOKENS


def place_batch(batch, mesh: Mesh, *, accumulation: int):
    """The global batch as [A, B / A, ...] arrays, rows split over the token axes.

    Args:
      batch: this process's rows, numpy; the global batch is all processes' rows. Which rows share a microbatch depends on the number
        of processes; sums over the batch do not.
      accumulation: microbatches (A).
    """
    sharding = NamedSharding(mesh, P(None, TOKENS))

    def place(local):
        cut = np.asarray(local).reshape(accumulation, -1, *local.shape[1:])
        return jax.make_array_from_process_local_data(sharding, cut)

    return jax.tree.map(place, batch)


def batch_shapes(batch, mesh: Mesh, *, accumulation: int):
    """What `place_batch` would make of a batch that holds all rows: shapes, dtypes and places."""
    sharding = NamedSharding(mesh, P(None, TOKENS))
    cut = lambda array: jax.ShapeDtypeStruct(
        (accumulation, array.shape[0] // accumulation, *array.shape[1:]), array.dtype, sharding=sharding
    )
    return jax.tree.map(cut, batch)
