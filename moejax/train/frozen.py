"""Layers below the first weight that learns: what they make of a batch is the same whenever the batch comes by again."""

from collections.abc import Callable
from typing import Any

import jax

from moejax.config.errors import require
from moejax.config.model import ModelConfig
from moejax.config.training import LossConfig
from moejax.memory.cached import Recall, Store, fingerprint
from moejax.model import language_model
from moejax.model.transformer import stages


class FrozenLayers:
    """What the frozen stages make of a global batch: from a store, or computed and put there. One process alone."""

    def __init__(
        self,
        config: ModelConfig,
        losses: LossConfig,
        params: dict,
        *,
        num_stages: int,
        store: Store,
        content_key: Callable[..., str],
    ):
        """Takes the version of the frozen weights, which must stay as they are.

        Args:
          params: all weights.
          num_stages: stages that are frozen (`language_model.num_frozen`), at least one.
          content_key: hash of a tree of arrays and of strings.

        Raises:
          ConfigError: something else than training moves the frozen layers or what they do, or there are several processes.
        """
        moe, first = config.moe, stages(config)[:num_stages]
        require(num_stages > 0, "no layer is frozen: train.train_only must leave out the embedding and the first layers.")
        require(jax.process_count() == 1, f"cached frozen layers are built for one process, and there are {jax.process_count()}.")
        require(losses.bias_update == "none", f"losses.bias_update={losses.bias_update!r} moves frozen layers too; 'none' fits.")
        require(
            not (moe.adaptive.highest or moe.copies.every or moe.router.topology_far),
            "model.moe.adaptive, model.moe.copies and model.moe.router.topology_far change from step to step what frozen layers do; leave them out.",
        )
        self._config, self._num_stages, self._content_key = config, num_stages, content_key
        of = lambda section, place: params[section][place] if place else params[section]
        frozen = {"embed": params["embed"], "stages": [of(*stage) for stage in first]}
        self.recall = Recall(store, fingerprint(frozen))
        self._lower = jax.jit(lambda params, batch: language_model.lower(config, params, batch, num_stages=num_stages))
        self._places: Any = None

    def __call__(self, params: dict, batches) -> dict:
        """The `below` of a train step.

        Args:
          batches: a Batch whose arrays are [1, B, ...], on the mesh that is set.
        """
        batch = jax.tree.map(lambda array: array[0], batches)
        if self._places is None:
            compiled = self._lower.lower(params, batch).compile()
            self._lower, self._places = compiled, compiled.output_shardings
        key = self._content_key(jax.device_get(batch), "frozen", str(self._num_stages), repr(self._config))
        return jax.device_put(self.recall(key, lambda: self._lower(params, batch)), self._places)
