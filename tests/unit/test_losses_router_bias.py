import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.losses import router_bias
from moejax.losses.router_bias import sign_update

T, E, K = 4096, 64, 8
margin_histogram = jax.jit(router_bias.margin_histogram, static_argnums=3)
quantile_update = jax.jit(router_bias.quantile_update, static_argnums=2)
BIAS_E = np.linspace(-0.1, 0.2, E, dtype=np.float32)


def skewed_scores(seed=0, *, num_tokens=T, sigma=0.7):
    rng = np.random.default_rng(seed)
    logits_TE = rng.standard_normal((num_tokens, E)) + sigma * rng.standard_normal(E)
    return (1 / (1 + np.exp(-logits_TE))).astype(np.float32)


def load(scores_TE, bias_E):
    ids_TK = np.argsort(-(scores_TE + np.asarray(bias_E)), axis=1)[:, :K]
    return np.bincount(ids_TK.ravel(), minlength=E)


def exact_update(scores_TE, bias_E):
    alpha_T = np.sort(scores_TE + bias_E, axis=1)[:, -K - 1]
    bias_E = np.quantile(alpha_T[:, None] - scores_TE, K / E, axis=0)
    return bias_E - bias_E.mean()


def test_sign_update_lifts_the_idle_and_lowers_the_busy():
    counts_LE = np.array([[8, 2, 5, 5], [0, 0, 0, 0]])
    got_LE = sign_update(jnp.array([[0.5, 0.0, 0.25, -1.0]] * 2), counts_LE, 1e-3)
    np.testing.assert_allclose(got_LE, [[0.499, 0.001, 0.25, -1.0], [0.5, 0.0, 0.25, -1.0]], rtol=1e-6)


def peaks_of_updates(scores_TE):
    """Largest load over the mean, before and after each of three updates."""
    bias_E, peaks = np.zeros(E, np.float32), []
    for _ in range(4):
        counts_E = load(scores_TE, bias_E)
        peaks.append(counts_E.max() / counts_E.mean())
        bias_E = quantile_update(bias_E, margin_histogram(scores_TE, bias_E, np.ones(len(scores_TE), bool), K), K)
    return peaks


def test_quantile_updates_balance_skewed_scores_in_three_steps():
    peaks = peaks_of_updates(skewed_scores())
    np.testing.assert_array_less(peaks, [5, 1.22, 1.12, 1.07])
    assert peaks[0] > 4


@pytest.mark.parametrize("seed", range(3))
def test_three_quantile_updates_balance_experts_whose_offsets_are_as_wide_as_the_tokens(seed):
    peaks = peaks_of_updates(skewed_scores(seed, num_tokens=8192, sigma=1.0))
    assert peaks[0] > 4 and peaks[3] < 1.1, peaks


def test_histogram_gives_the_exact_quantile_within_a_bin():
    scores_TE, bias_E = skewed_scores(1), BIAS_E
    got_E = quantile_update(bias_E, margin_histogram(scores_TE, bias_E, np.ones(T, bool), K), K)
    np.testing.assert_allclose(got_E, exact_update(scores_TE, bias_E), atol=2.3 / 1000)  # one bin of the range of 2.3
    np.testing.assert_allclose(got_E.mean(), 0, atol=1e-6)


def test_histograms_of_parts_add_up_exactly_and_padding_is_left_out():
    scores_TE, bias_E = skewed_scores(2), BIAS_E
    valid_T = np.arange(T) % 2 == 0
    whole_EN = margin_histogram(scores_TE, bias_E, valid_T, K)
    parts = [margin_histogram(scores_TE[rows], bias_E, valid_T[rows], K) for rows in (slice(0, T // 2), slice(T // 2, T))]
    np.testing.assert_array_equal(np.add(*parts), whole_EN)
    np.testing.assert_array_equal(margin_histogram(scores_TE[valid_T], bias_E, np.ones(T // 2, bool), K), whole_EN)
    assert (np.asarray(whole_EN).sum(-1) == T // 2).all() and whole_EN.dtype == jnp.int32


def test_stacked_layers_move_as_each_alone():
    bias_LE = np.stack([np.zeros_like(BIAS_E), BIAS_E])
    histogram_LEN = np.stack([margin_histogram(skewed_scores(layer), bias_LE[layer], np.ones(T, bool), K) for layer in (0, 1)])
    got_LE = quantile_update(bias_LE, histogram_LEN, K)
    for layer in (0, 1):
        np.testing.assert_allclose(got_LE[layer], quantile_update(bias_LE[layer], histogram_LEN[layer], K), rtol=1e-6)


@pytest.mark.parametrize("num_chosen", [K, E])
def test_without_tokens_or_without_a_choice_the_bias_stays(num_chosen):
    bias_E = BIAS_E
    valid_T = np.full(T, num_chosen == E)
    histogram_EN = margin_histogram(skewed_scores(), bias_E, valid_T, num_chosen)
    np.testing.assert_array_equal(quantile_update(bias_E, histogram_EN, num_chosen), bias_E)
