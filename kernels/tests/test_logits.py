"""logit_sums and logit_gradients: against plain formulas in float64, and precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moejax_kernels import UnsupportedError, logit_gradients, logit_sums
from moejax_kernels.logits import cases

BOTH = pytest.mark.parametrize("implementation", ["reference", "xla"])
CASES = pytest.mark.parametrize("case", cases.SMALL, ids=str)


def plain(case, arrays):
    """Logits of the columns that count, where they are targets, and how many columns do not count."""
    logits_TV = np.asarray(arrays["hidden_TD"]) @ np.asarray(arrays["weight_DV"])
    if case.logit_cap:
        logits_TV = case.logit_cap * np.tanh(logits_TV / case.logit_cap)
    skip = case.skip or 0
    is_target_TV = np.asarray(arrays["targets_T"])[:, None] == np.arange(skip, case.columns)
    return logits_TV[:, skip:], is_target_TV, skip


@CASES
@BOTH
def test_values_match_the_formula(case, implementation):
    with jax.enable_x64(True):
        arrays = case.arrays("float64", seed=0)
        arrays = {name: array.astype(jnp.float64) if array.dtype == jnp.float32 else array for name, array in arrays.items()}
        of_sums = {name: arrays[name] for name in ("hidden_TD", "weight_DV", "targets_T")}
        sums = jax.jit(functools.partial(logit_sums, **case.options, implementation=implementation))(**of_sums)
        dlogits_TV = jax.jit(functools.partial(logit_gradients, **case.options, implementation=implementation))(**arrays)
    logits_TV, is_target_TV, skip = plain(case, arrays)
    peak_T = logits_TV.max(1, initial=-np.inf)
    np.testing.assert_allclose(sums.peak_T, peak_T, rtol=1e-13)
    np.testing.assert_allclose(sums.total_T, np.exp(logits_TV - peak_T[:, None]).sum(1), rtol=1e-13)
    np.testing.assert_allclose(sums.target_T, (logits_TV * is_target_TV).sum(1), rtol=1e-12, atol=1e-14)
    lse, slope, weights = (np.asarray(arrays[name])[:, None] for name in ("lse_T", "slope_T", "weights_T"))
    want_TV = slope * np.exp(logits_TV - lse) - weights * is_target_TV
    if case.logit_cap:
        want_TV *= 1 - (logits_TV / case.logit_cap) ** 2
    np.testing.assert_allclose(dlogits_TV, np.pad(want_TV, ((0, 0), (skip, 0))), rtol=1e-12, atol=1e-14)


def test_bfloat16_accumulates_in_float32_and_rounds_the_gradient_once():
    arrays = cases.SMALL[-1].arrays("bfloat16", seed=1)
    options = cases.SMALL[-1].options
    of_sums = {name: arrays[name] for name in ("hidden_TD", "weight_DV", "targets_T")}
    got, want = (logit_sums(**of_sums, **options, implementation=name) for name in ("xla", "reference"))
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)  # 40 products of bfloat16 numbers are exact in float32, sums not
    got, want = (logit_gradients(**arrays, **options, implementation=name) for name in ("xla", "reference"))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=2**-7, atol=1e-6)


def test_bad_inputs_say_what_would_work():
    arrays = cases.SMALL[1].arrays("float32", seed=0)
    of_sums = {name: arrays[name] for name in ("hidden_TD", "weight_DV", "targets_T")}
    with pytest.raises(ValueError, match=r"weight_DV is bfloat16 \(64, 128\). Give both in one dtype"):
        logit_sums(**of_sums | {"weight_DV": arrays["weight_DV"].astype(jnp.bfloat16)})
    with pytest.raises(ValueError, match=r"lse_T is \(3,\), and there is one for each token of \(64,\)"):
        logit_gradients(**arrays | {"lse_T": jnp.zeros(3)})
    with pytest.raises(ValueError, match="targets_T must hold integers, got float32"):
        logit_sums(**of_sums | {"targets_T": jnp.zeros(64)})
    with pytest.raises(ValueError, match=r"weight_DV \(64, 0\); give floats, and a D and a V of at least 1"):
        logit_sums(**of_sums | {"weight_DV": arrays["weight_DV"][:, :0]})
    with pytest.raises(UnsupportedError, match="logit_sums: triton_gpu needs"):
        logit_sums(**of_sums, implementation="triton_gpu")
