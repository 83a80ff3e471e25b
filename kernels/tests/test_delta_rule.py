"""KDA and Gated DeltaNet, every implementation: golden values, the definition, packing.

Segments are arguments of the compiled functions, and most tests have the shapes of the golden values: few compilations.
"""

import dataclasses
import functools
import itertools
import pathlib

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from moejax_kernels.delta_cases import SMALL, DeltaCase
from moejax_kernels.gated_delta.api import gated_delta
from moejax_kernels.kda.api import kda
from moejax_kernels.segments import Segments

GOLDEN = pathlib.Path(__file__).parents[2] / "tests" / "golden" / "ops"
VARIANTS = {
    "kda_reference": functools.partial(kda, implementation="reference"),
    "kda_xla": functools.partial(kda, implementation="xla"),
    "kda_xla_bounded": functools.partial(kda, implementation="xla", min_log_decay=-5.0),
    "gdn_reference": functools.partial(gated_delta, implementation="reference"),
    "gdn_xla": functools.partial(gated_delta, implementation="xla"),
}
CHUNKED = [name for name in VARIANTS if "xla" in name]
GOLDEN_SHAPE = DeltaCase("golden", 2, None, 2, 2, 16, 24)
INPUTS = ("q", "k", "v", "g", "beta", "initial_state")


@functools.cache
def compiled(variant: str, with_segments: bool = True):
    """Function of (inputs, segments, cotangents) to ((o, final_state), gradients)."""

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})  # compiles in half the time
    def run(inputs, segments, cotangents):
        def forward(q, k, v, g, beta, state):
            return VARIANTS[variant](q, k, v, g, beta, segments=segments if with_segments else None, initial_state_BHCM=state)

        out, pull = jax.vjp(forward, *inputs)
        return out, pull(cotangents)

    return run


def cotangents_like(inputs, seed=9):
    random = np.random.default_rng(seed)
    return tuple(jnp.asarray(random.standard_normal(x.shape), x.dtype) for x in (inputs[2], inputs[5]))


def rms(x):
    return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def agree(got, want, tolerance=3e-6):
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.isfinite(ours).all()
        assert rms(ours - theirs) <= tolerance * rms(theirs) + 1e-12  # float32 roundings, some tens in a row


LIMITS = {
    "float32": {"o": 1e-5, "final_state": 1e-5} | {f"d_{name}": 1e-4 for name in INPUTS},
    "bfloat16": {"o": 0.005, "final_state": 0.005, "d_q": 0.008, "d_k": 0.008, "d_v": 0.008, "d_g": 0.02, "d_beta": 0.02}
    | {"d_initial_state": 0.005},
}
"""Of the RMS error, in shares of the RMS: a few roundings (6e-8; 0.002 of inputs and results); some times that still passes."""


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("decay", ["mild", "strong"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients_are_the_golden_ones(variant, decay, dtype):
    golden, state_dtype = np.load(GOLDEN / f"delta_{variant[:3]}_{decay}.npz"), "float64" if dtype == "float64" else "float32"
    typed = lambda name: jnp.asarray(golden[name], state_dtype if "state" in name else dtype)
    with jax.enable_x64(True):
        inputs, cotangents = [typed(name) for name in INPUTS], (typed("cotangent"), typed("state_cotangent"))
        got = compiled(variant)(inputs, Segments.build(golden["segment_ids"].astype(np.int32)), cotangents)
    got = dict(zip(("o", "final_state", *(f"d_{name}" for name in INPUTS)), (*got[0], *got[1]), strict=True))
    for name, array in got.items():
        assert array.dtype == (state_dtype if "state" in name else dtype)
        wrong = np.asarray(array, np.float64) - golden[name]
        if dtype == "float64":
            assert np.abs(wrong).max() <= 1e-10 * np.abs(golden[name]).max(), name
        else:
            assert rms(wrong) <= LIMITS[dtype][name] * rms(golden[name]), name


def check_against_the_definition(variant, case, segments):
    inputs = case.arrays(jnp.float32, seed=0, decay_per_channel=variant.startswith("kda"))
    everything = inputs, segments, cotangents_like(inputs)
    agree(compiled(variant, segments is not None)(*everything), compiled(variant[:3] + "_reference", segments is not None)(*everything))


@pytest.mark.parametrize("variant", CHUNKED)
@pytest.mark.parametrize("lengths", [(1, 15, 16, 17, 65, 82), (-3, 64, 64, -1, 32, -32), (-196,), (3,) * 60 + (16,), (195, 1)], ids=str)
def test_chunks_match_the_definition_wherever_borders_lie(variant, lengths):
    case = dataclasses.replace(GOLDEN_SHAPE, documents=lengths, strong=lengths[0] == 3)
    check_against_the_definition(variant, case, case.segments())


@pytest.mark.parametrize("variant, case", list(zip(itertools.cycle(CHUNKED), SMALL[::2], strict=False)), ids=str)
def test_chunks_match_the_definition_at_awkward_shapes(variant, case):
    check_against_the_definition(variant, case, case.segments())


@pytest.mark.slow
@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.parametrize("variant", CHUNKED)
def test_every_chunked_form_matches_the_definition_at_every_shape(variant, case):
    check_against_the_definition(variant, case, case.segments())


@hypothesis.settings(max_examples=6, deadline=None, derandomize=True)
@hypothesis.given(lengths=st.lists(st.integers(-20, 60).filter(bool), min_size=4, max_size=12), seed=st.integers(0, 99), data=st.data())
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_changed_document_changes_nothing_in_the_others(variant, lengths, seed, data):
    """Exactly, outputs and gradients. The cotangents change with the document too: what others receive must not know of them."""
    ids_L = np.concatenate([np.full(abs(length), number if length > 0 else -1) for number, length in enumerate(lengths)])
    ids_L = np.pad(ids_L[:196], (0, max(196 - ids_L.size, 0)), constant_values=99)
    changed_id = data.draw(st.sampled_from(sorted(set(ids_L.tolist()))))
    segments = Segments.build(np.stack([ids_L, ids_L]))
    case = dataclasses.replace(GOLDEN_SHAPE, documents=(196,), strong=bool(seed % 2))
    inputs, other = (case.arrays(jnp.float32, seed=seed + add, decay_per_channel=variant.startswith("kda")) for add in (0, 100))
    cotangents, other_cotangents = cotangents_like(inputs), cotangents_like(inputs, seed=10)
    inside_L = jnp.asarray(ids_L == changed_id)

    def swap(array, new):
        return jnp.where(inside_L.reshape(1, -1, *(1,) * (array.ndim - 2)), new, array)

    owns_state, ends_row = changed_id == ids_L[0], changed_id == max(ids_L)
    altered = [swap(x, y) for x, y in zip(inputs[:5], other[:5], strict=True)] + [other[5] if owns_state else inputs[5]]
    altered_cotangents = swap(cotangents[0], other_cotangents[0]), other_cotangents[1] if ends_row else cotangents[1]
    (o, final), grads = compiled(variant)(inputs, segments, cotangents)
    (altered_o, altered_final), altered_grads = compiled(variant)(altered, segments, altered_cotangents)
    for before, after in zip((o, *grads[:5]), (altered_o, *altered_grads[:5]), strict=True):
        assert np.isfinite(after).all()
        np.testing.assert_array_equal(np.asarray(before)[:, ids_L != changed_id], np.asarray(after)[:, ids_L != changed_id])
        assert not np.asarray(after)[:, ids_L < 0].any()
    if not ends_row:
        np.testing.assert_array_equal(final, altered_final)
    if not owns_state:
        np.testing.assert_array_equal(grads[5], altered_grads[5])


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_equal_the_same_documents_alone(variant):
    case = dataclasses.replace(GOLDEN_SHAPE, documents=(5, 61, -2, 17, 111))
    inputs, segments = case.arrays(jnp.float32, seed=3, decay_per_channel=variant.startswith("kda")), case.segments()
    cotangents = cotangents_like(inputs)
    (o, final), grads = compiled(variant)(inputs, segments, cotangents)
    for number, length in ((0, 5), (1, 61), (3, 17), (4, 111)):
        start = int(np.argmax(np.asarray(segments.ids_BL)[0] == number))
        first, last = number == 0, number == 4

        def cut(x, start=start, length=length):  # the document, then padding: nothing new to compile
            return jnp.pad(x[:, start : start + length], ((0, 0), (0, 196 - length), *((0, 0),) * (x.ndim - 2)), constant_values=1)

        alone = [cut(x) for x in inputs[:5]] + [inputs[5] * first]
        ids_BL = np.broadcast_to(np.where(np.arange(196) < length, 0, -1), (2, 196))
        (alone_o, alone_final), alone_grads = compiled(variant)(alone, Segments.build(ids_BL), (cut(cotangents[0]), cotangents[1] * last))
        for ours, theirs in zip((o, *grads[:5]), (alone_o, *alone_grads[:5]), strict=True):
            assert rms(ours[:, start : start + length] - theirs[:, :length]) <= 2e-6 * rms(theirs)  # chunks begin elsewhere
        if first:
            assert rms(grads[5] - alone_grads[5]) <= 2e-6 * rms(grads[5])
        if last:
            assert rms(final - alone_final) <= 2e-6 * rms(final)


def test_grouped_heads_equal_repeated_ones(variant="kda_reference"):
    case = DeltaCase("grouped", 1, (17,), 2, 6, 4, 4)
    q, k, *rest = case.arrays(jnp.float32, seed=4, decay_per_channel=variant.startswith("kda"))
    cotangents = cotangents_like((q, k, *rest))
    out, (dq, dk, *grads) = compiled(variant)((q, k, *rest), case.segments(), cotangents)
    repeated = [jnp.repeat(x, 3, axis=2) for x in (q, k)]
    want, (dq_repeated, dk_repeated, *want_grads) = compiled(variant)((*repeated, *rest), case.segments(), cotangents)
    want_grads += [x.reshape(1, 17, 2, 3, 4).sum(3) for x in (dq_repeated, dk_repeated)]
    for ours, theirs in zip((*out, *grads, dq, dk), (*want, *want_grads), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


TREES = {  # eight runs of 108 tokens in all, so that one compilation serves them
    "branches_of_a_short_prefix": ((3, 3, 2, 1, 6, 40, 41, -12), {1: 0, 2: 0, 3: 2}),
    "padding_and_whole_chunks": ((-2, 16, 3, 32, -5, 40, 7, -3), {3: 1, 5: 3, 6: 1}),
    "a_chain_of_single_tokens": ((20, 1, 1, 1, 33, 17, 16, -19), {1: 0, 2: 1, 3: 2, 4: 3, 6: 4}),
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_tree_of_segments_equals_its_documents_written_out(variant, tree):
    """In float64, values and gradients; the state after the row is that of its last document."""
    lengths, parent = TREES[tree]
    ids_L = np.concatenate([np.full(abs(length), number if length > 0 else -1) for number, length in enumerate(lengths)])
    leaves = {number for number, length in enumerate(lengths) if length > 0} - set(parent.values())
    with jax.enable_x64(True):
        case = DeltaCase("tree", 1, None, 1, 2, 4, 4, length=ids_L.size)
        inputs = case.arrays("float64", seed=5, decay_per_channel=variant.startswith("kda"))
        cotangents = tuple(x.astype("float64") for x in cotangents_like(inputs))
        (o, final), grads = compiled(variant)(inputs, Segments.build(ids_L[None], [parent]), cotangents)
        o, want_grads, seen = np.asarray(o), [np.zeros(x.shape) for x in inputs], set()
        for leaf in sorted(leaves):
            path = [leaf]
            while path[0] in parent:
                path.insert(0, parent[path[0]])
            at, owns, ends = np.concatenate([np.flatnonzero(ids_L == number) for number in path]), path[0] == ids_L[0], leaf == max(ids_L)
            new_L = np.array([ids_L[t] not in seen for t in at])[None, :, None, None]  # a shared prefix's output counts once
            seen.update(path)
            place = np.full(ids_L.size, -1)  # the document, then padding: nothing new to compile
            place[: at.size] = at
            written_out = [jnp.asarray(np.asarray(x)[:, place]) for x in inputs[:5]] + [inputs[5] * owns]
            cotangent = np.where(new_L, np.asarray(cotangents[0])[:, at], 0)
            cotangent = np.pad(cotangent, ((0, 0), (0, ids_L.size - at.size), (0, 0), (0, 0)))
            ids_BL = np.where(place >= 0, 0, -1)[None]
            (want, want_final), alone = compiled(f"{variant[:3]}_reference")(
                written_out, Segments.build(ids_BL), (jnp.asarray(cotangent), cotangents[1] * ends)
            )
            np.testing.assert_allclose(o[:, at], np.asarray(want)[:, : at.size], rtol=1e-12, atol=1e-13)
            if ends:
                np.testing.assert_allclose(final, want_final, rtol=1e-12, atol=1e-13)
            for total, grad in zip(want_grads[:5], alone[:5], strict=True):
                total[:, at] += np.asarray(grad)[:, : at.size]
            want_grads[5] += np.asarray(alone[5]) * owns
    for ours, theirs in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-12)


def with_decay(g, *, decay_per_channel=True):
    """Inputs of the golden shape with log-decays g [L or 1]."""
    case = dataclasses.replace(GOLDEN_SHAPE, documents=(50, 146))
    inputs = list(case.arrays(jnp.float32, seed=0, decay_per_channel=decay_per_channel))
    g = jnp.asarray(g, jnp.float32).reshape(1, -1, 1, 1) if decay_per_channel else jnp.asarray(g, jnp.float32).reshape(1, -1, 1)
    inputs[3] = jnp.broadcast_to(g, inputs[3].shape)
    return inputs, case.segments(), cotangents_like(inputs)


def walls(mild, *, every, wall):
    return np.where(np.arange(196) % every == 2, wall, mild)


@pytest.mark.parametrize(
    "g",
    [[-1e5], [0.0], [-5.0], walls(-0.01, every=30, wall=-2000.0), walls(-0.1, every=3, wall=-60.0)],
    ids=["minus_1e5", "none", "minus_5", "rare_walls", "many_walls"],
)
@pytest.mark.parametrize("variant", ["kda_xla", "gdn_xla"])
def test_any_decay_is_exact_to_float32_without_a_promise(variant, g):
    """A decay of hundreds of nats must cost no digits of the mild ones after it: exponents are never differences of large sums."""
    everything = with_decay(g, decay_per_channel=variant == "kda_xla")
    agree(compiled(variant)(*everything), compiled(variant[:3] + "_reference")(*everything))


def test_the_bounded_form_bears_its_bound_over_whole_chunks():
    everything = with_decay([-5.0])
    (out, grads), (want, want_grads) = (compiled(variant)(*everything) for variant in ("kda_xla_bounded", "kda_reference"))
    agree(out, want)
    agree(grads, want_grads, tolerance=5e-5)  # dg here is what is left of sums 10 to 100 times as large


def test_equal_keys_keep_their_accuracy():
    """All keys the same, beta 1, no decay: I + A is full of ones. Powers of A would grow like binomials."""
    inputs, segments, cotangents = with_decay([0.0])
    inputs[1], inputs[4] = jnp.broadcast_to(inputs[1][:, :1], inputs[1].shape), jnp.ones_like(inputs[4])
    agree(*(compiled(variant)(inputs, segments, cotangents) for variant in ("kda_xla_bounded", "kda_reference")), tolerance=1e-5)


def test_gated_delta_is_kda_with_the_same_decay_in_all_channels():
    inputs, segments, cotangents = with_decay(walls(-0.1, every=7, wall=-4.0), decay_per_channel=False)
    out, grads = compiled("gdn_xla")(inputs, segments, cotangents)
    inputs[3] = jnp.broadcast_to(inputs[3][..., None], (*inputs[3].shape, 16))
    want, want_grads = compiled("kda_reference")(inputs, segments, cotangents)
    agree((out, grads), (want, [grad.sum(-1) if at == 3 else grad for at, grad in enumerate(want_grads)]))


def test_it_runs_inside_shard_map_with_checked_types():
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    case = DeltaCase("two_rows", 2, (5, 12), 1, 1, 4, 4)
    inputs = case.arrays(jnp.float32, seed=1, decay_per_channel=False)[:5]
    rows = jax.sharding.PartitionSpec("rows")

    def loss(inputs, segments):
        o_BLHM, state_BHCM = gated_delta(*inputs, segments=segments)
        return (o_BLHM**2).sum((1, 2, 3)) + state_BHCM.sum((1, 2, 3))

    def total(inputs, segments):
        return jax.shard_map(loss, mesh=mesh, in_specs=(rows, rows), out_specs=rows)(inputs, segments).sum()

    segments = jax.tree.map(jnp.asarray, case.segments())
    agree(jax.jit(jax.grad(total))(inputs, segments), jax.jit(jax.grad(lambda *both: loss(*both).sum()))(inputs, segments))


@pytest.mark.parametrize("op", [kda, gated_delta])
def test_wrong_inputs_are_named_with_their_shapes(op):
    q, k, v, g, beta, state = DeltaCase("wrong", 1, (4,), 2, 2, 4, 6).arrays(jnp.float32, seed=0, decay_per_channel=op is kda)
    with pytest.raises(ValueError, match=r"k_BLGC must be \(1, 4, 2, 4\).*got \(1, 4, 2, 3\)"):
        op(q, k[..., :3], v, g, beta)
    with pytest.raises(ValueError, match=r"H=2 heads, no multiple of the G=3 heads"):
        op(jnp.ones((1, 4, 3, 4)), jnp.ones((1, 4, 3, 4)), v, g, beta)
    with pytest.raises(ValueError, match=r"beta_BLH must be floating point, got int32"):
        op(q, k, v, g, beta.astype(jnp.int32))
    with pytest.raises(ValueError, match=r"initial_state_BHCM must be \(1, 2, 4, 6\)"):
        op(q, k, v, g, beta, initial_state_BHCM=state[:, :1])
    with pytest.raises(ValueError, match=r"segments are for \(1, 5\) tokens"):
        op(q, k, v, g, beta, segments=Segments.whole(1, 5))
    with pytest.raises(ValueError, match=r"q is \[B, L, G, C\]"):
        op(q[0], k, v, g, beta)
    with pytest.raises(ValueError, match=r"q is \(1, 0, 2, 4\) .* every size must be at least 1"):
        op(q[:, :0], k[:, :0], v[:, :0], g[:, :0], beta[:, :0])


def test_bfloat16_inputs_are_rounded_once_at_the_end():
    case = DeltaCase("bfloat16", 1, (40,), 2, 2, 8, 8)
    inputs = case.arrays(jnp.bfloat16, seed=7, decay_per_channel=True)
    o, final = jax.jit(functools.partial(kda, implementation="xla"))(*inputs[:5])
    want_o, want_final = jax.jit(functools.partial(kda, implementation="reference"))(*(x.astype(jnp.float32) for x in inputs[:5]))
    assert (o.dtype, final.dtype) == (jnp.bfloat16, jnp.float32)
    assert rms(o - want_o) <= 0.003 * rms(want_o)  # half a bfloat16 step (2**-9) at the rounding
    assert rms(final - want_final) <= 1e-6 * rms(want_final)
