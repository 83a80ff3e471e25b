"""The optimizer: one optax transformation from a config and the parameters' shapes."""

import jax
import jax.numpy as jnp
import optax

from moejax.config.training import OptimConfig
from moejax.optim import groups
from moejax.optim.adam import scale_by_adam
from moejax.optim.muon import scale_by_muon
from moejax.optim.rounding import rounded
from moejax.optim.schedule import learning_rate


def build(config: OptimConfig, *, steps: int, params_like, train_only: str = "") -> optax.GradientTransformation:
    """AdamW, Muon or SGD with decoupled weight decay, a rate per group and the schedule; frozen parameters get zeros and hold no state.

    Clipping is not in it: the caller clips (`clip.py`), since it logs the norm and skips non-finite steps.
    The state's layout depends on which parameter follows which algorithm, never on rates, decay or schedule.

    Args:
      config: what is asked for.
      steps: updates of the whole run.
      params_like: nested dict of arrays or shapes; update needs `params` of the same structure.
      train_only: regular expression of the parameters that learn; empty: all.

    Raises:
      ConfigError: see groups.assign.
    """
    return from_rules(groups.assign(config, params_like, train_only=train_only), config, steps=steps)


def from_rules(rules, config: OptimConfig, *, steps: int) -> optax.GradientTransformation:
    """The same from a tree of rules, for parameters keyed like it: all, or some of them."""
    algorithms = {
        "adamw": scale_by_adam(config.beta1, config.beta2, config.eps),
        "muon": scale_by_muon(),
        "sgd": optax.identity(),
        "frozen": optax.set_to_zero(),
        "balance": optax.set_to_zero(),
    }

    rate = learning_rate(config, steps)

    def move(updates, state, params=None):
        """Decays, and scales by one scalar: of two, XLA multiplies one with the other first in one program and not in another."""

        def of(rule, update, param):
            if not rule.trainable:
                return update
            scale = jnp.astype(-rule.learning_rate * rate(state.count), update.dtype)
            return rounded(scale * (update + rounded(rule.weight_decay * param)))

        return jax.tree.map(of, rules, updates, params), optax.ScaleByScheduleState(optax.safe_increment(state.count))

    moved = optax.GradientTransformation(lambda params: optax.ScaleByScheduleState(jnp.zeros((), jnp.int32)), move)
    names = jax.tree.map(lambda rule: rule.algorithm, rules)
    used = {name: algorithms[name] for name in sorted(set(jax.tree.leaves(names)))}
    return optax.chain(optax.partition(used, names), moved)
