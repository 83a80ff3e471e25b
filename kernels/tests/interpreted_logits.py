"""The Triton kernels of logit_sums and logit_gradients in Triton's interpreter, against the definition. Run by test_logits_triton.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moejax_kernels import UnsupportedError, logit_gradients, logit_sums
from moejax_kernels.logits import cases


@pytest.mark.parametrize("case", cases.SMALL, ids=str)
def test_values_match_the_definition(case):
    arrays = case.arrays("float32", seed=0)
    of_sums = {name: arrays[name] for name in ("hidden_TD", "weight_DV", "targets_T")}
    for op, inputs in ((logit_sums, of_sums), (logit_gradients, arrays)):
        got, want = (op(**inputs, **case.options, implementation=name) for name in ("triton_gpu", "reference"))
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)  # sums of up to 200 float32 terms in another order


def test_tokens_may_have_several_dims():
    arrays = {name: array for name, array in cases.SMALL[-1].arrays("float32", seed=0).items()}
    folded = {name: array if name == "weight_DV" else array.reshape(7, 10, *array.shape[1:]) for name, array in arrays.items()}
    options = {**cases.SMALL[-1].options, "implementation": "triton_gpu"}
    np.testing.assert_array_equal(logit_gradients(**folded, **options).reshape(70, -1), logit_gradients(**arrays, **options))


def test_the_loss_over_them_is_the_loss_over_xla_s():
    from moejax.losses.cross_entropy import cross_entropy  # the layer above: how it cuts the vocabulary is what is tried here

    rng = np.random.default_rng(0)
    hidden_BLD, unembed_DV = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 9, 8), (8, 150)))
    targets_BL, weights_BL = jnp.asarray(rng.integers(0, 150, (2, 9))), jnp.asarray(rng.random((2, 9)), jnp.float32)

    def run(implementation, chunk_vocab):
        options = {"z_coef": 0.1, "logit_cap": 5.0, "chunk_tokens": 4, "chunk_vocab": chunk_vocab, "implementation": implementation}
        loss = lambda *weights: cross_entropy(*weights, targets_BL, weights_BL, **options).loss_sum
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden_BLD, unembed_DV)

    for chunk_vocab in (64, 150):
        for ours, theirs in zip(jax.tree.leaves(run("triton_gpu", chunk_vocab)), jax.tree.leaves(run("xla", 150)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * np.abs(theirs).max())


def test_another_dtype_says_what_would_work():
    half = jnp.zeros((2, 3), jnp.float16)
    with pytest.raises(UnsupportedError, match="logit_sums: triton_gpu needs bfloat16 or float32 inputs, got float16"):
        logit_sums(half, half.T, jnp.zeros(2, int), implementation="triton_gpu")
