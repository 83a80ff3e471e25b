"""Stages whose results are fetched ahead have the values and gradients of the same stages run plainly, whatever flows through them."""

import jax
import jax.extend
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


def stages(weight, factor, number, shape):
    """As many steps as there are weights: stages of `shape` steps each, None for one that is not scanned."""
    found, first = [], 0
    for num_steps in shape:
        x = {"weight": weight, "factor": factor, "number": number}
        x = jax.tree.map(lambda stack, at=first, n=num_steps: stack[at] if n is None else stack[at : at + n], x)
        found.append(prefetch.Stage(body=body, x=x, num_steps=num_steps))
        first += num_steps or 1
    return found


@pytest.mark.parametrize("shape", [(1,), (2,), (5,), (None,), (None, None, None), (None, 3, None), (2, 3), (3, None)], ids=str)
def test_values_and_gradients_are_those_of_the_stages_one_by_one(shape):
    carry, xs, constants = inputs(sum(num_steps or 1 for num_steps in shape))

    def loss(run, state, weight, factor):
        last, outs = run(stages(weight, factor, xs["number"], shape), carry | {"state": state}, constants)
        sums = sum(jnp.sum(out["sum"]) for out in outs)
        return jnp.sum(last["state"] ** 2) + sums * last["count"], (last["count"], [out["order"] for out in outs])

    both = [
        jax.jit(jax.value_and_grad(lambda *args, run=run: loss(run, *args), argnums=(0, 1, 2), has_aux=True))(
            carry["state"], xs["weight"], xs["factor"]
        )
        for run in (prefetch.ahead, prefetch.plain)
    ]
    jax.tree.map(np.testing.assert_array_equal, *both)


@pytest.mark.parametrize("shape", [(5,), (None, 3, None)], ids=str)
def test_every_result_comes_back_once_and_those_of_a_scans_first_step_twice(shape):
    """Two results of each step are away. In its last turn a loop has nothing else to fetch."""
    num_steps = sum(n or 1 for n in shape)
    copies = sum(n + 1 if n else 1 for n in shape)
    carry, xs, constants = inputs(num_steps)
    run = lambda state, weight: prefetch.ahead(stages(weight, xs["factor"], xs["number"], shape), carry | {"state": state}, constants)
    loss = lambda state, weight: jnp.sum(run(state, weight)[0]["state"])
    assert copies_back(jax.make_jaxpr(jax.grad(loss))(carry["state"], xs["weight"]).jaxpr) == 2 * copies


def copies_back(jaxpr, *, times: int = 1) -> int:
    """Copies that a traced function makes from the host's memory, apart from those inside a layer, which find their array on the device."""
    found = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "device_put":
            found += times * sum(var.aval.memory_space == jax.memory.Space.Host for var in eqn.invars)
        elif eqn.primitive.name != "remat2":
            each = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
            found += sum(copies_back(inner, times=each) for inner in jax.extend.core.jaxprs_in_params(eqn.params))
    return found


def test_constants_and_inputs_of_a_step_are_not_stacked_again():
    """Kept per step are the two results that go away, the order, and what the carry's cotangent needs: no weight, no mask."""
    carry, xs, constants = inputs(5)
    run = lambda carry, xs: prefetch.ahead([prefetch.Stage(body=body, x=xs, num_steps=5)], carry, constants)
    pull = jax.eval_shape(lambda carry, xs: jax.vjp(run, carry, xs)[1], carry, xs)
    stacked = [leaf.shape for leaf in jax.tree.leaves(pull) if leaf.shape[:1] == (5,)]
    assert sorted(stacked) == sorted([(5, 8, 8), (5,), (5,), (5, 4, 8), (5, 4, 8), (5, 4)]), stacked
