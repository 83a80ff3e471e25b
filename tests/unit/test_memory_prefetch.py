"""The scan that fetches ahead is `jax.lax.scan`, in values and gradients, whatever flows through it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from moejax.memory import prefetch

POLICY = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=["kept"], names_which_can_be_offloaded=["away"], offload_src="device", offload_dst="pinned_host"
)


def body(carry, x, constants):
    """A layer with floats and integers in all of its inputs and outputs."""

    @jax.checkpoint
    def unnamed(h_BD):
        return jnp.tanh(h_BD)

    def inside(carry, x, constants):
        state_BD = checkpoint_name(carry["state"], "away")
        h_BD = checkpoint_name(state_BD @ x["weight"], "away")
        order_B = checkpoint_name(jnp.argsort(h_BD[:, 0]), "kept")
        y_BD = unnamed(h_BD)[order_B] * constants["mask"][:, None] * x["factor"]
        return {"state": state_BD + y_BD, "count": carry["count"] + x["number"]}, {"sum": jnp.sum(h_BD), "order": order_B}

    return jax.checkpoint(inside, policy=POLICY)(carry, x, constants)


def inputs(num_steps: int):
    keys = jax.random.split(jax.random.key(0), 3)
    xs = {
        "weight": jax.random.normal(keys[0], (num_steps, 8, 8)),
        "factor": jax.random.normal(keys[1], (num_steps,)),
        "number": jnp.arange(num_steps),
    }
    return {"state": jax.random.normal(keys[2], (4, 8)), "count": jnp.int32(0)}, xs, {"mask": jnp.array([1, 0, 1, 1])}


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_values_and_gradients_are_those_of_a_plain_scan(num_steps):
    carry, xs, constants = inputs(num_steps)

    def loss(scan, state, weight, factor):
        last, outs = scan(body, carry | {"state": state}, xs | {"weight": weight, "factor": factor}, constants)
        return jnp.sum(last["state"] ** 2) + jnp.sum(outs["sum"]) * last["count"], (last["count"], outs["order"])

    plain = lambda body, carry, xs, constants: jax.lax.scan(lambda carry, x: body(carry, x, constants), carry, xs)
    both = [
        jax.jit(jax.value_and_grad(lambda *args, scan=scan: loss(scan, *args), argnums=(0, 1, 2), has_aux=True))(
            carry["state"], xs["weight"], xs["factor"]
        )
        for scan in (prefetch.scan, plain)
    ]
    jax.tree.map(np.testing.assert_array_equal, *both)


def test_constants_and_inputs_of_a_step_are_not_stacked_again():
    """Kept per step are the two results that go away, the order, and what the carry's cotangent needs: no weight, no mask."""
    carry, xs, constants = inputs(5)
    pull = jax.eval_shape(lambda carry, xs: jax.vjp(lambda carry, xs: prefetch.scan(body, carry, xs, constants), carry, xs)[1], carry, xs)
    stacked = [leaf.shape for leaf in jax.tree.leaves(pull) if leaf.shape[:1] == (5,)]
    assert sorted(stacked) == sorted([(5, 8, 8), (5,), (5,), (5, 4, 8), (5, 4, 8), (5, 4)]), stacked
