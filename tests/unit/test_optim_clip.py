import jax
import jax.numpy as jnp
import numpy as np

from moejax.optim.clip import clip, global_norm

GRADS = {"a": jnp.array([3.0, 0.0]), "b": {"c": jnp.array([[4.0]], jnp.bfloat16)}, "frozen": jnp.array([100.0])}
TRAINABLE = {"a": True, "b": {"c": True}, "frozen": False}


def test_norm_is_over_all_trainable_tensors():
    assert global_norm(GRADS, trainable=TRAINABLE) == 5
    np.testing.assert_allclose(global_norm(GRADS), (25 + 1e4) ** 0.5, rtol=1e-6)


def test_norm_of_bfloat16_is_summed_in_float32():
    ones = jnp.ones(100_000, jnp.bfloat16)
    np.testing.assert_allclose(global_norm([ones]), 100_000**0.5, rtol=1e-6)


def test_large_gradients_are_scaled_to_the_limit_and_keep_their_dtype():
    clipped = clip(GRADS, global_norm(GRADS, trainable=TRAINABLE), 2.5)
    np.testing.assert_allclose(clipped["a"], [1.5, 0])
    assert clipped["b"]["c"].dtype == jnp.bfloat16


def test_small_and_zero_gradients_stay_bit_for_bit_and_0_switches_clipping_off():
    for grads, limit in ((GRADS, 1e3), (GRADS, 0.0), (jax.tree.map(jnp.zeros_like, GRADS), 1.0)):
        clipped = clip(grads, global_norm(grads), limit)
        jax.tree.map(np.testing.assert_array_equal, clipped, grads)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        grads = [jnp.array([1e-9, 1.0])]
        assert global_norm(grads).dtype == jnp.float64
        np.testing.assert_allclose(clip(grads, global_norm(grads), 0.5)[0], [0.5e-9, 0.5], rtol=1e-12)


def test_the_norm_tells_of_one_bad_value():
    for bad in (jnp.nan, jnp.inf):
        assert not jnp.isfinite(global_norm({**GRADS, "a": jnp.array([1.0, bad])}))
