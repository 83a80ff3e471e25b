"""Layers below the first weight that learns: what they make of a row is the same whenever the row comes by again."""

import math

import jax
import numpy as np
from jax.sharding import NamedSharding

from moejax.config.errors import require
from moejax.config.model import ModelConfig
from moejax.config.training import LossConfig
from moejax.memory.cached import Recall, Store, fingerprint
from moejax.memory.store import content_key
from moejax.model import language_model
from moejax.model.transformer import stages
from moejax.parallel.axes import ROWS, TOKENS


class FrozenLayers:
    """What the frozen stages make of a global batch: row by row from a store, or computed and put there. One process alone."""

    def __init__(self, config: ModelConfig, losses: LossConfig, params: dict, *, num_stages: int, store: Store):
        """Takes the version of the frozen weights, which must stay as they are.

        Args:
          params: all weights.
          num_stages: stages that are frozen (`language_model.num_frozen`), at least one.
          store: where rows lie.

        Raises:
          ConfigError: no stage is frozen, something else than training moves the frozen layers or what they do, rows depend on each other,
            or there are several processes.
        """
        moe = config.moe
        require(num_stages > 0, "no layer is frozen: train.train_only must leave out the embedding and the first layers.")
        require(jax.process_count() == 1, f"a cache of frozen layers is built for one process, and there are {jax.process_count()}.")
        require(losses.bias_update == "none", f"losses.bias_update={losses.bias_update!r} moves frozen layers too; 'none' fits.")
        require(
            not (moe.capacity_factor or moe.adaptive.highest or moe.copies.every or moe.router.topology_far),
            "model.moe.capacity_factor, adaptive, copies and router.topology_far make what frozen layers do depend on other rows or on the "
            "step; leave them out.",
        )
        require(config.residual.kind != "block_attnres", "a cache of frozen layers takes residuals 'plain' and 'mhc', not 'block_attnres'.")
        self._config, self._num_stages = config, num_stages
        of = lambda section, place: params[section][place] if place else params[section]
        self.recall = Recall(
            store, fingerprint({"embed": params["embed"], "stages": [of(*stage) for stage in stages(config)[:num_stages]]})
        )
        self._lower = jax.jit(lambda params, batch: language_model.lower(config, params, batch, num_stages=num_stages))

    def __call__(self, params: dict, batches) -> dict:
        """The `below` of a train step.

        Args:
          batches: a Batch whose arrays are [1, B, ...], on the mesh that is set.
        """
        host, words = jax.device_get(jax.tree.map(lambda array: array[0], batches)), (str(self._num_stages), repr(self._config))
        keys = [content_key(_take(host, row), "frozen", *words) for row in range(host.tokens_BL.shape[0])]
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
        """Rows found, computed, and refused since the start."""
        return {
            "frozen_hits": float(self.recall.hits),
            "frozen_misses": float(self.recall.misses),
            "frozen_refused": float(self.recall.refused),
        }


def _take(tree, rows):
    return jax.tree.map(lambda array: array[rows], tree)
