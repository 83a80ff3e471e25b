"""Weights updated one by one, stacked ones layer by layer, are those that optax updates all at once, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from moejax.config.errors import ConfigError
from moejax.config.training import GroupConfig, OptimConfig
from moejax.model import language_model
from moejax.optim import pieces
from moejax.optim.build import build
from moejax.optim.clip import clip, global_norm
from moejax.optim.groups import assign, path_of
from moejax.optim.pieces import cut, get

GROUPS = (GroupConfig(pattern="experts", lr_scale=0.5), GroupConfig(pattern="final_norm", lr_scale=0))
STEPS = 10
MODEL = tiny.model("gqa", "gqa", vocab_size=32)
SHAPES = language_model.shapes(MODEL)


def leaves(tree) -> dict:
    return {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def at_once(config, params, grads, train_only):
    optimizer = build(config, steps=STEPS, params_like=SHAPES, train_only=train_only)

    @jax.jit
    def step(params, state, grads, norm):
        updates, state = optimizer.update(clip(grads, norm, config.clip_norm), state, params)
        return jax.tree.map(jnp.add, params, updates), state

    state = optimizer.init(params)
    for grad in grads:
        params, state = step(params, state, grad, global_norm(grad))
    return leaves(params), leaves(state)


def one_by_one(config, params, grads, train_only):
    updates = cut(config, assign(config, SHAPES, train_only=train_only), SHAPES, steps=STEPS)
    weights, states = leaves(params), {}
    for update in updates:
        layers = [slice(layer, layer + 1) for layer in range(update.num_layers)] or [...]
        path, moved, apply = "/".join(update.names), [], jax.jit(update.apply)
        for layer in layers:
            weight = weights[path][layer]
            moments, counts = update.init(weight)
            for grad in grads:
                weight, moments, counts = apply(weight, get(grad, update.names)[layer], global_norm(grad), moments, counts)
            moved.append((weight, moments))
        join = np.concatenate if update.num_layers else lambda parts: parts[0]
        weights[path] = join([weight for weight, _ in moved])
        states |= counts | {name: join([moments[name] for _, moments in moved]) for name in moments}
    return weights, states


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_pieces_equal_the_whole(kind):
    config = OptimConfig(kind=kind, learning_rate=0.1, warmup_steps=2, clip_norm=3.0, groups=GROUPS)
    params, grads = tiny.weights(MODEL), [tiny.weights(MODEL, bias=1.0, seed=seed) for seed in (1, 2)]
    (want, want_state), (got, state) = (run(config, params, grads, "^(?!.*shared)") for run in (at_once, one_by_one))
    assert state.keys() == want_state.keys() and got.keys() == want.keys()
    for ours, theirs in ((got, want), (state, want_state)):
        for path in theirs:
            np.testing.assert_array_equal(ours[path], theirs[path], err_msg=path)
    assert (got["final_norm/scale_D"] == leaves(params)["final_norm/scale_D"]).all()
    assert (got["unit/0/mixer/q_DHX"] != leaves(params)["unit/0/mixer/q_DHX"]).all()


def test_an_optimizer_that_keeps_something_of_all_weights_together_is_refused_by_name(monkeypatch):
    real = pieces.from_rules
    history = optax.GradientTransformation(lambda params: {"norms": jnp.zeros(10)}, lambda updates, state, params=None: (updates, state))
    monkeypatch.setattr(pieces, "from_rules", lambda *args, **options: optax.chain(real(*args, **options), history))
    config = OptimConfig()
    with pytest.raises(ConfigError, match=r"optim\.kind='adamw' keeps 1/norms .* beside"):
        cut(config, assign(config, SHAPES), SHAPES, steps=STEPS)
