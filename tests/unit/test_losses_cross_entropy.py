import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.losses.cross_entropy import cross_entropy

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "ops" / "cross_entropy.npz"


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(GOLDEN))


def plain(hidden_BLD, unembed_DV, targets_BL, weights_BL, z_coef):
    logits_BLV = hidden_BLD @ unembed_DV
    lse_BL = jax.nn.logsumexp(logits_BLV, axis=-1)
    target_BL = jnp.take_along_axis(logits_BLV, jnp.maximum(targets_BL, 0)[..., None], axis=-1)[..., 0]
    return jnp.sum(weights_BL * (lse_BL - target_BL + z_coef * lse_BL**2))


def close(got, want, tolerance):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-6)])  # 1e-6: eight float32 roundings of the peak
@pytest.mark.parametrize(
    "options",
    [
        {"chunk_tokens": 7},
        {"chunk_tokens": 1024, "chunk_vocab": 10},
        {"chunk_tokens": 7, "chunk_vocab": 100, "gradients": "recompute"},
        {"gradients": "recompute"},
    ],
    ids=str,
)
def test_values_and_gradients_match_the_golden_ones(golden, dtype, tolerance, options):
    with jax.enable_x64(dtype == "float64"):
        hidden_BLD, unembed_DV = jnp.asarray(golden["hidden"], dtype), jnp.asarray(golden["weight"], dtype)
        targets_BL = jnp.asarray(golden["labels"], jnp.int32)
        weights_BL = jnp.ones(targets_BL.shape)  # -100 is ignored whatever its weight

        def mean_loss(hidden_BLD, unembed_DV, z_coef):
            sums = cross_entropy(hidden_BLD, unembed_DV, targets_BL, weights_BL, z_coef=z_coef, **options)
            return sums.loss_sum / sums.weight_sum, sums

        both = jax.jit(jax.value_and_grad(mean_loss, argnums=(0, 1), has_aux=True))
        (_, sums), grads = both(hidden_BLD, unembed_DV, 0.0)
        (z_loss, _), z_grads = both(hidden_BLD, unembed_DV, float(golden["z_coef"]))
        assert sums.nll_sum.dtype == dtype
        close(sums.nll_sum, golden["nll_sum"], tolerance)
        close(sums.z_sum, golden["z_sum"], tolerance)
        assert sums.weight_sum == golden["count"]
        close(z_loss, (golden["nll_sum"] + golden["z_coef"] * golden["z_sum"]) / golden["count"], tolerance)
        for got, name in zip((*grads, *z_grads), ("d_hidden", "d_weight", "zd_hidden", "zd_weight"), strict=True):
            close(got, golden[name], tolerance)
        assert not np.asarray(grads[0])[np.asarray(targets_BL) < 0].any()


def random_case(seed=0, B=2, L=11, D=8, V=13):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape))

    return draw(B, L, D), draw(D, V), rng.integers(0, V, (B, L)), jnp.asarray(rng.random((B, L)))


def test_gradients_of_a_scaled_and_weighted_loss_equal_the_plain_ones():
    with jax.enable_x64(True):
        hidden_BLD, unembed_DV, targets_BL, weights_BL = random_case()

        def chunked(hidden, unembed, weights):
            return -65528.0 * cross_entropy(hidden, unembed, targets_BL, weights, z_coef=0.3, chunk_tokens=4).loss_sum

        def whole(hidden, unembed, weights):
            return -65528.0 * plain(hidden, unembed, targets_BL, weights, 0.3)

        got = jax.jit(jax.grad(chunked, argnums=(0, 1, 2)))(hidden_BLD, unembed_DV, weights_BL)
        want = jax.jit(jax.grad(whole, argnums=(0, 1, 2)))(hidden_BLD, unembed_DV, weights_BL)
        for ours, theirs in zip(got, want, strict=True):
            close(ours, theirs, 1e-12)


def test_a_gradient_of_the_reported_parts_is_nan_and_never_a_quiet_zero():
    hidden_BLD, unembed_DV, targets_BL, weights_BL = random_case()

    def gradient_of(name):
        return jax.jit(
            jax.grad(lambda hidden: getattr(cross_entropy(hidden, unembed_DV, targets_BL, weights_BL, z_coef=0.1, chunk_tokens=4), name))
        )(hidden_BLD)

    assert np.isnan(gradient_of("nll_sum")).all()
    assert np.isnan(gradient_of("z_sum")).all()
    assert np.isfinite(gradient_of("loss_sum")).all()


def test_the_head_is_multiplied_three_times_with_gradients_and_once_without():
    hidden_BLD, unembed_DV, targets_BL, weights_BL = random_case()

    def loss(hidden, unembed):
        return cross_entropy(hidden, unembed, targets_BL, weights_BL, z_coef=0.1, chunk_tokens=4).loss_sum

    matmuls = lambda function: jax.jit(function).lower(hidden_BLD, unembed_DV).as_text().count("stablehlo.dot_general")
    assert matmuls(jax.grad(loss, argnums=(0, 1))) == 3
    assert matmuls(loss) == 1


def test_microbatches_of_1_and_100_labels_add_up_to_the_joined_batch():
    with jax.enable_x64(True):
        hidden_BLD, unembed_DV, targets_BL, _ = random_case(B=2, L=100)
        weights_BL = np.ones((2, 100))
        weights_BL[0, 1:] = 0

        def over_101(hidden, unembed, microbatches):
            return (
                sum(
                    cross_entropy(hidden[rows], unembed, targets_BL[rows], weights_BL[rows], chunk_tokens=32).loss_sum
                    for rows in microbatches
                )
                / 101
            )

        both = jax.jit(jax.value_and_grad(over_101, argnums=(0, 1)), static_argnums=2)
        joined = both(hidden_BLD, unembed_DV, (slice(0, 2),))
        parts = both(hidden_BLD, unembed_DV, (slice(0, 1), slice(1, 2)))
        for got, want in zip(jax.tree.leaves(parts), jax.tree.leaves(joined), strict=True):
            close(got, want, 1e-12)


def test_a_batch_without_labels_is_zero_with_zero_gradients():
    hidden_BLD, unembed_DV, targets_BL, weights_BL = random_case()

    def loss(hidden, unembed):
        return cross_entropy(hidden, unembed, np.full_like(targets_BL, -100), 0 * weights_BL, z_coef=1.0, chunk_tokens=4).loss_sum

    value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden_BLD.astype(jnp.float32), unembed_DV.astype(jnp.float32))
    assert value == 0
    assert not any(np.asarray(grad).any() for grad in grads)


def test_bfloat16_keeps_logits_and_head_gradient_in_float32():
    hidden_BLD, unembed_DV, targets_BL, weights_BL = random_case()
    hidden_BLD, unembed_DV = hidden_BLD.astype(jnp.bfloat16), unembed_DV.astype(jnp.float32)

    def loss(hidden, unembed):
        return cross_entropy(hidden, unembed, targets_BL, weights_BL, chunk_tokens=4).loss_sum

    value, (dhidden_BLD, dunembed_DV) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden_BLD, unembed_DV)

    def whole(hidden, unembed):
        return plain(hidden, unembed, targets_BL, weights_BL, 0.0)

    want, want_grads = jax.jit(jax.value_and_grad(whole, argnums=(0, 1)))(
        hidden_BLD.astype(jnp.float32), unembed_DV.astype(jnp.bfloat16).astype(jnp.float32)
    )
    assert (value.dtype, dhidden_BLD.dtype, dunembed_DV.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    close(value, want, 1e-6)  # inputs are the same rounded ones, products and sums are float32
    close(dhidden_BLD, want_grads[0], 2**-7)  # the logits' cotangent and the result are rounded to bfloat16
    close(dunembed_DV, want_grads[1], 2**-7)


@pytest.mark.parametrize("count", [257, 1000, 4000])
def test_a_scale_that_bfloat16_cannot_hold_reaches_the_hidden_states_unrounded(count):
    hidden_BLD, unembed_DV, targets_BL, weights_BL = random_case(D=64, V=64)
    hidden_BLD, unembed_DV = hidden_BLD.astype(jnp.bfloat16), unembed_DV.astype(jnp.float32)

    def gradient(scale):
        loss = lambda hidden: scale * cross_entropy(hidden, unembed_DV, targets_BL, weights_BL, chunk_tokens=4).loss_sum
        return np.asarray(jax.jit(jax.grad(loss))(hidden_BLD), np.float64)

    whole, scaled = gradient(1.0), gradient(1 / count)
    # the factor that fits best: roundings of 1,408 numbers by up to 2**-9 average out, a common one would not
    assert abs(count * np.vdot(scaled, whole) / np.vdot(whole, whole) - 1) < 3e-4


def test_the_gradient_of_the_z_coefficient_is_the_z_sum():
    hidden_BLD, unembed_DV, targets_BL, weights_BL = random_case()
    sums = lambda z_coef: cross_entropy(hidden_BLD, unembed_DV, targets_BL, weights_BL, z_coef=z_coef, chunk_tokens=4)
    close(jax.grad(lambda z_coef: 3 * sums(z_coef).loss_sum)(0.1), 3 * sums(0.1).z_sum, 1e-6)


def test_compiled_temporaries_do_not_hold_the_logits():
    B, L, D, V = 1, 1024, 8, 4096
    shapes = (jax.ShapeDtypeStruct((B, L, D), jnp.float32), jax.ShapeDtypeStruct((D, V), jnp.float32))

    def loss(hidden, unembed):
        return cross_entropy(hidden, unembed, jnp.zeros((B, L), jnp.int32), jnp.ones((B, L)), chunk_tokens=64).loss_sum

    memory = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < B * L * V * 4 / 3  # a few chunks of 1/16 of the logits


@pytest.mark.parametrize("options", [{}, {"chunk_tokens": 4, "chunk_vocab": 5}, {"gradients": "recompute", "chunk_tokens": 4}], ids=str)
def test_what_is_left_out_may_be_no_number_and_what_counts_must_have_a_token(options):
    hidden_BLD, unembed_DV, targets_BL, weights_BL = (np.array(array) for array in random_case())
    weights_BL[0, 3], weights_BL[1, 2] = 0, 1
    targets_BL[0, 3], targets_BL[1, 2] = 10**6, -100
    sums = jax.jit(lambda *arrays: cross_entropy(*arrays, z_coef=0.1, **options))
    both = jax.jit(jax.value_and_grad(lambda *arrays: sums(*arrays).loss_sum))
    want = sums(hidden_BLD, unembed_DV, targets_BL, weights_BL)
    broken_BLD = hidden_BLD.copy()
    broken_BLD[0, 3], broken_BLD[1, 2] = np.nan, np.inf
    got = sums(broken_BLD, unembed_DV, targets_BL, weights_BL)
    for name, left, right in zip(want._fields, got, want, strict=True):
        assert left == right, name
    assert both(broken_BLD, unembed_DV, targets_BL, weights_BL)[0] == want.loss_sum
    for target in (unembed_DV.shape[1], -1):
        wrong_BL = targets_BL.copy()
        wrong_BL[1, 2] = target
        assert np.isnan(sums(hidden_BLD, unembed_DV, wrong_BL, weights_BL).nll_sum)
        assert np.isnan(both(hidden_BLD, unembed_DV, wrong_BL, weights_BL)[0])
