"""What context shards of KDA and Gated DeltaNet hand on: folded over the shards of a row, it gives the whole row, gradients included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moejax_kernels import Segments, gated_delta, gated_delta_shard_summary, kda, kda_shard_summary
from moejax_kernels.delta_cases import DeltaCase

SHARDS, WIDTH = 4, 17
OPS = {"kda": (kda, kda_shard_summary), "gated_delta": (gated_delta, gated_delta_shard_summary)}
INPUTS = ("q", "k", "v", "g", "beta", "initial_state")
LAYOUTS = {
    "across_every_border": (5, 40, 23),  # the second shard is inside the second document
    "borders_at_borders": (17, 17, 1, 33),
    "padding_at_the_end": (20, 1, 25, -22),  # the last shard is nothing but padding
    "one_document": (68,),
}


def ids_of(lengths):
    return np.concatenate([np.full(abs(length), number if length > 0 else -1) for number, length in enumerate(lengths)])


def inputs_of(name, *, strong, dtype="float64"):
    case = DeltaCase("row", 1, None, 1, 2, 4, 6, length=SHARDS * WIDTH, strong=strong)
    return case.arrays(dtype, seed=0, decay_per_channel=name == "kda")


@functools.partial(jax.jit, static_argnums=0)
def whole_row(name, inputs, segments, cotangents):
    """((o, final state), gradients) of the definition."""
    q, k, v, g, beta, state = inputs

    def run(q, k, v, g, beta, state):
        return OPS[name][0](q, k, v, g, beta, segments=segments, initial_state_BHCM=state, implementation="reference")

    out, pull = jax.vjp(run, q, k, v, g, beta, state)
    return out, pull(cotangents)


@functools.partial(jax.jit, static_argnums=(0, 1))
def folded(name, implementation, inputs, segments, goes_on, cotangents):
    """The same from the row's shards, which stand as rows of one call: a summary of each, a fold, a pass over each."""
    op, summary = OPS[name]

    def run(*arrays):
        *by_token, state_BHCM = (x.reshape(SHARDS, WIDTH, *x.shape[2:]) if x.shape[1] == SHARDS * WIDTH else x for x in arrays)
        transition_SHCC, own_SHCM = summary(*by_token[1:], segments=segments, implementation=implementation)
        entering = []
        for shard in range(SHARDS):
            entering.append(jnp.where(goes_on[shard], state_BHCM, 0))
            state_BHCM = transition_SHCC[shard] @ entering[-1] + own_SHCM[shard]
        entering_SHCM = jnp.concatenate(entering)
        o_SLHM, _ = op(*by_token, segments=segments, initial_state_BHCM=entering_SHCM, implementation=implementation)
        return o_SLHM.reshape(1, -1, *o_SLHM.shape[2:]), state_BHCM

    out, pull = jax.vjp(run, *inputs)
    return out, pull(cotangents)


@pytest.mark.parametrize("strong", [False, True], ids=["mild", "strong"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("name", OPS)
def test_folded_shards_equal_the_row_with_all_gradients(name, implementation, layout, strong):
    ids_L = ids_of(LAYOUTS[layout])
    ids_SL = ids_L.reshape(SHARDS, WIDTH)
    goes_on = np.r_[True, (ids_SL[1:, 0] == ids_SL[:-1, -1]) | (ids_SL[1:, 0] < 0)]  # a document that starts here starts from nothing
    with jax.enable_x64(True):
        inputs, random = inputs_of(name, strong=strong), np.random.default_rng(1)
        cotangents = tuple(jnp.asarray(random.standard_normal(x.shape)) for x in (inputs[2], inputs[5]))
        want, want_grads = whole_row(name, inputs, Segments.build(ids_L[None]), cotangents)
        got, grads = folded(name, implementation, inputs, Segments.build(ids_SL), goes_on, cotangents)
    names = ("o", "final state", *INPUTS)
    for label, ours, theirs in zip(names, (*got, *grads), (*want, *want_grads), strict=True):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        assert np.abs(theirs).max() > 0
        assert np.abs(ours - theirs).max() <= 1e-12 * np.abs(theirs).max(), label  # float64 roundings, some hundreds in a row


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("name", OPS)
def test_the_transition_is_nothing_where_another_document_ends_the_shard_and_identity_for_padding(name, implementation):
    _, k, v, g, beta, _ = inputs_of(name, strong=False, dtype="float32")
    rows = [x.reshape(SHARDS, WIDTH, *x.shape[2:]) for x in (k, v, g, beta)]
    ids_SL = np.stack([np.full(WIDTH, 0), np.repeat([0, 1], (3, 14)), np.full(WIDTH, -1), np.repeat([0, -1], (9, 8))])
    summary = jax.jit(functools.partial(OPS[name][1], implementation=implementation))
    transition_SHCC, own_SHCM = map(np.asarray, summary(*rows, segments=Segments.build(ids_SL)))
    assert transition_SHCC.shape == (SHARDS, 2, 4, 4) and own_SHCM.shape == (SHARDS, 2, 4, 6)
    np.testing.assert_array_equal(transition_SHCC[1], 0)
    np.testing.assert_array_equal(transition_SHCC[2], np.broadcast_to(np.eye(4), (2, 4, 4)))
    np.testing.assert_array_equal(own_SHCM[2], 0)
    assert np.abs(transition_SHCC[[0, 3]]).max((1, 2, 3)).min() > 1e-3


def test_no_segments_are_one_document():
    _, k, v, g, beta, _ = inputs_of("kda", strong=False, dtype="float32")
    summary = jax.jit(functools.partial(kda_shard_summary, implementation="reference"))
    got = summary(k, v, g, beta)
    for ours, theirs in zip(got, summary(k, v, g, beta, segments=Segments.whole(1, SHARDS * WIDTH)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def test_wrong_inputs_are_named_with_their_shapes():
    _, k, v, g, beta, _ = inputs_of("kda", strong=False, dtype="float32")
    with pytest.raises(ValueError, match=r"kda_shard_summary: g_BLHC must be \(1, 68, 2, 4\)"):
        kda_shard_summary(k, v, g[..., 0], beta)
    with pytest.raises(ValueError, match=r"gated_delta_shard_summary: segments are for \(1, 5\) tokens"):
        gated_delta_shard_summary(k, v, g[..., 0], beta, segments=Segments.whole(1, 5))
