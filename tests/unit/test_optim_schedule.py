import numpy as np
import pytest

from moejax.config.training import OptimConfig
from moejax.optim.schedule import learning_rate


def factors(steps=100, **fields):
    factor = learning_rate(OptimConfig(**fields), steps)
    return lambda update: float(factor(update - 1))  # updates are counted from 1 here


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_rises_linearly_and_reaches_the_peak_at_its_last_update(schedule):
    at = factors(schedule=schedule, warmup_steps=10)
    np.testing.assert_allclose([at(1), at(5), at(10)], [0.1, 0.5, 1.0], rtol=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_without_warm_up_the_first_update_is_not_zero(schedule):
    assert factors(schedule=schedule, warmup_steps=0)(1) > 0.99


def test_cosine_falls_from_the_peak_over_the_middle_to_the_final_fraction_and_stays():
    at = factors(schedule="cosine", warmup_steps=20, final_fraction=0.1)
    np.testing.assert_allclose([at(20), at(40), at(60), at(100), at(150)], [1, 0.1 + 0.9 * (1 + 0.5**0.5) / 2, 0.55, 0.1, 0.1], rtol=1e-5)


def test_wsd_is_stable_and_then_falls_linearly():
    at = factors(schedule="wsd", warmup_steps=10, decay_fraction=0.2, final_fraction=0.5)
    np.testing.assert_allclose([at(11), at(80), at(90), at(100), at(101)], [1, 1, 0.75, 0.5, 0.5], rtol=1e-6)


def test_wsd_never_falls_before_warm_up_has_ended():
    at = factors(schedule="wsd", warmup_steps=50, decay_fraction=1.0, final_fraction=0.0)
    np.testing.assert_allclose([at(25), at(50), at(75), at(100)], [0.5, 1, 0.5, 0], atol=1e-6)


def test_constant_stays_at_the_peak():
    at = factors(schedule="constant", warmup_steps=10)
    assert at(10) == at(100) == at(1000) == 1


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_run_shorter_than_its_warm_up_only_warms_up(schedule):
    at = factors(steps=5, schedule=schedule, warmup_steps=10)
    np.testing.assert_allclose([at(1), at(5)], [0.1, 0.5], rtol=1e-6)
