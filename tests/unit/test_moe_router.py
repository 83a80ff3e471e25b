"""The choice of experts, their weights and the gradients of both against plain definitions."""

import jax
import numpy as np
import pytest

from moejax.config.moe import RouterConfig
from moejax.moe.router import choose, overload_factor, route, weigh

EXPERTS, CHOSEN = 8, 3
CONFIGS = {
    "softmax": RouterConfig(),
    "softmax, not renormalised (OLMoE)": RouterConfig(renormalise=False),
    "softmax over the chosen (gpt-oss)": RouterConfig(score="softmax_chosen", logit_bias=True),
    "sigmoid with bias and scale": RouterConfig(score="sigmoid", correction_bias=True, scale=2.5),
    "sigmoid, groups": RouterConfig(score="sigmoid", correction_bias=True, num_groups=4, groups_kept=2),
    "sigmoid, groups score by their best": RouterConfig(score="sigmoid", correction_bias=True, num_groups=4, groups_kept=3, group_top=1),
    "softmax, one group of two": RouterConfig(num_groups=2, groups_kept=1, group_top=3, renormalise=False, scale=0.5),
}
FACTOR_E = np.array([1, 0.5, 1, 0.8, 1, 1, 0.3, 0.9])


def scores_by_hand(logits_E, config):
    return 1 / (1 + np.exp(-logits_E)) if config.score == "sigmoid" else np.exp(logits_E) / np.exp(logits_E).sum()


def by_hand(logits_E, bias_E, config, factor_E=np.ones(EXPERTS)):
    """One token: ids and weights, expert after expert."""
    scores_E = scores_by_hand(logits_E, config)
    choice_E = scores_E + bias_E
    size = EXPERTS // config.num_groups
    group = lambda expert: expert // size
    worth = [sum(sorted(choice_E[g * size : (g + 1) * size])[-config.group_top :]) for g in range(config.num_groups)]
    open_groups = sorted(range(config.num_groups), key=lambda g: (-worth[g], g))[: config.groups_kept]
    allowed = [expert for expert in range(EXPERTS) if group(expert) in open_groups]
    ids = sorted(allowed, key=lambda expert: (-choice_E[expert], expert))[:CHOSEN]
    weights = scores_E[ids] * factor_E[ids]
    return ids, (weights / weights.sum() if config.renormalise else weights) * config.scale


def gradient_by_hand(logits_E, ids, dprobs_K, config, factor_E):
    """Gradient of sum(dprobs * weights) of one token with respect to its logits: the chosen and the factors are constants."""
    scores_E = scores_by_hand(logits_E, config)
    weights_K, dweights_K = scores_E[ids] * factor_E[ids], dprobs_K * config.scale
    if config.renormalise:
        total = weights_K.sum()
        dweights_K = (dweights_K - (dweights_K * weights_K).sum() / total) / total
    dscores_E = np.zeros(EXPERTS)
    dscores_E[ids] = dweights_K * factor_E[ids]
    if config.score == "sigmoid":
        return dscores_E * scores_E * (1 - scores_E)
    return scores_E * (dscores_E - (dscores_E * scores_E).sum())


def draw(config, seed=0, shape=(2, 9)):
    rng = np.random.default_rng(seed)
    logits_BLE, valid_BL = rng.normal(0, 2, (*shape, EXPERTS)), rng.random(shape) < 0.8
    return logits_BLE, rng.normal(0, 0.3, EXPERTS) if config.correction_bias else None, valid_BL


@pytest.mark.parametrize("factor_E", [None, FACTOR_E], ids=["free", "overloaded"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_choice_weights_and_gradients_follow_the_definition(config, factor_E):
    with jax.enable_x64(True):
        logits_BLE, bias_E, valid_BL = draw(config)
        dprobs_BLK = np.random.default_rng(1).normal(size=(2, 9, CHOSEN))

        def total(logits_BLE):
            choice = choose(logits_BLE, bias_E, valid_BL, experts_per_token=CHOSEN, config=config)
            routing = weigh(choice, config=config, factor_E=factor_E)
            return (routing.probs_BLK * dprobs_BLK).sum(), routing

        (_, routing), dlogits_BLE = jax.value_and_grad(total, has_aux=True)(logits_BLE)
    factor_E = np.ones(EXPERTS) if factor_E is None else factor_E
    for at in np.ndindex(2, 9):
        ids, weights = by_hand(logits_BLE[at], 0 if bias_E is None else bias_E, config, factor_E)
        want = gradient_by_hand(logits_BLE[at], ids, dprobs_BLK[at], config, factor_E)
        if not valid_BL[at]:
            ids, weights, want = [-1] * CHOSEN, np.zeros(CHOSEN), np.zeros(EXPERTS)
        assert np.asarray(routing.ids_BLK)[at].tolist() == ids
        np.testing.assert_allclose(np.asarray(routing.probs_BLK)[at], weights, rtol=1e-12)
        np.testing.assert_allclose(np.asarray(dlogits_BLE)[at], want, rtol=1e-9, atol=1e-15)  # differences of numbers near 1


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_float32_is_as_near_as_its_roundings(config):
    logits_BLE, bias_E, valid_BL = draw(config, shape=(1, 9))
    low = lambda array: None if array is None else array.astype(np.float32)
    routing = route(low(logits_BLE), low(bias_E), valid_BL, experts_per_token=CHOSEN, config=config)
    assert routing.probs_BLK.dtype == np.float32
    for at in zip(*np.nonzero(valid_BL), strict=True):
        ids, weights = by_hand(logits_BLE[at], 0 if bias_E is None else bias_E, config)
        assert np.asarray(routing.ids_BLK)[at].tolist() == ids
        np.testing.assert_allclose(np.asarray(routing.probs_BLK)[at], weights, rtol=2e-6)


@pytest.mark.parametrize("score", ["softmax", "softmax_chosen"])
def test_softmax_over_the_chosen_logits_equals_a_renormalised_softmax(score):
    """gpt-oss as transformers has it: linear with a bias, top-k of the logits, softmax over the k."""
    rng = np.random.default_rng(1)
    x_LD, weight_ED, bias_E = (rng.normal(size=shape).astype(np.float32) for shape in ((5, 16), (EXPERTS, 16), (EXPERTS,)))
    logits_LE = x_LD @ weight_ED.T + bias_E
    routing = route(logits_LE[None], None, np.ones((1, 5), bool), experts_per_token=CHOSEN, config=RouterConfig(score=score))
    ids_LK = np.argsort(-logits_LE, axis=1)[:, :CHOSEN]
    top_LK = np.exp(np.take_along_axis(logits_LE, ids_LK, 1))
    np.testing.assert_array_equal(routing.ids_BLK[0], ids_LK)
    np.testing.assert_allclose(routing.probs_BLK[0], top_LK / top_LK.sum(1, keepdims=True), rtol=5e-6)


def test_logits_whose_softmax_underflows_are_still_told_apart():
    logits_BLE = np.array([[[0, -200, -150, 200, -300, -400, -500, -600]]], np.float32)
    ids = lambda score: route(logits_BLE, None, np.ones((1, 1), bool), experts_per_token=CHOSEN, config=RouterConfig(score=score)).ids_BLK
    assert ids("softmax_chosen").tolist() == [[[3, 0, 2]]] != ids("softmax").tolist()


@pytest.mark.parametrize("config", [CONFIGS["softmax"], CONFIGS["sigmoid, groups"]], ids=["plain", "groups"])
def test_of_equal_scores_the_lower_expert_wins(config):
    routing = route(
        np.zeros((1, 4, EXPERTS), np.float32), np.zeros(EXPERTS, np.float32), np.ones((1, 4), bool), experts_per_token=CHOSEN, config=config
    )
    assert np.asarray(routing.ids_BLK).tolist() == [[list(range(CHOSEN))] * 4]


@pytest.mark.parametrize("name", ["bias_E", "offset_E"])
def test_a_bias_of_the_choice_changes_no_weight_and_gets_no_gradient(name):
    logits_BLE = np.random.default_rng(2).normal(size=(1, 6, EXPERTS)).astype(np.float32)
    config = RouterConfig(score="sigmoid", correction_bias=True, renormalise=False)

    def of(bias_E):
        biases = {"bias_E": np.zeros(EXPERTS, np.float32)} | {name: bias_E}
        return route(logits_BLE, valid_BL=np.ones((1, 6), bool), experts_per_token=CHOSEN, config=config, **biases)

    bias_E = np.zeros(EXPERTS, np.float32)
    bias_E[5] = 10
    routing = of(bias_E)
    assert np.all(np.asarray(routing.ids_BLK)[..., 0] == 5)
    np.testing.assert_allclose(np.asarray(routing.probs_BLK)[..., 0], jax.nn.sigmoid(logits_BLE[..., 5]), rtol=1e-6)
    assert np.all(np.asarray(jax.grad(lambda bias_E: of(bias_E).probs_BLK.sum())(bias_E)) == 0)
    np.testing.assert_array_equal(routing.ranked_BLE, routing.scores_BLE + (bias_E if name == "offset_E" else 0))


def test_node_limited_routing_leaves_a_token_at_most_as_many_nodes():
    """DeepSeek-V3: groups are nodes, and a node scores the sum of its best K / M experts."""
    config = RouterConfig(score="sigmoid", num_groups=8, groups_kept=2, group_top=3)
    logits_BLE = np.random.default_rng(3).normal(size=(1, 64, 64)).astype(np.float32)
    ids_LK = np.asarray(route(logits_BLE, None, np.ones((1, 64), bool), experts_per_token=6, config=config).ids_BLK)[0]
    by_node_LGX = 1 / (1 + np.exp(-logits_BLE[0].reshape(64, 8, 8)))
    worth_LG = np.sort(by_node_LGX, axis=-1)[..., -3:].sum(-1)
    best_LM = np.argsort(-worth_LG, axis=1)[:, :2]
    assert all(set(ids // 8) <= set(best) for ids, best in zip(ids_LK, best_LM, strict=True))


def test_sigmoid_scores_that_all_underflow_give_finite_weights_and_gradients():
    config = RouterConfig(score="sigmoid", overload_strength=1.0)
    logits_BLE = np.full((1, 2, EXPERTS), -200, np.float32)
    choice = lambda logits_BLE: choose(logits_BLE, None, np.ones((1, 2), bool), experts_per_token=CHOSEN, config=config)
    for factor_E in (None, FACTOR_E.astype(np.float32)):
        probs = lambda logits_BLE, factor_E=factor_E: weigh(choice(logits_BLE), config=config, factor_E=factor_E).probs_BLK.sum()
        assert np.isfinite(probs(logits_BLE)) and np.all(np.isfinite(jax.grad(probs)(logits_BLE)))


def test_the_overload_factor_is_one_up_to_the_threshold_and_falls_beyond():
    config = RouterConfig(overload_strength=0.5, overload_threshold=1.25)
    load_LE = np.array([[10, 20, 30, 20], [25, 20, 20, 15], [0, 0, 0, 0]], np.int32)  # means 20, 20, 0; one expert at the threshold
    want_LE = [[1, 1, (25 / 30) ** 0.5, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    np.testing.assert_allclose(overload_factor(load_LE, config, np.float32), want_LE, rtol=1e-6)
    assert np.all(
        np.asarray(jax.grad(lambda load_E: overload_factor(load_E, config, np.float32).sum())(load_LE[0].astype(np.float32))) == 0
    )
