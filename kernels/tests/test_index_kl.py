"""index_kl: golden loss and gradients, warm-up, stop-gradients, borders."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moejax_kernels import query_blocks
from moejax_kernels.index_kl import cases, index_kl
from moejax_kernels.index_topk import index_topk
from moejax_kernels.segments import Segments

BOTH = pytest.mark.parametrize("implementation", ["reference", "xla"])
GOLDEN = pathlib.Path(__file__).parents[2] / "tests" / "golden" / "ops"
jitted_topk = jax.jit(index_topk, static_argnames=("topk", "implementation"))
NAMES = ("q", "k", "index_q", "index_k", "index_w")


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(query_blocks, "BLOCK_NUMBERS", 1)
    monkeypatch.setattr(query_blocks, "MIN_QUERIES", 50)


def run(arrays, ids, cotangent_BL, segments, implementation, *, scale=0.4):
    """Loss per query and gradients of q, k and the three index inputs."""
    return value_and_gradients([arrays[name] for name in NAMES], ids, cotangent_BL, segments, implementation, scale)


@functools.partial(jax.jit, static_argnums=(4, 5))
def value_and_gradients(inputs, ids, cotangent_BL, segments, implementation, scale):
    loss = functools.partial(index_kl, ids_BLK=ids, scale=scale, segments=segments, implementation=implementation)
    kl_BL, transpose = jax.vjp(loss, *inputs)
    return kl_BL, *transpose(cotangent_BL.astype(kl_BL.dtype))


def choose(case, arrays, segments):
    return jitted_topk(*(arrays[name] for name in NAMES[2:]), topk=case.topk, segments=segments, implementation="reference")


@BOTH
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("name", "warm_up"), [("gqa", False), ("mqa", False), ("topk_over_length", False), ("topk_over_length", True)])
def test_loss_and_gradients_are_golden(name, dtype, warm_up, implementation):
    """Where topk exceeds the length all visible keys are chosen, and the warm-up, without ids, is the same."""
    golden = np.load(GOLDEN / f"sparse_{name}.npz")
    segments = Segments.build(golden["segment_ids"].astype(np.int32))
    order = np.argsort(~golden["selected"], axis=2, kind="stable")[:, :, : int(golden["topk"])]
    ids = None if warm_up else np.where(np.take_along_axis(golden["selected"], order, 2), order, -1).astype(np.int32)
    with jax.enable_x64(dtype == "float64"):
        arrays = {key: jnp.asarray(golden[key], dtype) for key in NAMES}
        mean_BL = np.full(segments.ids_BL.shape, 1 / segments.ids_BL.size, dtype)
        kl_BL, dq, dk, *got = run(arrays, ids, mean_BL, segments, implementation, scale=float(golden["scale"]))
    assert not np.asarray(dq).any()
    assert not np.asarray(dk).any()
    np.testing.assert_allclose(np.asarray(kl_BL, np.float64).mean(), golden["kl"], rtol=1e-12 if dtype == "float64" else 1e-6)
    for ours, key in zip(got, NAMES[2:], strict=True):
        want = golden[f"kl_d_{key}"]
        difference = np.asarray(ours, np.float64) - want
        if dtype == "float64":
            assert np.abs(difference).max() < 1e-10 * np.abs(want).max()
        else:
            assert np.sqrt(np.mean(difference**2)) < 1e-4 * np.sqrt(np.mean(want**2))


@BOTH
@pytest.mark.parametrize(("case", "warm_up"), [(cases.SMALL[0], True), (cases.SMALL[0], False), (cases.SMALL[1], False)], ids=str)
def test_another_document_and_padding_have_exactly_no_influence(case, warm_up, implementation):
    second, segments = sum(map(abs, case.documents[:2])), case.segments()
    arrays, other = ({name: np.asarray(array) for name, array in case.arrays("float32", seed=seed).items()} for seed in (0, 1))
    changed = {name: np.concatenate([3 * other[name][:, :second], arrays[name][:, second:]], axis=1) for name in NAMES}
    cotangent_BL = (np.arange(case.length) >= second) * np.ones((case.rows, 1), np.float32)
    before, after = (
        run(inputs, None if warm_up else choose(case, inputs, segments), cotangent_BL, segments, implementation)
        for inputs in (arrays, changed)
    )
    for ours, theirs in zip(before, after, strict=True):
        np.testing.assert_array_equal(np.asarray(ours)[:, second:], np.asarray(theirs)[:, second:])
    for gradient in after[1:]:
        assert np.isfinite(gradient).all()
        assert not np.asarray(gradient)[:, :second].any()
    assert not np.asarray(after[0])[segments.ids_BL < 0].any()


@BOTH
def test_scores_that_fit_the_attention_cost_nothing(implementation):
    """One head whose positive dots are the attention's own scores: both softmaxes are the same."""
    random = np.random.default_rng(2)
    q, k = (np.abs(random.standard_normal((1, 30, 1, 4))) for _ in range(2))
    with jax.enable_x64(True):
        kl_BL = index_kl(q, k, q, k[:, :, 0], np.full((1, 30, 1), 0.7), None, scale=0.7, implementation=implementation)
    np.testing.assert_allclose(kl_BL, 0, atol=1e-14)


def test_a_target_that_underflows_to_zero_is_finite():
    """exp(-2000) is 0 in float32, and 0 log 0 is 0."""
    q, k = jnp.full((1, 2, 1, 1), 2000.0), jnp.array([1.0, 0.0]).reshape(1, 2, 1, 1)
    arrays = {"q": q, "k": k, "index_q": jnp.ones((1, 2, 1, 1)), "index_k": jnp.ones((1, 2, 1)), "index_w": jnp.ones((1, 2, 1))}
    kl_BL, *gradients = run(arrays, None, jnp.ones((1, 2)), None, "xla", scale=1.0)
    np.testing.assert_allclose(kl_BL, [[0, np.log(2)]], atol=1e-6)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_bad_inputs_say_what_would_work():
    q, k, index_q, index_k, index_w = (jnp.zeros(shape) for shape in ((1, 6, 2, 4), (1, 6, 1, 4), (1, 5, 3, 8), (1, 5, 8), (1, 5, 3)))
    with pytest.raises(ValueError, match="the index has B=1, L=5, the attention B=1, L=6"):
        index_kl(q, k, index_q, index_k, index_w, None, scale=1.0)
    with pytest.raises(ValueError, match=r"index_k_BLC is \(1, 5, 7\), so C=7, but index_q_BLJC \(1, 5, 3, 8\) has C=8"):
        index_kl(q, k, index_q, jnp.zeros((1, 5, 7)), index_w, None, scale=1.0)
