"""Matmuls between activations and master weights: the precision contract in one place."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


def project(spec: str, x, w, *, placed: P | None = None) -> jax.Array:
    """`einsum(spec, x, w)` in x's dtype; the weight's gradient is a product accumulated, and reduced over devices, in w's dtype.

    Args:
      spec: "a,b->c" where every index of `a` and of `b` is in `c` or in the other one.
      x: activations, e.g. bfloat16.
      w: master weight, e.g. float32; cast to x's dtype for the product.
      placed: inside an island, where w is this device's shard: where the dims of the whole weight lie. It is gathered in x's dtype.
    """
    return _project(spec, placed, x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _project(spec, placed, x, w):
    return jnp.einsum(spec, x, _gathered(w.astype(x.dtype), placed))


def _save(spec, placed, x, w):
    return _project(spec, placed, x, w), (x, w)


def _grads(spec, placed, saved, dy):
    x, w = saved
    (in_x, in_w), out = spec.split("->")[0].split(","), spec.split("->")[1]
    dx = jnp.einsum(f"{out},{in_w}->{in_x}", dy, _gathered(w.astype(x.dtype), placed))
    # both are summed over their first dims: a CPU turns the product's first operand, which shall be the smaller one
    (first, a), (second, b) = sorted(((in_x, x), (out, dy)), key=lambda operand: operand[1].size)
    dw = jnp.einsum(f"{first},{second}->{in_w}", a, b, preferred_element_type=w.dtype).astype(w.dtype)
    for dim, axes in _split_dims(placed):
        dw = jax.lax.psum_scatter(dw, axes, scatter_dimension=dim, tiled=True)
    return dx, dw


_project.defvjp(_save, _grads)


def _gathered(w, placed: P | None):
    for dim, axes in _split_dims(placed):
        w = jax.lax.all_gather(w, axes, axis=dim, tiled=True)
    return w


def _split_dims(placed: P | None) -> list[tuple[int, tuple[str, ...]]]:
    """Dims that are split over more than one device, and the mesh axes that split them."""
    dims = ((dim, (axes,) if isinstance(axes, str) else axes or ()) for dim, axes in enumerate(placed or ()))
    long = ((dim, tuple(axis for axis in axes if jax.lax.axis_size(axis) > 1)) for dim, axes in dims)
    return [(dim, axes) for dim, axes in long if axes]


def float_inside(x):
    """x in the dtype of delicate arithmetic: float32, or float64 if x is."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
