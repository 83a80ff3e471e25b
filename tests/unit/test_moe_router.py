"""The choice of experts against a plain definition."""

import jax
import numpy as np
import pytest

from moejax.config.model import RouterConfig
from moejax.moe.router import route

EXPERTS, CHOSEN = 8, 3
CONFIGS = {
    "softmax": RouterConfig(),
    "softmax, not renormalised": RouterConfig(renormalise=False),
    "sigmoid with bias and scale": RouterConfig(score="sigmoid", correction_bias=True, scale=2.5),
    "sigmoid, groups": RouterConfig(score="sigmoid", correction_bias=True, num_groups=4, groups_kept=2),
    "softmax, one group of two": RouterConfig(num_groups=2, groups_kept=1, renormalise=False, scale=0.5),
}


def by_hand(logits_E, bias_E, config):
    """One token: ids and weights, expert after expert."""
    scores_E = 1 / (1 + np.exp(-logits_E)) if config.score == "sigmoid" else np.exp(logits_E) / np.exp(logits_E).sum()
    choice_E = scores_E + bias_E
    size = EXPERTS // config.num_groups
    group = lambda expert: expert // size
    worth = [sum(sorted(choice_E[g * size : (g + 1) * size])[-2:]) for g in range(config.num_groups)]
    open_groups = sorted(range(config.num_groups), key=lambda g: (-worth[g], g))[: config.groups_kept]
    allowed = [expert for expert in range(EXPERTS) if group(expert) in open_groups]
    ids = sorted(allowed, key=lambda expert: (-choice_E[expert], expert))[:CHOSEN]
    weights = scores_E[ids]
    return ids, (weights / weights.sum() if config.renormalise else weights) * config.scale


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_choice_and_weights_follow_the_definition(config):
    rng = np.random.default_rng(0)
    logits_BLE, valid_BL = rng.normal(0, 2, (2, 9, EXPERTS)).astype(np.float32), rng.random((2, 9)) < 0.8
    bias_E = rng.normal(0, 0.3, EXPERTS).astype(np.float32) if config.correction_bias else None
    routing = route(logits_BLE, bias_E, valid_BL, experts_per_token=CHOSEN, config=config)
    for at in np.ndindex(2, 9):
        ids, weights = by_hand(logits_BLE[at].astype(np.float64), 0 if bias_E is None else bias_E, config)
        assert np.asarray(routing.ids_BLK)[at].tolist() == (ids if valid_BL[at] else [-1] * CHOSEN)
        np.testing.assert_allclose(np.asarray(routing.probs_BLK)[at], weights, rtol=2e-6)


def test_softmax_over_the_chosen_logits_equals_a_renormalised_softmax():
    logits_BLE = np.random.default_rng(1).normal(0, 3, (1, 5, EXPERTS)).astype(np.float32)
    routing = route(logits_BLE, None, np.ones((1, 5), bool), experts_per_token=CHOSEN, config=RouterConfig())
    top, ids = jax.lax.top_k(logits_BLE, CHOSEN)
    np.testing.assert_array_equal(routing.ids_BLK, ids)
    np.testing.assert_allclose(routing.probs_BLK, jax.nn.softmax(top, -1), rtol=2e-6)


@pytest.mark.parametrize("config", [CONFIGS["softmax"], CONFIGS["sigmoid, groups"]], ids=["plain", "groups"])
def test_of_equal_scores_the_lower_expert_wins(config):
    routing = route(
        np.zeros((1, 4, EXPERTS), np.float32), np.zeros(EXPERTS, np.float32), np.ones((1, 4), bool), experts_per_token=CHOSEN, config=config
    )
    assert np.asarray(routing.ids_BLK).tolist() == [[list(range(CHOSEN))] * 4]


def test_the_bias_changes_the_choice_but_no_weight_and_gets_no_gradient():
    logits_BLE = np.random.default_rng(2).normal(size=(1, 6, EXPERTS)).astype(np.float32)
    config = RouterConfig(score="sigmoid", correction_bias=True, renormalise=False)

    def total(bias_E):
        return route(logits_BLE, bias_E, np.ones((1, 6), bool), experts_per_token=CHOSEN, config=config).probs_BLK.sum()

    bias_E = np.zeros(EXPERTS, np.float32)
    bias_E[5] = 10
    routing = route(logits_BLE, bias_E, np.ones((1, 6), bool), experts_per_token=CHOSEN, config=config)
    assert np.all(np.asarray(routing.ids_BLK)[..., 0] == 5)
    np.testing.assert_allclose(np.asarray(routing.probs_BLK)[..., 0], jax.nn.sigmoid(logits_BLE[..., 5]), rtol=1e-6)
    assert np.all(np.asarray(jax.grad(total)(bias_E)) == 0)


def test_sigmoid_scores_that_all_underflow_give_finite_weights_and_gradients():
    config = RouterConfig(score="sigmoid")
    probs = lambda logits: route(logits, None, np.ones((1, 2), bool), experts_per_token=CHOSEN, config=config).probs_BLK.sum()
    logits_BLE = np.full((1, 2, EXPERTS), -200, np.float32)
    assert np.isfinite(probs(logits_BLE)) and np.all(np.isfinite(jax.grad(probs)(logits_BLE)))
