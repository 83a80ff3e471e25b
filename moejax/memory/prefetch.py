"""A scan over layers whose offloaded results come back one step ahead.

`jax.lax.scan` takes a step's results from the host when the step's backward pass begins, and the step waits. Here the backward pass of each
step begins the copies of the step before it, the next one to come, and hands them on: a copy has a whole step to arrive.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def scan(body: Callable[[Any, Any, Any], tuple[Any, Any]], carry: Any, xs: Any, constants: Any) -> tuple[Any, Any]:
    """`jax.lax.scan` of `carry, out = body(carry, x, constants)`, with the same results and gradients.

    Args:
      body: what it keeps for its backward pass and where is up to `jax.checkpoint` inside it. It closes over no array.
      carry: tree of arrays; no gradient flows through those of integers.
      xs: tree of arrays [n, ...].
      constants: tree of arrays that all steps see; no gradient flows to them.
    """

    @jax.custom_vjp
    def run(carry, xs, constants):
        return jax.lax.scan(lambda carry, x: body(carry, x, constants), carry, xs)

    found: list[_Residuals] = []

    def save(carry, xs, constants):
        def step(carry, x):
            (carry, out), pull = jax.vjp(body, carry, x, constants)
            residuals, own = _Residuals.of(pull, x, constants, (carry, out))
            found[:] = [residuals]
            return carry, (out, own)

        carry, (outs, own) = jax.lax.scan(step, carry, xs)
        return (carry, outs), (own, xs, constants)

    def grads(saved, cotangents):
        (own, xs, constants), (residuals,) = saved, found
        dcarry, douts = (_floats(tree) for tree in cotangents)
        on_host, on_device = _part(own, residuals.on_host)
        num_steps = jax.tree.leaves(xs)[0].shape[0]

        def fetch(number):
            take = lambda array: jax.lax.dynamic_index_in_dim(array, number, 0, keepdims=False)
            return [jax.device_put(take(array), jax.memory.Space.Device) for array in on_host]

        def step(state, inputs):
            (dcarry, fetched), (number, x, on_device, dout) = state, inputs
            following = fetch(jnp.maximum(number - 1, 0))
            own = _join(fetched, on_device, residuals.on_host)
            dcarry, dx = residuals.pull(own, x, constants, dcarry, dout)
            return (dcarry, following), dx

        inputs = jnp.arange(num_steps), xs, on_device, douts
        (dcarry, _), dxs = jax.lax.scan(step, (dcarry, fetch(num_steps - 1)), inputs, reverse=True)
        return _with_zeros(dcarry, residuals.outputs[0]), _with_zeros(dxs, xs), None

    run.defvjp(save, grads)
    return run(carry, xs, constants)


@dataclasses.dataclass(frozen=True, slots=True)
class _Residuals:
    """What the backward pass of one step reads: arrays of its own, and of what it was given only which they are."""

    tree: Any
    """Structure of the step's VJP."""
    places: tuple[int | None, ...]
    """For each array that is read: its place among the leaves of (x, constants), or None for one of the step's own."""
    on_host: tuple[bool, ...]
    """For each of the step's own: where the forward pass left it."""
    outputs: Any
    """Shapes of carry and out."""

    @classmethod
    def of(cls, vjp, x, constants, outputs) -> tuple["_Residuals", list]:
        """The description, and the step's own arrays."""
        given = jax.tree.leaves((x, constants))
        read, tree = jax.tree.flatten(vjp)
        places = tuple(next((place for place, array in enumerate(given) if array is leaf), None) for leaf in read)
        own = [leaf for leaf, place in zip(read, places, strict=True) if place is None]
        on_host = tuple(leaf.aval.memory_space == jax.memory.Space.Host for leaf in own)
        shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), outputs)
        return cls(tree, places, on_host, shapes), own

    def pull(self, own, x, constants, dcarry, dout):
        """Cotangents of the carry and of x, those of floats alone.

        What of `own` was left on the host is on the device: the copy that stands inside the VJP has nothing to do any more.
        """
        given, rest = jax.tree.leaves((x, constants)), iter(own)
        vjp = jax.tree.unflatten(self.tree, [next(rest) if place is None else given[place] for place in self.places])
        dcarry, dx, _ = vjp(_with_zeros((dcarry, dout), self.outputs))
        return _floats(dcarry), _floats(dx)


def _is_float(array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


def _floats(tree) -> list:
    """Leaves of floats: cotangents of integers are no arrays that a scan could take."""
    return [leaf for leaf in jax.tree.leaves(tree) if _is_float(leaf)]


def _with_zeros(floats, like):
    """The tree of `like` from the leaves that `_floats` took of it."""
    rest = iter(jax.tree.leaves(floats))
    return jax.tree.map(lambda leaf: next(rest) if _is_float(leaf) else np.zeros(leaf.shape, jax.dtypes.float0), like)


def _part(arrays, flags):
    """Those with a flag, and those without."""
    pairs = list(zip(arrays, flags, strict=True))
    return [array for array, flag in pairs if flag], [array for array, flag in pairs if not flag]


def _join(flagged, others, flags):
    """The inverse of `_part`."""
    flagged, others = iter(flagged), iter(others)
    return [next(flagged) if flag else next(others) for flag in flags]
