"""Segments drawn at random, with padding and with parents: "xla" against the definition of each op, values and gradients in float64.

The definitions themselves are held against documents written out in each op's own file; here in the attention family too. A row always
has six runs of 36 tokens in all, so that one compilation serves all draws.
"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from moejax_kernels import Segments, attention, causal_conv, gated_delta, index_kl, index_topk, kda, query_blocks, sparse_attention
from moejax_kernels.sparse_attention import xla as sparse_xla

LENGTH, RUNS, TOPK = 36, 6, 5
FAST = ("kda", "causal_conv", "sparse_attention")


@pytest.fixture(autouse=True, scope="module")
def several_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query_blocks, "BLOCK_NUMBERS", 1)
        patch.setattr(query_blocks, "MIN_QUERIES", 10)
        patch.setattr(sparse_xla, "DENSE_KEYS", 0)
        yield


def _delta(op, per_channel):
    shapes = (1, 4), (1, 4), (2, 3), (2, 4) if per_channel else (2,), (2,)

    def run(q, k, v, g, beta, *, segments, ids, implementation):
        unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        beta = jax.nn.sigmoid(beta)
        return op(unit(q), unit(k), v, -jnp.exp(g), beta, segments=segments, implementation=implementation)

    return shapes, run


def _conv(x, *, segments, ids, implementation):
    weight_D4 = jnp.arange(12.0).reshape(3, 4).astype(x.dtype) / 7 - 0.8
    return causal_conv(x, weight_D4, segments=segments, implementation=implementation)


def _attention(window):
    return lambda q, k, v, *, segments, ids, implementation: attention(
        q, k, v, scale=0.7, segments=segments, window=window, implementation=implementation
    )


def _sparse(q, k, v, *, segments, ids, implementation):
    return sparse_attention(q, k, v, ids, scale=0.7, segments=segments, implementation=implementation)


def _index_kl(q, k, index_q, index_k, index_w, *, segments, ids, implementation):
    q, k = jax.lax.stop_gradient((q, k))
    return index_kl(q, k, index_q, index_k, index_w, ids, scale=0.7, segments=segments, implementation=implementation)


OPS = {
    "kda": _delta(kda, True),
    "gated_delta": _delta(gated_delta, False),
    "causal_conv": (((3,),), _conv),
    "attention": (((4, 3), (2, 3), (2, 5)), _attention(None)),
    "window": (((4, 3), (2, 3), (2, 5)), _attention(4)),
    "sparse_attention": (((4, 3), (2, 3), (2, 5)), _sparse),
    "index_kl": (((4, 3), (2, 3), (2, 4), (4,), (2,)), _index_kl),
}
ATTENTIONS = ("attention", "window", "sparse_attention", "index_kl")
ALL = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in OPS]


@functools.cache
def compiled(name, implementation):
    """Function of (inputs, segments, ids, seed of the cotangents) to (outputs, gradients)."""

    @jax.jit
    def run(inputs, segments, ids, cotangents):
        call = functools.partial(OPS[name][1], segments=segments, ids=ids, implementation=implementation)
        out, pull = jax.vjp(call, *inputs)
        return out, pull(jax.tree.map(lambda like, given: given.astype(like.dtype), out, cotangents))

    return run


def outputs_of(name, inputs, segments, ids):
    return jax.eval_shape(lambda *arrays: OPS[name][1](*arrays, segments=segments, ids=ids, implementation="reference"), *inputs)


@st.composite
def rows(draw):
    """Ids [L] of one row, and the parents of its segments."""
    borders = draw(st.lists(st.integers(1, LENGTH - 1), min_size=RUNS - 1, max_size=RUNS - 1, unique=True))
    padding = draw(st.lists(st.booleans(), min_size=RUNS, max_size=RUNS))
    padding = [is_padding and not (run and padding[run - 1]) for run, is_padding in enumerate(padding)]  # two runs of -1 would be one
    ids_L = np.repeat([-1 if is_padding else run for run, is_padding in enumerate(padding)], np.diff([0, *sorted(borders), LENGTH]))
    real, parent = [run for run in range(RUNS) if not padding[run]], {}
    for at, run in enumerate(real):
        above = draw(st.sampled_from([None, *real[:at]]))
        if above is not None:
            parent[run] = above
    return ids_L, parent


def arrays_of(name, seed, segments):
    random = np.random.default_rng(seed)
    inputs = tuple(jnp.asarray(random.standard_normal((2, LENGTH, *shape))) for shape in OPS[name][0])
    visible = np.asarray(segments.visible(np.arange(LENGTH), np.arange(LENGTH)))
    ids = np.full((2, LENGTH, TOPK), -1, np.int32)
    for row, at in np.ndindex(2, LENGTH):
        keys = random.permutation(np.flatnonzero(visible[row, at]))[:TOPK]
        ids[row, at, : keys.size] = keys
    cotangents = jax.tree.map(lambda like: random.standard_normal(like.shape), outputs_of(name, inputs, segments, ids))
    return inputs, jnp.asarray(ids), cotangents


def agree(got, want):
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.isfinite(np.asarray(ours)).all()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-11 * max(1.0, np.abs(np.asarray(theirs)).max()))  # float64 roundings


@pytest.mark.parametrize("has_parents", [True, False], ids=["tree", "packed"])
@pytest.mark.parametrize("name", ALL)
@hypothesis.settings(max_examples=6, deadline=None, derandomize=True)
@hypothesis.given(both=st.tuples(rows(), rows()), seed=st.integers(0, 99))
def test_any_layout_matches_the_definition(name, has_parents, both, seed):
    ids_BL, parents = np.stack([row[0] for row in both]), [row[1] for row in both]
    with jax.enable_x64(True):
        segments = Segments.build(ids_BL, parents if has_parents else None)
        inputs, ids, cotangents = arrays_of(name, seed, segments)
        everything = inputs, segments, ids, cotangents
        agree(compiled(name, "xla")(*everything), compiled(name, "reference")(*everything))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", ATTENTIONS)
@hypothesis.settings(max_examples=4, deadline=None, derandomize=True)
@hypothesis.given(row=rows(), seed=st.integers(0, 99))
def test_any_tree_equals_its_documents_written_out(name, implementation, row, seed):
    """Values, and gradients summed over the documents: a shared prefix's own outputs count in the first of them alone."""
    ids_L, parent = row
    with jax.enable_x64(True):
        tree = Segments.build(np.stack([ids_L, ids_L]), [parent, parent])
        inputs, ids, cotangent = arrays_of(name, seed, tree)
        out, grads = jax.tree.map(np.asarray, compiled(name, implementation)(inputs, tree, ids, cotangent))
        want, want_grads, seen = np.zeros_like(out), [np.zeros(x.shape) for x in inputs], set()
        for leaf in sorted(set(ids_L.tolist()) - {-1} - set(parent.values())):
            path = [leaf]
            while path[0] in parent:
                path.insert(0, parent[path[0]])
            at = np.concatenate([np.flatnonzero(ids_L == number) for number in path])
            new_L = np.array([ids_L[t] not in seen for t in at])
            seen.update(path)
            place, back = np.full(LENGTH, -1), np.full(LENGTH + 1, -1)  # the document, then padding; the last of `back` is where -1 points
            place[: at.size], back[at] = at, np.arange(at.size)
            alone = Segments.build(np.stack([np.where(place >= 0, 0, -1)] * 2))
            given = np.zeros_like(cotangent)
            given[:, : at.size][:, new_L] = cotangent[:, at[new_L]]
            written_out = tuple(jnp.asarray(np.asarray(x)[:, place]) for x in inputs)
            ids_alone = jnp.asarray(back[np.asarray(ids)[:, place]].astype(np.int32))
            out_alone, grads_alone = compiled(name, "reference")(written_out, alone, ids_alone, given)
            want[:, at] = np.asarray(out_alone)[:, : at.size]
            for total, grad in zip(want_grads, grads_alone, strict=True):
                total[:, at] += np.asarray(grad)[:, : at.size]
        agree((out, grads), (want, tuple(want_grads)))


@hypothesis.settings(max_examples=6, deadline=None, derandomize=True)
@hypothesis.given(both=st.tuples(rows(), rows()), seed=st.integers(0, 99))
def test_the_index_chooses_what_the_definition_chooses(both, seed):
    segments = Segments.build(np.stack([row[0] for row in both]), [row[1] for row in both])
    random = np.random.default_rng(seed)
    arrays = [jnp.asarray(random.integers(-2, 3, (2, LENGTH, *shape)), jnp.float32) for shape in ((2, 3), (3,), (2,))]  # many ties
    got, want = (_topk(*arrays, segments, implementation) for implementation in ("xla", "reference"))
    np.testing.assert_array_equal(got, want)


@functools.partial(jax.jit, static_argnums=4)
def _topk(index_q, index_k, index_w, segments, implementation):
    return index_topk(index_q, index_k, index_w, topk=TOPK, segments=segments, implementation=implementation)
