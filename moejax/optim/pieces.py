"""The update cut into pieces: a weight, or a layer of a stacked one, moves by its own gradient, moments and rule, and by the global norm."""

import dataclasses
from typing import Any

import jax
import optax

from moejax.config.errors import ConfigError
from moejax.config.training import OptimConfig
from moejax.optim import groups
from moejax.optim.build import from_rules
from moejax.optim.clip import clip

STACKED = "unit"
"""Section of the weights whose first dim is layers."""


@dataclasses.dataclass(frozen=True, slots=True)
class WeightUpdate:
    """How one weight moves; for a stacked one, any run of its layers."""

    names: tuple[str, ...]
    """Keys of the weight in the tree of weights."""
    like: jax.ShapeDtypeStruct
    """The whole weight."""
    optimizer: optax.GradientTransformation
    """Of a tree that holds this weight alone."""
    clip_norm: float
    moments: dict[str, jax.ShapeDtypeStruct]
    """Leaves of the optimizer's state that belong to the weight, whole, by their path there."""
    counts: tuple[str, ...]
    """Paths of the scalars it shares with others."""

    @property
    def num_layers(self) -> int:
        """Layers stacked in it, 0 if it is none of a stack."""
        return self.like.shape[0] if self.names[0] == STACKED else 0

    def init(self, weight) -> tuple[dict[str, Any], dict[str, Any]]:
        """Moments and counts of a weight that has not moved yet."""
        return self._split(self.optimizer.init(nested(self.names, weight)))

    def apply(self, weight, grad, norm, moments: dict[str, Any], counts: dict[str, Any]):
        """One update of the weight (or of some of its layers).

        Args:
          weight: as it is.
          grad: its gradient, not clipped yet.
          norm: of all gradients.
          moments, counts: by path.

        Returns:
          the weight, its moments and the counts afterwards.
        """
        like = jax.eval_shape(self.optimizer.init, nested(self.names, weight))
        parts = moments | counts
        state = jax.tree_util.tree_map_with_path(lambda keys, _: parts[groups.path_of(keys)], like)
        clipped = clip(nested(self.names, grad), norm, self.clip_norm)
        updates, state = self.optimizer.update(clipped, state, nested(self.names, weight))
        (update,) = jax.tree.leaves(updates)
        return (weight + update.astype(weight.dtype), *self._split(state))

    def _split(self, state) -> tuple[dict[str, Any], dict[str, Any]]:
        parts = {groups.path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(state)}
        return {path: parts[path] for path in self.moments}, {path: parts[path] for path in self.counts}


def cut(config: OptimConfig, rules, params_like, *, steps: int) -> list[WeightUpdate]:
    """The updates of all weights that move, in the order of the tree.

    Args:
      rules: of `groups.assign`.
      params_like: shapes and dtypes of the weights, keyed like the rules.
      steps: updates of the whole run.

    Raises:
      ConfigError: the optimizer keeps a state that is not shaped like a weight, so that it cannot be cut like them.
    """
    rule_of = {groups.path_of(keys): rule for keys, rule in jax.tree_util.tree_leaves_with_path(rules)}
    updates = []
    for keys, like in jax.tree_util.tree_leaves_with_path(params_like):
        rule, names = rule_of[groups.path_of(keys)], tuple(key.key for key in keys)
        if not rule.trainable:
            continue
        alone = from_rules(nested(names, rule), config, steps=steps)
        leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(alone.init, nested(names, like)))
        state = {groups.path_of(keys): leaf for keys, leaf in leaves}
        counts = tuple(path for path, leaf in state.items() if leaf.ndim == 0)
        moments = {path: leaf for path, leaf in state.items() if leaf.ndim}
        if strange := [path for path, leaf in moments.items() if not path.endswith("/".join(names)) or leaf.shape != like.shape]:
            raise ConfigError(
                f"optim.kind={config.kind!r} keeps {strange[0]} {moments[strange[0]].shape} beside {'/'.join(names)} {like.shape}, so its "
                "update cannot be done in pieces; tiers.optimizer='device' fits."
            )
        updates.append(WeightUpdate(names, like, alone, config.clip_norm, moments, counts))
    return updates


def nested(names: tuple[str, ...], leaf) -> Any:
    """A tree of dicts that holds one leaf."""
    for name in reversed(names):
        leaf = {name: leaf}
    return leaf


def layer_of(array, layer):
    """One layer of a stacked array, with its dim."""
    return jax.lax.dynamic_slice_in_dim(array, layer, 1, axis=0)


def with_layer(array, layer, part):
    """The stacked array with one layer replaced."""
    return jax.lax.dynamic_update_slice_in_dim(array, part, layer, axis=0)


def get(tree, names: tuple[str, ...]) -> Any:
    """The leaf under these keys."""
    for name in names:
        tree = tree[name]
    return tree


def replaced(tree, leaves: dict[tuple[str, ...], Any]):
    """The tree with other leaves under some keys."""
    return jax.tree_util.tree_map_with_path(lambda keys, leaf: leaves.get(tuple(key.key for key in keys), leaf), tree)
