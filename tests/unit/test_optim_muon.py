import jax
import numpy as np
import optax
import pytest

from moejax.config.errors import ConfigError
from moejax.optim.groups import matrix_shape
from moejax.optim.muon import orthogonalise, scale_by_muon

PATHS = {  # path: (shape, dims that optax is told are rows, columns)
    "head/0/mixer/q_DHC": ((6, 2, 5), (0,), (1, 2)),
    "head/0/mixer/out_HMD": ((2, 5, 6), (0, 1), (2,)),
    "unit/0/mixer/k_DGC": ((3, 6, 2, 4), (1,), (2, 3)),
    "unit/0/feed_forward/experts/gate_EDF": ((3, 4, 6, 8), (2,), (3,)),
    "tail/0/feed_forward/experts/down_EFD": ((4, 8, 6), (1,), (2,)),
}


def nested(leaves):
    tree = {}
    for path, leaf in leaves.items():
        *sections, name = path.split("/")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = leaf
    return tree


def draw(seed):
    rng = np.random.default_rng(seed)
    return nested({path: rng.standard_normal(shape).astype(np.float32) for path, (shape, _, _) in PATHS.items()})


def steps(transform, trees):
    state, update = transform.init(trees[0]), jax.jit(transform.update)
    for tree in trees:
        updates, state = update(tree, state)
    return updates


def test_the_first_update_equals_that_of_optax():  # later ones differ: optax corrects the bias of its moving average
    numbers = nested({path: optax.contrib.MuonDimensionNumbers(rows, columns) for path, (_, rows, columns) in PATHS.items()})
    theirs = optax.chain(optax.contrib.scale_by_muon(weight_dimension_numbers=numbers), optax.contrib._muon.scale_by_shape(numbers))
    got, want = (steps(transform, [draw(0)]) for transform in (scale_by_muon(), theirs))
    jax.tree.map(lambda ours, optax_s: np.testing.assert_allclose(ours, optax_s, atol=1e-4), got, want)  # 5 iterations amplify roundings


def test_momentum_is_that_of_the_author():
    grads = [draw(seed) for seed in range(3)]
    momentum = jax.tree.map(np.zeros_like, grads[0])
    for grad in grads:  # KellerJordan/Muon: momentum.lerp_(grad, 0.05), update = grad.lerp_(momentum, 0.95)
        momentum = jax.tree.map(lambda m, g: 0.95 * m + 0.05 * g, momentum, grad)
    nesterov = jax.tree.map(lambda m, g: 0.95 * m + 0.05 * g, momentum, grads[-1])
    got, want = steps(scale_by_muon(), grads), steps(scale_by_muon(), [nesterov])
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-4), got, want)


def test_singular_values_come_near_1_in_each_matrix():
    x_SEDF = np.random.default_rng(0).standard_normal((3, 2, 12, 7)).astype(np.float32) * np.float32([1e-3, 1, 1e3])[:, None, None, None]
    values = np.linalg.svd(jax.jit(orthogonalise)(x_SEDF), compute_uv=False)
    assert values.min() > 0.6 and values.max() < 1.25


def test_permuted_experts_get_permuted_updates_and_a_stack_of_one_is_unstacked():
    gate_EDF = np.random.default_rng(1).standard_normal((4, 6, 8)).astype(np.float32)
    order = [2, 0, 3, 1]
    path = "head/0/feed_forward/experts/gate_EDF"

    def update(path, array):
        return np.asarray(jax.tree.leaves(steps(scale_by_muon(), [nested({path: array})]))[0])

    one = update(path, gate_EDF)
    np.testing.assert_allclose(update(path, gate_EDF[order]), one[order], atol=1e-6)
    np.testing.assert_allclose(update("unit/0/experts/gate_EDF", gate_EDF[None])[0], one, atol=1e-6)
    np.testing.assert_allclose(update("head/0/experts/gate_DF", gate_EDF[1]), one[1], atol=1e-6)


def test_zero_gradients_give_zero_updates():
    updates = steps(scale_by_muon(), [jax.tree.map(np.zeros_like, draw(0))])
    assert not any(np.asarray(update).any() for update in jax.tree.leaves(updates))


@pytest.mark.parametrize(("path", "shape"), [("head/0/w_ABC", (2, 3, 4)), ("head/0/w", (2, 3, 4)), ("head/0/w_DHGC", (2, 3, 4, 5))])
def test_a_name_that_hides_rows_and_columns_is_refused(path, shape):
    with pytest.raises(ConfigError, match="rows from columns"):
        matrix_shape(path, shape)
