import jax
import numpy as np
import optax
import pytest

from moejax.config.errors import ConfigError
from moejax.config.training import GroupConfig, OptimConfig
from moejax.optim.build import build
from moejax.optim.groups import assign, path_of, table

SHAPES = {
    "embed/weight_VD": (32, 8),
    "head/0/mixer/q_DHC": (8, 2, 4),
    "head/0/mixer/out_HMD": (2, 4, 8),
    "head/0/mixer/sinks_H": (2,),
    "head/0/mixer/indexer/q_DJC": (8, 2, 4),
    "head/0/mixer/indexer/pool_bias_PC": (4, 4),
    "head/0/mixer_norm/scale_D": (8,),
    "unit/0/mixer/A_log_H": (3, 2),
    "unit/0/mixer/dt_bias_HC": (3, 2, 4),
    "unit/0/mixer/q_conv_X4": (3, 8, 4),
    "unit/0/mixer/q_norm_scale_C": (3, 4),
    "unit/0/feed_forward/experts/gate_EDF": (3, 4, 8, 6),
    "unit/0/feed_forward/experts/down_EFD": (3, 4, 6, 8),
    "unit/0/feed_forward/experts/gate_bias_EF": (3, 4, 6),
    "unit/0/feed_forward/router/weight_DE": (3, 8, 4),
    "unit/0/feed_forward/router/bias_E": (3, 4),
    "unit/0/feed_forward/shared/shared_gate_D1": (3, 8, 1),
    "unit/0/residual/query_D": (3, 8),
    "final_norm/scale_D": (8,),
    "unembed/weight_DV": (8, 32),
}
BALANCE = "unit/0/feed_forward/router/bias_E"
DECAYED = {path for path in SHAPES if path.endswith(("weight_VD", "weight_DV", "weight_DE", "q_DHC", "out_HMD", "q_DJC", "_EDF", "_EFD"))}
MUON = DECAYED - {"embed/weight_VD", "unembed/weight_DV", "unit/0/feed_forward/router/weight_DE"}


def tree(draw):
    nested = {}
    for path, shape in SHAPES.items():
        *sections, name = path.split("/")
        node = nested
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = draw(shape)
    return nested


def draw(seed):
    rng = np.random.default_rng(seed)
    return tree(lambda shape: rng.standard_normal(shape).astype(np.float32))


def flat(nested):
    return {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(nested)}


SHAPE_TREE = tree(lambda shape: jax.ShapeDtypeStruct(shape, np.float32))


def run(config, *, params, grads, train_only=""):
    optimizer = build(config, steps=10, params_like=SHAPE_TREE, train_only=train_only)
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for grad in grads:
        params, state = step(params, state, grad)
    return flat(params), state


def test_rules_of_a_hybrid_model():
    rules = flat(assign(OptimConfig(kind="muon"), SHAPE_TREE))
    assert {path for path, rule in rules.items() if rule.weight_decay > 0} == DECAYED
    assert {path for path, rule in rules.items() if rule.algorithm == "muon"} == MUON
    assert {path for path, rule in rules.items() if not rule.trainable} == {BALANCE}
    assert {rule.learning_rate for rule in rules.values()} == {0.0, 3e-4, 2e-2}
    assert {rule.algorithm for rule in flat(assign(OptimConfig(kind="sgd"), SHAPE_TREE)).values()} == {"sgd", "balance"}


def test_adamw_equals_a_loop_in_numpy():
    config = OptimConfig(learning_rate=0.1, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.5, schedule="constant", warmup_steps=4)
    params, grads = draw(0), [draw(seed) for seed in (1, 2, 3)]
    got, _ = run(config, params=params, grads=grads)
    for path, want in flat(params).items():
        mean = square = np.zeros_like(want)
        for t, grad in enumerate(flat(each)[path] for each in grads):
            mean, square = 0.8 * mean + 0.2 * grad, 0.9 * square + 0.1 * grad**2
            step = mean / (1 - 0.8 ** (t + 1)) / (np.sqrt(square / (1 - 0.9 ** (t + 1))) + 1e-3) + 0.5 * (path in DECAYED) * want
            want = want - (path != BALANCE) * 0.1 * (t + 1) / 4 * step
        np.testing.assert_allclose(got[path], want, rtol=1e-5, atol=1e-6)


def test_sgd_moves_by_rate_times_gradient_and_its_scale_shows():
    config = OptimConfig(kind="sgd", learning_rate=0.5, weight_decay=0.0, schedule="constant", warmup_steps=0)
    params, grads = draw(0), draw(1)
    got, _ = run(config, params=params, grads=[grads])
    for path, param in flat(params).items():
        np.testing.assert_allclose(got[path], param - 0.5 * flat(grads)[path] * (path != BALANCE), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_after_one_step_all_trainable_tensors_changed_and_no_frozen_one(kind):
    config = OptimConfig(kind=kind, groups=(GroupConfig(pattern="embed/", lr_scale=0),))  # unembed/ too
    params, grads = draw(0), draw(1)
    grads["embed"]["weight_VD"] = np.full((32, 8), np.nan, np.float32)  # a frozen parameter's gradient may be anything
    got, state = run(config, params=params, grads=[grads])
    frozen = {BALANCE, "embed/weight_VD", "unembed/weight_DV"}
    for path, param in flat(params).items():
        if path in frozen:
            np.testing.assert_array_equal(got[path], param)
        else:
            assert (np.asarray(got[path]) != param).all(), path
    moments = {"adamw": 2, "muon": 1}
    rules = flat(assign(config, SHAPE_TREE))
    want = sum(moments[rules[path].algorithm] * np.prod(shape) for path, shape in SHAPES.items() if path not in frozen)
    assert sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim) == want  # frozen ones hold no state


def test_train_only_freezes_all_else():
    params = draw(0)
    got, _ = run(OptimConfig(), params=params, grads=[draw(1)], train_only="indexer")
    moved = {path for path, param in flat(params).items() if (np.asarray(got[path]) != param).any()}
    assert moved == {path for path in SHAPES if "indexer" in path}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_zero_gradients_move_nothing_and_make_no_nan(kind):
    params = draw(0)
    got, _ = run(OptimConfig(kind=kind, weight_decay=0.0), params=params, grads=[jax.tree.map(np.zeros_like, params)])
    for path, param in flat(params).items():
        np.testing.assert_array_equal(got[path], param)


def test_groups_scale_the_rate_set_the_decay_and_the_first_match_counts():
    config = OptimConfig(
        kind="muon",
        learning_rate=1.0,
        muon_learning_rate=2.0,
        weight_decay=0.1,
        groups=(
            GroupConfig(pattern="experts/down", lr_scale=0.5),
            GroupConfig(pattern="experts", lr_scale=0.25, weight_decay=0.3),
            GroupConfig(pattern="norm", weight_decay=0.7),
        ),
    )
    rules = flat(assign(config, SHAPE_TREE))

    def rate_and_decay(path):
        return (rules[path].learning_rate, rules[path].weight_decay)

    assert rate_and_decay("unit/0/feed_forward/experts/down_EFD") == (1.0, 0.1)
    assert rate_and_decay("unit/0/feed_forward/experts/gate_EDF") == (0.5, 0.3)
    assert rate_and_decay("unit/0/feed_forward/experts/gate_bias_EF") == (0.25, 0.3)
    assert rate_and_decay("final_norm/scale_D") == (1.0, 0.7)
    assert rate_and_decay("embed/weight_VD") == (1.0, 0.1)


def test_the_layout_of_the_state_does_not_depend_on_rates():
    states = [
        jax.eval_shape(build(config, steps=10, params_like=SHAPE_TREE).init, SHAPE_TREE)
        for config in (
            OptimConfig(kind="muon"),
            OptimConfig(kind="muon", learning_rate=1.0, groups=(GroupConfig(pattern="norm", lr_scale=2.0),)),
        )
    ]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])


@pytest.mark.parametrize(
    ("fields", "train_only", "message"),
    [
        ({"groups": (GroupConfig(pattern="exprets"),)}, "", "exprets.*unit/0"),
        ({"groups": (GroupConfig(pattern="norm"), GroupConfig(pattern="final_norm"))}, "", "final_norm.*earlier"),
        ({"groups": (GroupConfig(pattern="router/bias"),)}, "", "router/bias"),
        ({"groups": (GroupConfig(pattern="("),)}, "", r"groups\[0\].pattern.*regular expression"),
        ({}, "indxer", "train_only='indxer'"),
    ],
)
def test_patterns_that_match_nothing_are_refused_by_name(fields, train_only, message):
    with pytest.raises(ConfigError, match=message):
        build(OptimConfig(**fields), steps=10, params_like=SHAPE_TREE, train_only=train_only)


def test_a_name_that_lies_about_its_dims_is_refused():
    with pytest.raises(ConfigError, match="scale_D has shape"):
        assign(OptimConfig(), {"head": {"norm": {"scale_D": np.zeros((2, 3))}}})


def test_table_lists_each_kind_of_rule_with_its_size():
    rows = table(assign(OptimConfig(kind="muon", groups=(GroupConfig(pattern="indexer", lr_scale=0),)), SHAPE_TREE), SHAPE_TREE)
    assert sum(row[1] for row in rows) == len(SHAPES)
    assert sum(row[2] for row in rows) == sum(np.prod(shape) for shape in SHAPES.values())
    by_label = {row[0]: row for row in rows if row[4] > 0 or row[3] == 0}
    experts = 2 * 3 * 4 * 8 * 6
    assert by_label["muon"] == ("muon", 4, experts + 2 * 64, 2e-2, 0.1)
    assert by_label["frozen (indexer)"] == ("frozen (indexer)", 2, 64 + 16, 0.0, 0.0)
    assert by_label["balance"] == ("balance", 1, 12, 0.0, 0.0)
    assert rows[0][0] == "muon"
