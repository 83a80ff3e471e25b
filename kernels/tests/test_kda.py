"""KDA alone: strong decays and what min_log_decay promises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moejax_kernels.delta_cases import DeltaCase
from moejax_kernels.kda.api import kda
from moejax_kernels.segments import Segments

CASE = DeltaCase("forty_tokens", 1, (40,), 1, 2, 8, 8)


@functools.partial(jax.jit, static_argnames=("implementation", "min_log_decay"), compiler_options={"xla_backend_optimization_level": 1})
def run(inputs, *, implementation, min_log_decay=None):
    """(o, final_state) and the gradients of their sum."""
    def forward(q, k, v, g, beta, state):
        return kda(q, k, v, g, beta, segments=CASE.segments(), initial_state_BHCM=state, implementation=implementation,
                   min_log_decay=min_log_decay)
    out, pull = jax.vjp(forward, *inputs)
    return out, pull(jax.tree.map(jnp.ones_like, out))


def agree(got, want, tolerance=3e-6):
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.isfinite(ours).all()
        assert np.sqrt(np.mean(np.square(ours - theirs))) <= tolerance * np.sqrt(np.mean(np.square(theirs))) + 1e-12


def with_decay(g_BLHC):
    q, k, v, g, beta, state = CASE.arrays(jnp.float32, seed=0, decay_per_channel=True)
    return q, k, v, jnp.broadcast_to(jnp.asarray(g_BLHC, jnp.float32), g.shape), beta, state


@pytest.mark.parametrize("decay", ["minus_1e5", "a_wall_then_mild", "alternating", "none", "minus_5"])
def test_any_decay_is_exact_to_float32_without_a_promise(decay):
    """A decay of hundreds of nats must cost no digits of the mild ones after it: exponents are never differences of large sums."""
    mild = {"minus_1e5": -1e5, "a_wall_then_mild": -0.01, "alternating": -0.1, "none": 0.0, "minus_5": -5.0}[decay]
    g_BLHC = np.full((1, 40, 1, 1), mild)
    if decay == "a_wall_then_mild":
        g_BLHC[:, 2:6] = -2000.0
    if decay == "alternating":
        g_BLHC[:, ::3] = -60.0
    inputs = with_decay(g_BLHC)
    agree(run(inputs, implementation="xla"), run(inputs, implementation="reference"))


def test_the_bounded_form_bears_its_bound_over_whole_chunks():
    inputs = with_decay(-5.0)
    (out, grads), (want, want_grads) = run(inputs, implementation="xla", min_log_decay=-5.0), run(inputs, implementation="reference")
    agree(out, want)
    agree(grads, want_grads, tolerance=5e-5)  # dg here is what is left of sums 10 to 100 times as large


def test_a_weaker_promise_takes_the_general_form():
    inputs = with_decay(-30.0)
    agree(run(inputs, implementation="xla", min_log_decay=-30.0), run(inputs, implementation="reference"))


def test_equal_keys_keep_their_accuracy():
    """All keys the same, beta 1, no decay: I + A is full of ones. Powers of A would grow like binomials."""
    q, k, v, g, beta, state = with_decay(0.0)
    inputs = q, jnp.broadcast_to(k[:, :1], k.shape), v, g, jnp.ones_like(beta), state
    agree(run(inputs, implementation="xla", min_log_decay=-5.0), run(inputs, implementation="reference"), tolerance=1e-5)


def test_it_runs_inside_shard_map_with_checked_types():
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    case = DeltaCase("two_rows", 2, (5, 12), 1, 1, 4, 4)
    inputs = case.arrays(jnp.float32, seed=1, decay_per_channel=True)[:5]
    segments = jax.tree.map(jnp.asarray, case.segments())
    rows = jax.sharding.PartitionSpec("rows")

    def loss(inputs, segments):
        o_BLHM, state_BHCM = kda(*inputs, segments=segments, min_log_decay=-5.0)
        return (o_BLHM**2).sum((1, 2, 3)) + state_BHCM.sum((1, 2, 3))

    def total(inputs, segments):
        return jax.shard_map(loss, mesh=mesh, in_specs=(rows, rows), out_specs=rows)(inputs, segments).sum()

    got = jax.jit(jax.grad(total))(inputs, segments)
    want = jax.jit(jax.grad(lambda inputs, segments: loss(inputs, segments).sum()))(inputs, segments)
    agree(got, want)


def test_a_row_of_another_length_asks_for_its_own_segments():
    inputs = CASE.arrays(jnp.float32, seed=0, decay_per_channel=True)[:5]
    with pytest.raises(ValueError, match=r"kda: segments are for \(1, 41\) tokens, q has \(1, 40\)"):
        kda(*inputs, segments=Segments.whole(1, 41))
