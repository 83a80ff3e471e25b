"""Where each device works on its own rows."""

import jax
from jax.sharding import PartitionSpec as P

from moejax.parallel.axes import ROWS


def per_rows(function, *arrays, whole=()):
    """Runs `function(*arrays, *whole)` on each device's rows; results have rows as their first dim.

    Ops along the sequence need nothing from other rows: inside this island no partitioner can decide otherwise, and a GPU
    kernel, which XLA cannot split, sees only local rows.

    Args:
      arrays: arrays or trees of arrays whose first dim is rows.
      whole: arrays that every device sees as a whole (small weights); their gradients are summed over devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # one device has nothing to part, and XLA's CPU backend would copy each gradient in a sum over it; inside an island it is done already
    if mesh.size == 1 or mesh.manual_axes:
        return function(*arrays, *whole)
    specs = (ROWS,) * len(arrays) + (P(),) * len(whole)
    return jax.shard_map(function, in_specs=specs, out_specs=ROWS, check_vma=False)(*arrays, *whole)
