"""Gated DeltaNet alone: it is KDA with one decay for all channels of a head."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moejax_kernels.delta_cases import DeltaCase
from moejax_kernels.gated_delta.api import gated_delta
from moejax_kernels.kda.api import kda

CASE = DeltaCase("grouped", 1, (10, 30), 1, 2, 8, 6)


@functools.partial(jax.jit, static_argnames=("op", "implementation"), compiler_options={"xla_backend_optimization_level": 1})
def run(inputs, *, op, implementation):
    """(o, final_state) and the gradients of their sum; KDA gets the decay in every channel."""
    def forward(q, k, v, g, beta, state):
        g = jnp.broadcast_to(g[..., None], (*g.shape, q.shape[-1])) if op is kda else g
        return op(q, k, v, g, beta, segments=CASE.segments(), initial_state_BHCM=state, implementation=implementation)
    out, pull = jax.vjp(forward, *inputs)
    return out, pull(jax.tree.map(jnp.ones_like, out))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("walls", [False, True])
def test_it_is_kda_with_one_decay_per_head(implementation, walls):
    q, k, v, g, beta, state = CASE.arrays(jnp.float32, seed=0, decay_per_channel=False)
    inputs = q, k, v, jnp.where(walls & (jnp.arange(40) % 5 == 2)[None, :, None], -3000.0, g), beta, state
    got, want = run(inputs, op=gated_delta, implementation=implementation), run(inputs, op=kda, implementation="reference")
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.isfinite(ours).all()
        assert np.sqrt(np.mean(np.square(ours - theirs))) <= 3e-6 * np.sqrt(np.mean(np.square(theirs))) + 1e-12
