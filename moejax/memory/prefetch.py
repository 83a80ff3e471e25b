"""Layers whose offloaded results come back one step ahead.

A plain backward pass takes a step's results from the host when it comes to the step, and waits. Here the backward pass of each step, a layer or
a turn of the scan over layers, begins the copies of the step that it comes to next, and hands them on: a copy has a whole step to arrive. Those
of the layer below a scan come with the scan's first.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One step, or several that are scanned."""

    body: Callable[[Any, Any, Any], tuple[Any, Any]]
    """`carry, out = body(carry, x, constants)`. What it keeps for its backward pass and where is up to `jax.checkpoint` inside it; it closes
    over no array."""
    x: Any
    """Tree of arrays; with `num_steps` they are stacked, [num_steps, ...]."""
    num_steps: int | None = None
    """None: one step, not scanned."""

    def run(self, carry: Any, constants: Any) -> tuple[Any, Any]:
        """Carry and out; those of scanned steps are stacked."""
        if self.num_steps is None:
            return self.body(carry, self.x, constants)
        return jax.lax.scan(lambda carry, x: self.body(carry, x, constants), carry, self.x)


def plain(stages: Sequence[Stage], carry: Any, constants: Any) -> tuple[Any, list]:
    """The stages one after the other: the last carry, and the out of each."""
    outs = []
    for stage in stages:
        carry, out = stage.run(carry, constants)
        outs.append(out)
    return carry, outs


def ahead(stages: Sequence[Stage], carry: Any, constants: Any) -> tuple[Any, list]:
    """`plain`, with the same results and gradients; in the backward pass results come from the host one step ahead.

    Args:
      stages: at least one.
      carry: tree of arrays; no gradient flows through those of integers.
      constants: tree of arrays that all steps see; no gradient flows to them.
    """

    @jax.custom_vjp
    def run(carry, xs, constants):
        return plain([dataclasses.replace(stage, x=x) for stage, x in zip(stages, xs, strict=True)], carry, constants)

    found: list[_Residuals] = []

    def save(carry, xs, constants):
        found.clear()
        outs, owns = [], []
        for stage, x in zip(stages, xs, strict=True):
            described: list[_Residuals] = []
            body = functools.partial(_with_residuals, stage.body, described)
            carry, (out, own) = dataclasses.replace(stage, body=body, x=x).run(carry, constants)
            found.append(described[-1])
            if stage.num_steps is None:  # a scan's step ends with its copies too
                on_host, on_device = _part(own, found[-1].on_host)
                carry, on_host = jax.lax.optimization_barrier((carry, on_host))
                own = _join(on_host, on_device, found[-1].on_host)
            outs.append(out)
            owns.append(own)
        return (carry, outs), (owns, xs, constants)

    def grads(saved, cotangents):
        (owns, xs, constants), (dcarry, douts) = saved, cotangents
        backs = [
            _Back(stage, residuals, *_part(own, residuals.on_host), x, _floats(dout), constants)
            for stage, residuals, own, x, dout in zip(stages, found, owns, xs, douts, strict=True)
        ]
        dcarry, dxs = _floats(dcarry), []
        coming = _next(backs)
        fetched = [back.fetch(back.on_host) for back in coming]
        while backs:
            back, own = backs.pop(), fetched.pop()
            if not fetched and (coming := _next(backs)):  # beside this step, and not before
                dcarry, on_host = jax.lax.optimization_barrier((dcarry, [other.on_host for other in coming]))
                fetched = [other.fetch(arrays) for other, arrays in zip(coming, on_host, strict=True)]
            dcarry, dx = back.run(dcarry, own)
            dxs.insert(0, _with_zeros(dx, back.x))
        return _with_zeros(dcarry, found[0].outputs[0]), dxs, None

    run.defvjp(save, grads)
    return run(carry, [stage.x for stage in stages], constants)


def _with_residuals(body, described: list, carry, x, constants):
    """A step that hands out what its backward pass reads beside what it hands on; tracing it appends the description."""
    (carry, out), pull = jax.vjp(body, carry, x, constants)
    residuals, own = _Residuals.of(pull, x, constants, (carry, out))
    described.append(residuals)
    return carry, (out, own)


@dataclasses.dataclass(frozen=True, slots=True)
class _Back:
    """The backward pass of a stage."""

    stage: Stage
    residuals: "_Residuals"
    on_host: list
    on_device: list
    x: Any
    dout: list
    constants: Any

    def fetch(self, on_host: list) -> list:
        """Begins the copies of the last step's results."""
        return _to_device(_take(on_host, None if self.stage.num_steps is None else self.stage.num_steps - 1))

    def run(self, dcarry, fetched: list):
        """Cotangents of the carry and of x.

        Args:
          fetched: what the host held of the last step.
        """
        if self.stage.num_steps is None:
            return self._pull(None, dcarry, fetched)

        def step(state, number):
            dcarry, fetched, dxs = state
            following = _to_device(_take(self.on_host, jnp.maximum(number - 1, 0)))
            dcarry, dx = self._pull(number, dcarry, fetched)
            # XLA takes the writes into the stacks for slow: behind the last of them it would put off the copies until the matmuls are done.
            # One gradient tied to the copies keeps them before it; all of them would have to lie beside the stacks at once.
            small = min(range(len(dx)), key=lambda at: dx[at].size)
            dx[small], following = jax.lax.optimization_barrier((dx[small], following))
            return (dcarry, following, _put(dxs, dx, number)), None

        dxs = [jnp.zeros_like(leaf) for leaf in _floats(self.x)]
        (dcarry, _, dxs), _ = jax.lax.scan(step, (dcarry, fetched, dxs), jnp.arange(self.stage.num_steps), reverse=True)
        return dcarry, dxs

    def _pull(self, number, dcarry, fetched):
        x, on_device, dout = (_take(tree, number) for tree in (self.x, self.on_device, self.dout))
        return self.residuals.pull(_join(fetched, on_device, self.residuals.on_host), x, self.constants, dcarry, dout)


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


def _next(backs: list[_Back]) -> list[_Back]:
    """The stages whose copies begin together, in their order: the last one, and with a scan, which fetches for itself alone, the one before."""
    first = len(backs) - 1
    while first > 0 and backs[first].stage.num_steps is not None:
        first -= 1
    return backs[max(first, 0) :]


def _to_device(arrays: list) -> list:
    return [jax.device_put(array, jax.memory.Space.Device) for array in arrays]


def _take(tree, number):
    """One step's part of stacked arrays; all where there is one step alone."""
    if number is None:
        return tree
    return jax.tree.map(lambda stack: jax.lax.dynamic_index_in_dim(stack, number, 0, keepdims=False), tree)


def _put(stacks, parts, number):
    """The stacks with one step's part set."""
    return [jax.lax.dynamic_update_index_in_dim(stack, part, number, 0) for stack, part in zip(stacks, parts, strict=True)]


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
