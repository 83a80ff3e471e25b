"""Layers below the first weight that learns: what they make of a row is the same whenever the row comes by again."""

import math
import os
import shutil
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from moejax.config.model import ModelConfig
from moejax.config.run import check_frozen_rows
from moejax.config.training import LossConfig, TrainConfig
from moejax.memory.cached import Recall, fingerprint
from moejax.memory.sizing import TierLimits
from moejax.memory.store import Store, content_key
from moejax.model import language_model
from moejax.model.objective import switches_for
from moejax.model.transformer import stages
from moejax.parallel.axes import ROWS, TOKENS

SPARE = 32
"""One part in so many of host memory, and of the disk, stays free."""


def open_store(train: TrainConfig, folder: Path) -> Store:
    """The store of a run with train.frozen_cache_mib.

    Args:
      folder: of its files, if it has any.

    Raises:
      StoreBusyError: another run uses the folder.
    """
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    host = TierLimits(limit_bytes=train.frozen_cache_mib * 2**20, reserve_bytes=memory_bytes // SPARE)
    if not train.frozen_cache_files_mib:
        return Store(host=host)
    folder.mkdir(parents=True, exist_ok=True)
    disk_bytes = shutil.disk_usage(folder).total
    files = TierLimits(limit_bytes=train.frozen_cache_files_mib * 2**20, reserve_bytes=disk_bytes // SPARE)
    return Store(host=host, files=files, folder=folder)


def below_shapes(config: ModelConfig, losses: LossConfig, params: dict, batch, mesh: Mesh, *, num_stages: int) -> dict:
    """Shapes and places of what `FrozenLayers` gives for a batch."""
    lower = lambda params, batch: language_model.lower(config, params, batch, num_stages=num_stages, switches=switches_for(losses))
    place = NamedSharding(mesh, ROWS)
    placed = lambda like: jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=place)
    return jax.tree.map(placed, jax.eval_shape(lower, params, batch))


class FrozenLayers:
    """What the frozen stages make of a global batch: row by row from a store, or computed and put there. One process alone."""

    def __init__(self, config: ModelConfig, losses: LossConfig, params: dict, *, num_stages: int, store: Store):
        """Takes the version of the frozen weights, which must stay as they are.

        Args:
          losses: of the run; what its forward pass is asked for decides what frozen layers do (`index="dense"` makes sparse attention dense).
          params: all weights.
          num_stages: stages that are frozen (`program.frozen_stages`), at least one.
          store: where rows lie.

        Raises:
          ConfigError: something else than training moves the frozen layers or what they do, or rows depend on each other.
        """
        check_frozen_rows(config, losses)
        switches = switches_for(losses)
        self._made_by = (str(num_stages), repr(config), repr(switches))
        of = lambda section, place: params[section][place] if place else params[section]
        self._store = store
        self.recall = Recall(
            store, fingerprint({"embed": params["embed"], "stages": [of(*stage) for stage in stages(config)[:num_stages]]})
        )
        self._lower = jax.jit(lambda params, batch: language_model.lower(config, params, batch, num_stages=num_stages, switches=switches))

    def __call__(self, params: dict, batches) -> dict:
        """The `below` of a train step.

        Args:
          batches: a Batch whose arrays are [1, B, ...], on the mesh that is set.
        """
        host = jax.device_get(jax.tree.map(lambda array: array[0], batches))
        keys = [content_key(_take(host, row), "frozen", *self._made_by) for row in range(host.tokens_BL.shape[0])]
        rows = [self.recall.find(key) for key in keys]
        mesh = jax.sharding.get_mesh()
        place, missing = NamedSharding(mesh, ROWS), [row for row, found in enumerate(rows) if found is None]
        # all at once, or as few as the mesh divides
        size = len(keys) if len(missing) == len(keys) else math.prod(mesh.shape[axis] for axis in TOKENS)
        for at in range(0, len(missing), size):
            group = missing[at : at + size]
            filled = (group * size)[:size]
            made = jax.device_get(self._lower(params, jax.device_put(_take(host, filled), place)))
            for number, row in enumerate(group):
                rows[row] = _take(made, number)
                self.recall.keep(keys[row], rows[row])
        return jax.device_put(jax.tree.map(lambda *parts: np.stack(parts), *rows), place)

    def metrics(self) -> dict[str, float]:
        """Rows found, computed, and refused since the start; and what the store tells, as `frozen_store_...`."""
        return {
            "frozen_hits": float(self.recall.hits),
            "frozen_misses": float(self.recall.misses),
            "frozen_refused": float(self.recall.refused),
        } | {f"frozen_{name}": value for name, value in self._store.metrics().items()}


def _take(tree, rows):
    return jax.tree.map(lambda array: array[rows], tree)
